"""Training data as a server looks at it: counted, never held."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from mlxpool.shared import training_lines
from mlxpool.shared.training_lines import LinesError, Survey, likely_tokens
from mlxpool.worker import load


def test_a_survey_counts_what_reading_gives_and_refuses_the_same(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "abc"}\n\n{"prompt": "some words", "completion": "12345678"}\n')
    read = training_lines.read(path)
    assert training_lines.survey(path) == Survey(2, 1, max(one.tokens for one in read))
    for mask_prompt, bad in ((True, '{"text": "abc"}\n'), (False, "[]\n"), (False, "\n")):
        path.write_text(bad)
        for look in (training_lines.read, training_lines.survey):
            with pytest.raises(LinesError, match=r"d\.jsonl"):
                look(path, mask_prompt=mask_prompt)


def test_a_survey_holds_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n' * 40_000)
    tracemalloc.start()
    try:
        assert training_lines.survey(path).lines == 40_000
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_tools_and_calls_count_as_what_a_template_writes_of_them(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    call = '{"role": "assistant", "content": "x", "tool_calls": [{"arguments": "%s"}]}' % ("7" * 100)
    path.write_text('{"messages": [' + call + '], "tools": ["' + "8" * 1_000 + '"]}\n')
    assert 1_100 < training_lines.survey(path).tokens < 1_200


PROSE = (
    "It was a bright cold day, and the clocks were striking; a man slipped quickly through the glass doors. ",
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand weiß so recht, warum er das tut. ",
    "def read(path: Path) -> list[str]:\n    return [line.strip() for line in path.open()]  # all of it\n",
    "The years 1984, 2001 and 2049; pi is 3.14159265358979, and e 2.71828182845904 or so. ",
    "Быстрая коричневая лиса прыгает через ленивую собаку. ",
)


@pytest.mark.parametrize("text", PROSE, ids=["English", "German", "code", "numbers", "Russian"])
def test_tokens_are_guessed_too_many_but_not_by_much(starter_folder: Path, text: str) -> None:
    """The starter's vocabulary is a small one: of larger ones it takes fewer."""
    tokens = len(load.load_tokenizer(starter_folder).encode(text * 20))
    assert 0.9 * tokens < likely_tokens((text * 20).encode()) < 2 * tokens
