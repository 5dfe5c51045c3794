"""However a row's events are chunked, a response's stream comes to one object, told in order."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.shared.api.response_events import replay
from mlxpool.shared.errors import error
from mlxpool.worker.text.events import Event, Failure, Finish, Logprobs, Reasoning, Text
from tests.unit.responses_world import NAMES, USED, called, likely, parsed, said, whole, writer


# Ends of streams, and things that are said before them.
def _call_events(index: int, cut: bool) -> st.SearchStrategy[list[Event]]:
    def events(name: str, pieces: list[str]) -> list[Event]:
        made = called(index, name, *pieces)
        return made[:-1] if cut else made

    inputs = st.text().map(lambda text: json.dumps({"input": text}))
    texts = st.one_of(st.just('{"x":1}'), inputs)
    pieces = texts.flatmap(lambda text: st.lists(st.integers(0, len(text)), max_size=4).map(
        lambda cuts: [text[a:b] for a, b in itertools.pairwise(sorted({0, len(text), *cuts}))]
    ))  # fmt: skip
    return st.builds(events, st.sampled_from([*NAMES]), pieces)


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """The events of one row, as an engine could say them."""
    events: list[Event] = []
    for index in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["text", "reasoning", "call", "tokens"]))
        if kind == "call":
            events += draw(_call_events(index, False))
        elif kind == "tokens":
            token = draw(st.text(min_size=1, max_size=3))
            events += [Logprobs(likely(token)), Text(token)]
        else:
            made = Text if kind == "text" else Reasoning
            events += [
                made(text) for text in draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3))
            ]
    ending = draw(st.sampled_from(["stop", "length", "cut call", "failure"]))
    if ending == "failure":
        return [*events, Failure(error("internal_error", "broken"))]
    if ending == "cut call":
        events += draw(_call_events(9, True))
    return [*events, USED, Finish("stop" if ending == "stop" else "length")]


@settings(max_examples=150, deadline=None)
@given(answers(), st.lists(st.integers(0, 60), max_size=6), st.booleans(), st.booleans())
def test_every_chunking_of_events_ends_in_the_same_object(
    events: list[Event], cuts: list[int], summary: bool, sealed: bool
) -> None:
    edges = sorted({0, len(events), *(cut % (len(events) + 1) for cut in cuts)})
    stream = writer(summary, sealed)
    data = stream.opening()
    for start, end in itertools.pairwise(edges):
        assert not stream.ended
        data += stream.write(said(events[start:end]))
    assert stream.ended
    told = parsed(data)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    final = told[-1]["response"]
    if not isinstance(events[-1], Failure):
        assert final == whole(writer(summary, sealed), events)
    _assert_told_in_order(told, final["output"])
    at_once = writer(summary, sealed)
    assert b"".join(replay(final)) == at_once.opening() + at_once.write(said(events))


_TEXTS = {
    "response.output_text": lambda item: item["content"][0]["text"],
    "response.reasoning_text": lambda item: item["content"][0]["text"],
    "response.reasoning_summary_text": lambda item: item["summary"][0]["text"],
    "response.function_call_arguments": lambda item: item["arguments"],
    "response.custom_tool_call_input": lambda item: item["input"],
}


def _assert_told_in_order(told: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Each item is added, told in deltas that make its text, and done, before the next one is added."""
    place, open_part, text = -1, False, ""
    done: list[dict[str, Any]] = []
    for event in told[2:-1]:
        family, _, what = event["type"].rpartition(".")
        if family == "response.output_item":
            assert event["output_index"] == len(done)
            if what == "added":
                assert place == len(done) - 1
                place, text = len(done), ""
                assert event["item"]["status"] == "in_progress"
            else:
                done.append(event["item"])
                assert not open_part
            continue
        assert (event["output_index"], event["item_id"]) == (place, output[place]["id"])
        if family in ("response.content_part", "response.reasoning_summary_part"):
            assert open_part is (what == "done")
            open_part = not open_part
        elif what == "delta":
            text += event["delta"]
        else:
            assert what == "done"
            assert text == _TEXTS[family](output[place])
    assert done == output
