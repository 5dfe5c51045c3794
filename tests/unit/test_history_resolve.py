"""What the parent makes of a body: whose business a field is, and what goes before its input."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from mlxpool.parent.history import compact, input_items
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Ask, Resolved, items_of, read_ask, resolve, shifted, source_of
from mlxpool.shared.api import responses
from mlxpool.shared.api.response_object import unseal
from mlxpool.shared.errors import ApiError

MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "said", "annotations": [], "logprobs": []}],
}


def stored(
    status: str = "completed", given: str = '[{"role":"user","content":"one"}]', **fields: Any
) -> Record:
    response = {"id": "resp_1", "status": status, "output": [MESSAGE], "instructions": "Be brief.", **fields}
    return Record("resp_1", 0.0, status, "m", False, None, given.encode(), msgspec.json.encode(response))


def ask(**fields: Any) -> Ask:
    return read_ask(json.dumps({"model": "m", **fields}).encode())


def made(asked: Ask, record: Record | None = None, **more: Any) -> Resolved:
    source = None if record is None else source_of(record)
    return resolve(asked, source, more.pop("items", {}), max_body_bytes=10**6, **more)


def test_a_body_that_needs_nothing_goes_on_byte_for_byte() -> None:
    body = b'{ "model":"m" ,\n "input":[ {"role":"user","content":"\\u00e9"} ], "store": true, "x": 1e2 }'
    resolved = resolve(read_ask(body), None, {}, max_body_bytes=10)
    assert resolved.body == body
    assert resolved.input == b'[ {"role":"user","content":"\\u00e9"} ]'
    assert made(ask(input="hi")).input == b'[{"type":"message","role":"user","content":"hi"}]'
    assert made(ask()).input is None


def test_what_came_before_goes_before_what_is_new_and_the_worker_hears_of_no_id() -> None:
    resolved = made(ask(input="two", previous_response_id="resp_1", temperature=0.5), stored())
    body = json.loads(resolved.body)
    said = {**MESSAGE, "content": [{"type": "output_text", "text": "said", "annotations": []}]}
    assert body == {
        "model": "m",
        "temperature": 0.5,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "one"},
            said,
            {"type": "message", "role": "user", "content": "two"},
        ],
    }
    assert (json.loads(resolved.input or b""), resolved.shift) == (body["input"], 2)
    assert responses.parse(resolved.body).request.messages[-1].content == "two"


@pytest.mark.parametrize(
    ("own", "shown"), [("Be long.", "Be long."), ("", ""), (None, "Be brief."), (..., "Be brief.")]
)
def test_instructions_carry_over_only_where_there_are_none(own: Any, shown: str) -> None:
    fields = {} if own is ... else {"instructions": own}
    body = json.loads(made(ask(input="x", previous_response_id="resp_1", **fields), stored()).body)
    assert body["instructions"] == shown


def test_a_conversation_may_go_on_without_anything_new() -> None:
    for fields in ({}, {"input": None}, {"input": []}):
        resolved = made(ask(previous_response_id="resp_1", **fields), stored())
        assert len(json.loads(resolved.body)["input"]) == 2


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
def test_every_end_can_be_gone_on_from(status: str) -> None:
    assert made(ask(input="x", previous_response_id="resp_1"), stored(status)).shift == 2


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_what_still_runs_can_not(status: str) -> None:
    with pytest.raises(ApiError, match=status) as refused:
        source_of(stored(status))
    assert (refused.value.status, refused.value.param) == (400, "previous_response_id")


def test_items_stand_in_place_of_their_references() -> None:
    asked = ask(
        input=[
            {"type": "item_reference", "id": "a"},
            {"role": "user", "content": '"item_reference"'},
            {"type": "item_reference", "id": "b"},
            {"type": "item_reference", "id": "a"},
        ]
    )
    assert asked.references == {0: "a", 2: "b", 3: "a"}
    body = json.loads(made(asked, items={"a": b'{"n":1}', "b": b'{"n":2}'}).body)
    user = {"role": "user", "content": '"item_reference"'}
    assert body["input"] == [{"n": 1}, user, {"n": 2}, {"n": 1}]


def test_an_item_that_is_named_too_often_is_refused_before_it_is_written_out() -> None:
    asked = ask(input=[{"type": "item_reference", "id": "a"}] * 1000)
    item = b'{"n":"%b"}' % (b"x" * 100_000)
    tracemalloc.start()
    with pytest.raises(ApiError, match="100008000 bytes") as refused:
        made(asked, items={"a": item})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.status, refused.value.param) == (413, "input")
    assert peak < 10**6
    most = ask(input=[{"type": "item_reference", "id": "a"}] * 1024)
    assert len(most.references) == 1024
    with pytest.raises(ApiError, match="1025 items.*1024") as refused:
        ask(input=[{"type": "item_reference", "id": "a"}] * 1025)
    assert (refused.value.status, refused.value.param) == (400, "input")


def test_items_of_an_output_are_as_input_has_them_and_cut_calls_are_none() -> None:
    call = {"id": "fc_1", "type": "function_call", "status": "incomplete", "arguments": '{"a'}
    record = stored(output=[MESSAGE, call, {**call, "id": "fc_2", "status": "completed"}])
    items = items_of(record)
    assert list(items) == ["msg_1", "fc_1", "fc_2"]
    assert json.loads(items["msg_1"] or b"")["content"][0]["text"] == "said"
    assert "logprobs" not in json.loads(items["msg_1"] or b"")["content"][0]
    assert items["fc_1"] is None
    assert json.loads(items["fc_2"] or b"")["id"] == "fc_2"


@pytest.mark.parametrize("name", ["stream", "store", "background"])
def test_fields_that_the_parent_may_force_are_checked_before(name: str) -> None:
    with pytest.raises(ApiError, match=name) as refused:
        ask(input="x", **{name: "yes"})
    assert (refused.value.status, refused.value.param) == (400, name)
    assert ask(input="x", **{name: None}).body


def test_a_forced_field_replaces_the_clients_and_nothing_else() -> None:
    body = json.loads(made(ask(input="x", stream=False, seed=5), forced={"stream": True}).body)
    assert body == {"model": "m", "input": "x", "stream": True, "seed": 5}
    same = ask(input="x", stream=True)
    assert made(same, forced={"stream": True}).body == same.body


def test_a_conversation_over_the_limit_names_it_and_the_way_out() -> None:
    with pytest.raises(ApiError, match="compact") as refused:
        made(ask(input="x" * 10**6, previous_response_id="resp_1"), stored())
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_indices_in_a_refusal_count_from_the_clients_first_item() -> None:
    assert shifted("input[7].type: input[12] is no item; see input[3]", 5) == (
        "input[2].type: input[7] is no item; see input[3]"
    )
    assert shifted("myinput[7] and input[x]", 5) == "myinput[7] and input[x]"


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"role": "user", "content": "hi"}, "message", "hi"),
        ({"role": "assistant", "content": "yo"}, "message", "yo"),
        ({"type": "message", "id": "msg_own", "role": "user", "content": []}, "message", None),
        ({"type": "function_call_output", "call_id": "c", "output": "o"}, "function_call_output", None),
        (5, "invalid", None),
    ],
)
def test_listed_items_have_ids_that_stay(given: Any, kind: str, text: str | None) -> None:
    raw = json.dumps([given, given]).encode()
    one, two = input_items.listed(raw)
    assert input_items.listed(raw) == [one, two]
    assert one["type"] == kind
    assert one["id"]
    assert one["id"] != two["id"]
    assert not isinstance(given, dict) or one["id"] == given.get("id", one["id"])
    if text is not None:
        assert one["content"][0]["text"] == text


def test_a_page_knows_whether_there_is_more() -> None:
    raw = json.dumps([{"role": "user", "content": str(n)} for n in range(5)]).encode()
    assert [input_items.page(raw, limit, "asc", None)["has_more"] for limit in (4, 5, 6)] == [
        True,
        False,
        False,
    ]
    last = input_items.page(raw, 5, "asc", None)["last_id"]
    empty = input_items.page(raw, 5, "asc", last)
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_end_where_items_have_the_same_id(order: input_items.Order) -> None:
    ids = [f"m{n}" for n in range(60)]
    ids[39], ids[40], ids[41] = "m19", "m19", "m20"
    raw = json.dumps([{"id": one, "role": "user", "content": str(n)} for n, one in enumerate(ids)]).encode()
    told: list[str] = []
    after = None
    for _ in range(3):
        page = input_items.page(raw, 20, order, after)
        told += [item["content"][0]["text"] for item in page["data"]]
        after = page["last_id"]
    assert told == [str(n) for n in (range(60) if order == "asc" else range(59, -1, -1))]
    assert page["has_more"] is False


@pytest.mark.parametrize("given", [b"[]", b"[ ]", b" [\n] ", None])
def test_there_must_be_something_to_compact(given: bytes | None) -> None:
    with pytest.raises(ApiError, match="nothing to compact") as refused:
        compact.question({"model": msgspec.Raw(b'"m"')}, given)
    assert (refused.value.status, refused.value.param) == (400, "input")


@pytest.mark.parametrize(("asked", "used"), [(None, 4096), (..., 4096), (9, 9)])
def test_a_summary_has_a_ceiling_and_one_that_was_cut_is_refused(asked: Any, used: int) -> None:
    fields = {} if asked is ... else {"max_output_tokens": asked}
    resolved = made(ask(input="one", **fields))
    assert json.loads(compact.question(resolved.raws, resolved.input))["max_output_tokens"] == used
    answer = {"output": [MESSAGE], "usage": None, "created_at": 7, "status": "incomplete"}
    answer["max_output_tokens"] = used
    with pytest.raises(ApiError, match=rf"cut.*\({used}\)") as refused:
        compact.compacted(msgspec.json.encode(answer), b"[]", "resp_c", "cmp_1")
    assert (refused.value.status, refused.value.param) == (400, "max_output_tokens")


def test_a_compaction_keeps_the_last_words_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "KEPT_CHARS", 10)
    given = json.dumps(
        [
            {"role": "user", "content": "too old"},
            {"role": "user", "content": "12345"},
            {"role": "assistant", "content": "long answers are summed up"},
            {"role": "user", "content": "1234"},
        ]
    ).encode()
    answer = {"output": [MESSAGE], "usage": {"input_tokens": 1}, "created_at": 7, "status": "completed"}
    told = compact.compacted(msgspec.json.encode(answer), given, "resp_c", "cmp_1")
    assert [item["content"][0]["text"] for item in told["output"][:-1]] == ["12345", "1234"]
    assert unseal(told["output"][-1]["encrypted_content"]) == "said"
    assert (told["id"], told["object"], told["created_at"]) == ("resp_c", "response.compaction", 7)
    answer["output"] = []
    with pytest.raises(ApiError, match="no summary"):
        compact.compacted(msgspec.json.encode(answer), given, "resp_c", "cmp_1")


def test_the_question_for_a_summary_is_the_conversations_next_turn() -> None:
    resolved = made(ask(input="two", previous_response_id="resp_1", tools=[], reasoning=None), stored())
    body = json.loads(compact.question(resolved.raws, resolved.input))
    assert body["input"][:-1] == json.loads(resolved.input or b"")
    assert body["input"][-1]["content"] == compact.INSTRUCTION
    assert body["store"] is False
    assert "tools" not in body
    responses.parse(msgspec.json.encode(body))
