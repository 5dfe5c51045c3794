"""The official clients of Node on a running server with the starter model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import STARTER
from tests.tools.node_modules import run_script
from tests.tools.served import Served

# The first run fetches the packages.
pytestmark = [pytest.mark.starter, pytest.mark.timeout(480)]

ANSWER = "The capital of France is Paris."
PROMPT_TOKENS, COMPLETION_TOKENS = 42, 8


def test_the_openai_client(starter: Served, tmp_path: Path) -> None:
    said = run_script("openai.mjs", tmp_path, starter.url, STARTER)
    assert said["models"] == [STARTER]
    for chat in (said["chat"], said["chatStream"]):
        assert (chat["text"], chat["reason"]) == (ANSWER, "stop")
        assert chat["usage"]["prompt_tokens"] == PROMPT_TOKENS
        assert chat["usage"]["completion_tokens"] == COMPLETION_TOKENS
    then = said["tools"].pop("then")
    assert said["tools"].pop("city") in ("Oslo", "Rome")
    assert said["tools"] == {"reason": "tool_calls", "name": "weather", "streamed": True}
    assert then
    assert said["parsed"]["kind"] in ("cat", "dog")
    assert said["parsed"]["legs"] == 4
    assert said["completion"] == said["completionStream"]
    assert said["completion"]["reason"] == "length"

    assert (said["response"]["text"], said["response"]["status"]) == (ANSWER, "completed")
    assert said["response"]["usage"]["input_tokens"] == PROMPT_TOKENS
    assert said["response"]["usage"]["output_tokens"] == COMPLETION_TOKENS
    assert said["retrieved"] == ANSWER
    assert said["inputItems"] == ["message"]
    stream = said["responseStream"]
    assert stream["text"] == ANSWER
    assert (stream["kinds"][0], stream["kinds"][-1]) == ("response.created", "response.completed")
    assert stream["numbers"] == list(range(len(stream["numbers"])))
    assert said["responseTools"].pop("then")
    assert said["responseTools"].pop("city") in ("Oslo", "Rome")
    assert said["responseTools"] == {"type": "function_call", "name": "weather"}
    assert said["parsedResponse"]["legs"] == 4
    assert said["deleted"] == {"name": "NotFoundError", "status": 404, "code": "response_not_found"}
    assert said["refused"] == {"name": "BadRequestError", "param": "temperature", "id": True}


def test_the_anthropic_client(starter: Served, tmp_path: Path) -> None:
    said = run_script("anthropic.mjs", tmp_path, starter.url, STARTER)
    assert said["models"] == [STARTER]
    for message in (said["message"], said["stream"]):
        assert (message["text"], message["reason"]) == (ANSWER, "end_turn")
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == PROMPT_TOKENS
        assert usage["output_tokens"] == COMPLETION_TOKENS
    assert said["message"]["id"] is True
    kinds = said["stream"]["kinds"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert said["stopped"] == {
        "text": "The capital of France",
        "reason": "stop_sequence",
        "sequence": " is",
    }
    assert said["tools"].pop("then")
    assert said["tools"].pop("city") in ("Oslo", "Rome")
    assert said["tools"] == {"reason": "tool_use", "name": "weather", "streamed": True}
    assert said["structured"]["kind"] in ("cat", "dog")
    assert said["counted"] == PROMPT_TOKENS
    assert said["refused"] == {"name": "BadRequestError", "type": "invalid_request_error", "id": True}
