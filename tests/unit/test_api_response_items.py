"""Items of a Responses request: which messages they are, and which are refused by index and type."""

from __future__ import annotations

import json

import pytest

from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.response_input import SUMMARY
from mlxpool.shared.api.response_object import compaction, seal
from mlxpool.shared.api.responses import parse
from mlxpool.shared.errors import ApiError


def asked(**fields: object) -> Asked:
    return parse(json.dumps({"input": "hello", **fields}).encode())


def ask(**fields: object) -> ChatRequest:
    return asked(**fields).request


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        asked(**fields)
    assert raised.value.status == 400
    return raised.value


def said(*items: object, **fields: object) -> tuple[ChatMessage, ...]:
    return ask(input=[*items], **fields).messages


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (USER, ChatMessage("user", "hi")),
        ({"type": "message", **USER, "id": "msg_1", "status": "completed"}, ChatMessage("user", "hi")),
        ({"role": "system", "content": "s"}, ChatMessage("system", "s")),
        ({"role": "developer", "content": "d"}, ChatMessage("system", "d")),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            ChatMessage("user", "ab"),
        ),
        (
            {
                "type": "message", "role": "assistant", "id": "msg_1", "phase": "commentary",
                "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
                "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
            },
            ChatMessage("assistant", "a"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            ChatMessage("assistant", "No."),
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            ChatMessage("tool", "r", tool_call_id="c"),
        ),
        (
            {
                "type": "custom_tool_call_output", "call_id": "c",
                "output": [{"type": "input_text", "text": "r"}],
            },
            ChatMessage("tool", "r", tool_call_id="c"),
        ),
        (
            {"type": "function_call_output", "name": "f", "namespace": "ns", "output": "r"},
            ChatMessage("tool", "r", "ns__f"),
        ),
        (compaction("cmp_1", "They met."), ChatMessage("user", f"{SUMMARY}They met.")),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "ns", "arguments": '{"a":1}'},
            ChatMessage("assistant", None, tool_calls=(MadeCall("c", "ns__f", {"a": 1}),)),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "*** x"},
            ChatMessage("assistant", None, tool_calls=(MadeCall("c", "p", {"input": "*** x"}),)),
        ),
        (
            {"type": "reasoning", "id": "rs", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}, {"type": "reasoning_text", "text": "m"},
            ]},
            ChatMessage("assistant", None, reasoning="hmm"),
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}],
             "encrypted_content": seal("long")},
            ChatMessage("assistant", None, reasoning="long"),
        ),
        (
            {"type": "reasoning", "summary": [
                {"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"},
            ]},
            ChatMessage("assistant", None, reasoning="a\n\nb"),
        ),
    ],
)  # fmt: skip
def test_an_item_is_a_message(item: dict[str, object], message: ChatMessage) -> None:
    assert said(item) == (message,)


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SPOKEN = {"type": "message", "role": "assistant", "content": "Look."}
MADE = MadeCall("c", "f", {})


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([THOUGHT, SPOKEN, CALL, CALL], [ChatMessage("assistant", "Look.", None, "hm", (MADE, MADE))]),
        (
            [THOUGHT, CALL, RESULT, THOUGHT, SPOKEN],
            [
                ChatMessage("assistant", None, None, "hm", (MADE,)),
                ChatMessage("tool", "r", tool_call_id="c"),
                ChatMessage("assistant", "Look.", None, "hm"),
            ],
        ),
        ([SPOKEN, SPOKEN], [ChatMessage("assistant", "Look.")] * 2),
        ([SPOKEN, CALL, SPOKEN], [ChatMessage("assistant", "Look.Look.", None, None, (MADE,))]),
        (
            [CALL, {"type": "web_search_call", "id": "ws"}, CALL],
            [ChatMessage("assistant", None, None, None, (MADE, MADE))],
        ),
    ],
)
def test_the_items_of_one_turn_are_one_message(items: list[object], messages: list[ChatMessage]) -> None:
    assert said(USER, *items, USER) == (ChatMessage("user", "hi"), *messages, ChatMessage("user", "hi"))


def test_instructions_and_the_developers_first_messages_are_one_system_message() -> None:
    developer = {"role": "developer", "content": "Dev"}
    assert said(developer, USER, developer, instructions="Be.") == (
        ChatMessage("system", "Be.\n\nDev"), ChatMessage("user", "hi"), ChatMessage("system", "Dev"),
    )  # fmt: skip
    assert said(developer, developer, USER)[:2] == (ChatMessage("system", "Dev"),) * 2


def test_what_nobody_here_can_read_is_left_out_and_told_once() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    heard = asked(input=[*[foreign] * 6, USER, {"type": "mcp_call", "id": "m"}])
    assert heard.request.messages == (ChatMessage("user", "hi"),)
    assert heard.warnings == (
        "input[0], input[1], input[2] and 3 more: reasoning whose encrypted_content this server did not make "
        "can't be read",
        "input[7]: mcp_call is of a tool that this server doesn't run; it was left out",
    )


def test_what_is_sealed_by_another_server_and_said_in_clear_too_is_no_loss() -> None:
    clear = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA",
             "content": [{"type": "reasoning_text", "text": "Hm"}]}  # fmt: skip
    heard = asked(input=[USER, clear, {"role": "assistant", "content": "x"}, USER])
    assert heard.request.messages[1].reasoning == "Hm"
    assert heard.warnings == ()


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        ("x", "input[1]", "an object like"),
        ({"type": "telepathy"}, "input[1].type", '"telepathy" is not supported'),
        ({"type": 3}, "input[1].type", "not 3"),
        ({"id": "msg_1"}, "input[1]", 'item_reference "msg_1"'),
        ({"type": "item_reference", "id": "msg_1"}, "input[1]", "send the item itself"),
        ({"role": "tool", "content": "x"}, "input[1].role", "function_call_output"),
        ({"role": "robot", "content": "x"}, "input[1].role", 'not "robot"'),
        ({"role": "user"}, "input[1].content", "a string or a list of text parts, not null"),
        ({"role": "user", "content": "x", "contnet": "y"}, "input[1].contnet", "did you mean content?"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            "input[1].content[0].type",
            '"input_image" is not supported: this model reads text parts only',
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            "input[1].output[0].type",
            '"input_image"',
        ),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id", "non-empty string"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name", "non-empty string"),
        ({"type": "function_call", "name": "f"}, "input[1].call_id", "non-empty string"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[1].input", "a string, not null"),
        ({"type": "reasoning", "content": "x"}, "input[1].content", "a list of parts"),
        ({"type": "reasoning", "content": [{"type": "x"}]}, "input[1].content[0].type", "reasoning_text"),
        ({"type": "compaction"}, "input[1].encrypted_content", "non-empty string"),
        ({"type": "compaction", "encrypted_content": "gA"}, "input[1].encrypted_content", "did not make it"),
        (
            {"type": "compaction", "encrypted_content": seal("x")[:-1]},
            "input[1].encrypted_content",
            "did not make it",
        ),
    ],
)  # fmt: skip
def test_an_item_that_says_nothing_clear_is_refused_by_index(item: object, param: str, says: str) -> None:
    err = refusal(input=[USER, item])
    assert err.param == param
    assert says in err.message


def test_an_input_of_nothing_that_can_be_read_is_refused() -> None:
    assert "add a message" in refusal(input=[{"type": "web_search_call"}]).message
