"""The request of /v1/completions: what it comes to, and what it refuses in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.completion_fields import ADVICE, FIELDS, PROMPTS_LIMIT
from mlxpool.shared.api.completions import parse
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.errors import ApiError


def asked(**fields: Any) -> Asked:
    return parse(json.dumps({"prompt": "x", **fields}).encode())


def attempt(**fields: Any) -> Asked | ApiError:
    try:
        return asked(**fields)
    except ApiError as err:
        return err


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts", "names"),
    [
        ("once", ("once",), ("prompt",)),
        ([5, 6], ((5, 6),), ("prompt",)),
        (["a", "b"], ("a", "b"), ("prompt[0]", "prompt[1]")),
        ([[5], [6, 7]], ((5,), (6, 7)), ("prompt[0]", "prompt[1]")),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(
    prompt: object, prompts: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    found = asked(prompt=prompt)
    assert found.prompts == prompts
    assert found.prompt_fields == names
    assert found.request.messages == ()
    assert found.request.prompt_field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        (None, "prompt", "is missing"),
        ("", "prompt", "non-empty string"),
        ([], "prompt", "non-empty"),
        (7, "prompt", "not 7"),
        ({"text": "a"}, "prompt", "a list of token ids"),
        (["a", ""], "prompt[1]", "non-empty string"),
        (["a", [5]], "prompt[1]", "non-empty string, not [5]"),
        ([[5], []], "prompt[1]", "non-empty list of token ids"),
        ([5, "a"], "prompt[1]", 'token\'s id, not "a"'),
        ([5, -1], "prompt[1]", "not -1"),
        ([5, True], "prompt[1]", "not true"),
        ([5.0], "prompt[0]", "not 5.0"),
        ([[5, 2**40]], "prompt[0][1]", str(2**40)),
        ([None], "prompt[0]", "not null"),
        (["a"] * (PROMPTS_LIMIT + 1), "prompt", f"at most {PROMPTS_LIMIT}"),
    ],
)
def test_what_is_no_prompt_is_refused_where_it_stands(prompt: object, param: str, words: str) -> None:
    refused = refusal(prompt=prompt)
    assert refused.param == param
    assert words in refused.message


def test_without_a_limit_an_answer_has_512_tokens_unless_the_server_says_otherwise() -> None:
    assert asked().request.max_tokens is None
    assert asked().request.usual_max_tokens == 512
    assert asked(max_tokens=3).request.max_tokens == 3


@pytest.mark.parametrize(("given", "read"), [(None, None), (0, 0), (20, 20)])
def test_logprobs_is_a_number_of_alternatives(given: object, read: int | None) -> None:
    assert asked(logprobs=given).request.top_logprobs == read


@pytest.mark.parametrize("given", [True, 21, -1, "5", 1.5])
def test_logprobs_is_no_switch_and_has_a_limit(given: object) -> None:
    assert refusal(logprobs=given).param == "logprobs"


@pytest.mark.parametrize(
    ("field", "asks", "off"), [("echo", True, False), ("suffix", "end", ""), ("best_of", 2, 1)]
)
def test_what_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(
    field: str, asks: object, off: object
) -> None:
    refused = refusal(**{field: asks})
    assert (refused.code, refused.param) == ("unsupported_parameter", field)
    for nothing in (off, None):
        assert asked(**{field: nothing}) == asked()


def test_options_are_those_of_chat() -> None:
    options: dict[str, Any] = {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": ["."],
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"7": -1},
        "xtc_probability": 0.1, "xtc_threshold": 0.2, "guided_regex": "a+",
    }  # fmt: skip
    assert asked(**options).request == ChatRequest(
        messages=(), model="m", stream=True, include_usage=True, n=2, stop=(".",), temperature=0.5,
        top_p=0.9, top_k=4, min_p=0.1, seed=3, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias=((7, -1.0),), xtc_probability=0.1, xtc_threshold=0.2,
        structure=Structure("regex", "guided_regex", "a+"), usual_max_tokens=512, prompt_field="prompt",
    )  # fmt: skip


@pytest.mark.parametrize("field", sorted(ADVICE))
def test_a_field_of_another_protocol_is_refused_with_what_to_send(field: str) -> None:
    assert field not in FIELDS
    assert f"send {ADVICE[field]} instead" in refusal(**{field: [1]}).message


def test_every_field_has_a_schema_for_the_servers_own_description() -> None:
    assert [name for name, field in FIELDS.items() if field.schema is None] == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": "\\ud800"}', b"[" * 500_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("field", sorted(name for name, row in FIELDS.items() if row.status != "accepted"))
@pytest.mark.parametrize("value", [{"a": [1]}, [[[]]], 1e308, -(2**70), "\x00", True], ids=str)
def test_a_value_of_any_type_is_read_or_refused(field: str, value: object) -> None:
    found = attempt(**{field: value})
    if isinstance(found, ApiError):
        assert found.status == 400
        assert found.param is not None
