"""The readers that other tests trust refuse what a client might forgive."""

from __future__ import annotations

import itertools
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.streams import Stream
from tests.tools import sse

DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "c1", "created": 7, "model": "m", "choices": choices}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


CHAT = (
    chunk({"role": "assistant"})
    + chunk({"content": "é\n\n"})
    + chunk({"content": "b"})
    + chunk({}, "stop")
    + DONE
)


def test_a_chat_is_put_together() -> None:
    chat = sse.read_chat(CHAT)
    assert (chat.text, chat.roles, chat.finish) == ("é\n\nb", ["assistant"], "stop")
    assert (chat.ids, chat.created, chat.models) == ({"c1"}, {7}, {"m"})


@given(st.lists(st.integers(0, len(CHAT))))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CHAT)]
    reader = sse.Reader()
    events = [event for a, b in itertools.pairwise(edges) for event in reader.feed(CHAT[a:b])]
    assert events == sse.read(CHAT)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (CHAT + b"\n", "bytes after"),
        (CHAT + chunk({}), "an event after"),
        (CHAT.removesuffix(DONE), "without \\[DONE\\]"),
        (CHAT[:-1], "ends inside an event"),
        (b": a comment\n\n" + CHAT, "not a field"),
        (b"event: x\n\n" + CHAT, "without data"),
        (b"data: \xff\n\n" + CHAT, "not UTF-8"),
        (b"data: {\n\n" + DONE, "not JSON"),
        (b"\r\n" + CHAT, "not a field"),
        (chunk({}, "stop") + chunk({"content": "x"}) + DONE, "after the finish"),
        (chunk({"content": "x"}) + DONE, "without a finish_reason"),
    ],
)
def test_a_broken_stream_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(sse.Malformed, match=why):
        sse.read_chat(body)


def test_an_error_event_ends_a_chat() -> None:
    error = {"error": {"code": "worker_crashed", "message": "killed by SIGKILL"}}
    body = chunk({"content": "x"}) + b"data: " + json.dumps(error).encode() + b"\n\n" + DONE
    assert sse.read_chat(body).error == error["error"]


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# Chunk borders that fall into the middle of events and of the empty line between them.
FRAMED = b"".join(b"%x\r\n%b\r\n" % (len(CHAT[i : i + 7]), CHAT[i : i + 7]) for i in range(0, len(CHAT), 7))


def served(answer: bytes) -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.sendall(answer)
    theirs.close()
    return ours


def test_a_whole_answer_is_read_and_a_short_one_refused() -> None:
    assert sse.read_answer(served(HEAD + FRAMED + b"0\r\n\r\n")) == (
        200,
        {"transfer-encoding": "chunked"},
        CHAT,
    )
    assert sse.read_answer(served(b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n{}"))[::2] == (404, b"{}")
    for short in (HEAD + FRAMED, HEAD + FRAMED[:-3], b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}"):
        with pytest.raises(sse.Malformed, match="ends early"):
            sse.read_answer(served(short))


def test_a_broken_answer_is_read_and_a_whole_one_refused() -> None:
    assert sse.read_broken(served(HEAD + FRAMED)) == CHAT
    with pytest.raises(sse.Malformed, match="is complete"):
        sse.read_broken(served(HEAD + FRAMED + b"0\r\n\r\n"))


@given(st.lists(st.integers(0, len(HEAD + FRAMED) + 5)))
def test_the_counting_client_counts_the_same_in_any_pieces(cuts: list[int]) -> None:
    answer = HEAD + FRAMED + b"0\r\n\r\n"
    edges = [0, *sorted(cuts), len(answer)]
    stream = Stream()
    for a, b in itertools.pairwise(edges):
        stream.feed(answer[a:b])
    assert (stream.events, stream.complete) == (5, True)


def test_the_counting_client_refuses_an_error_and_sees_a_missing_end() -> None:
    with pytest.raises(ValueError, match="HTTP/1.1 503"):
        Stream().feed(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")
    stream = Stream()
    stream.feed(HEAD + b"3\r\na\n\n\r\n0\r\n\r\n")
    assert (stream.events, stream.complete) == (1, False)
