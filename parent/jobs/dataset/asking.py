"""One request of the server's own API, tried again where that helps.

A server that is busy, loads a model or lends its GPU says when to come back, and is believed; one that can't
be reached or lost its worker is tried again after a growing while. What is wrong with the request itself is
wrong the next time too. Nothing is tried for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from mlxpool.shared.text import cut

PATH = "/v1/chat/completions"
# An answer may wait for a model to load, for others' turns and for a job that holds the GPU.
ANSWER_TIMEOUT_S = 1_800.0
MAX_TRIES = 8
FIRST_PAUSE_S = 0.5
# Longer than this nobody is asked to wait in one go.
MAX_PAUSE_S = 60.0
MAX_ANSWER_BYTES = 16 * 2**20
_AGAIN = (429, 502, 503)
# These will not change from line to line.
_HOPELESS = (401, 403, 404)


class Reply(msgspec.Struct, frozen=True):
    """text: what the model said. tokens: that it took to say it."""

    text: str
    tokens: int


class Refusal(Exception):
    """There is no answer. is_final: nor will there be one to the next question."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _Error(msgspec.Struct):
    message: str = ""


class _Failure(msgspec.Struct):
    error: _Error


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Reply:
    """The answer to a chat request. Raises Refusal."""
    said, pause_s = "", FIRST_PAUSE_S
    for tried in range(MAX_TRIES):
        if tried:
            await asyncio.sleep(pause_s)
        pause_s = min(FIRST_PAUSE_S * 2**tried, MAX_PAUSE_S)
        try:
            async with client.post(url + PATH, json=body) as answer:
                raw = await answer.content.read(MAX_ANSWER_BYTES)
                while not answer.content.at_eof() and len(raw) < MAX_ANSWER_BYTES:
                    raw += await answer.content.read(MAX_ANSWER_BYTES)
                status, after = answer.status, answer.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            said = f"the server can't be asked: {type(problem).__name__}: {problem}"
            continue
        if status == 200:
            return _read(raw)
        said = _reason(raw, status)
        if status not in _AGAIN:
            raise Refusal(said, is_final=status in _HOPELESS)
        pause_s = _pause_s(after, pause_s)
    raise Refusal(f"{said} (tried {MAX_TRIES} times)", is_final=False)


def _read(raw: bytes) -> Reply:
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
        return Reply(answer.choices[0].message.content or "", answer.usage.completion_tokens)
    except (msgspec.MsgspecError, IndexError, UnicodeError):
        raise Refusal(
            f"an answer can't be read: {cut(raw.decode(errors='replace'))}", is_final=False
        ) from None


def _reason(raw: bytes, status: int) -> str:
    try:
        return msgspec.json.decode(raw, type=_Failure).error.message
    except (msgspec.MsgspecError, UnicodeError):
        return f"status {status}: {cut(raw.decode(errors='replace'))}"


def _pause_s(after: str, otherwise_s: float) -> float:
    """What `Retry-After` says, within reason."""
    return min(float(after), MAX_PAUSE_S) if after.isascii() and after.isdigit() else otherwise_s
