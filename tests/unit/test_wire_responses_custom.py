"""A custom tool's plain text out of a function's arguments, wherever these are split."""

from __future__ import annotations

import itertools
import time

import pytest

from mlxpool.worker.wire.responses_custom import CustomInput

SPLIT = [
    ('{"input": "plain"}', "plain"),
    ('{"input":""}', ""),
    (' {\n "input" : "a\\"b\\\\c\\/d\\b\\f\\n\\r\\t"} ', 'a"b\\c/d\b\f\n\r\t'),
    ('{"input": "\\u00e9\\ud83d\\ude00!"}', "é😀!"),
    ('{"input": "\\ud83d x \\ude00 \\ud83d\\ud83d\\ude00\\ud83d"}', "\ufffd x \ufffd \ufffd😀\ufffd"),
    ('{"input": "a", "more": "b"}', "a"),
    ('{"more": 1, "input": "a"}', "a"),
    ('{"patch": "a"}', "a"),
    ('{"input": {"x": 1}}', '{"input": {"x": 1}}'),
    ('{"input": 5}', '{"input": 5}'),
    ("{}", ""),
    (" { } ", ""),
    ("[]", "[]"),
    ("no json", "no json"),
]


@pytest.mark.parametrize(("arguments", "meant"), SPLIT)
def test_a_custom_input_is_the_same_wherever_its_arguments_are_split(arguments: str, meant: str) -> None:
    for one, two in itertools.combinations_with_replacement(range(len(arguments) + 1), 2):
        machine = CustomInput()
        pieces = (arguments[:one], arguments[one:two], arguments[two:])
        assert "".join(map(machine.push, pieces)) + machine.end() == meant


def test_a_custom_input_goes_out_as_it_comes() -> None:
    machine = CustomInput()
    assert [machine.push(piece) for piece in ('{"inp', 'ut": "a', "b\\", "n", 'c"', "}")] == [
        "", "a", "b", "\n", "c", "",
    ]  # fmt: skip


@pytest.mark.parametrize(("arguments", "meant"), [('{"inp', ""), ('{"input": "ab\\', "ab"), ('{"x": "a', "")])
def test_a_custom_input_that_a_limit_cut_is_what_was_settled(arguments: str, meant: str) -> None:
    machine = CustomInput()
    assert machine.push(arguments) + machine.end(cut=True) == meant


def test_long_blanks_before_a_custom_input_take_no_time_to_speak_of() -> None:
    machine = CustomInput()
    began_s = time.thread_time()
    for _ in range(50_000):
        machine.push("  ")
    machine.push('{"input": "a"}')
    assert machine.end() == "a"
    assert time.thread_time() - began_s < 2
