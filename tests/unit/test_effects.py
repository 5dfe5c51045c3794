"""What of a worker's last lines a client is told."""

from __future__ import annotations

import traceback

from mlxpool.parent.pool.effects import last_words


def lines_of(*errors: BaseException) -> list[str]:
    """What Python prints of the last error, raised while those before it were handled."""
    try:
        for error in errors[:-1]:
            try:
                raise error
            except type(error) as known:
                errors[-1].__context__ = known
        raise errors[-1]
    except BaseException:
        return [line for line in traceback.format_exc().splitlines() if line]


def test_a_traceback_is_told_by_its_errors_alone() -> None:
    lines = ["[mlx] no kernel", *lines_of(KeyError("n_heads"), OSError("the weights are short")), "bye"]
    assert any(line.startswith("Traceback") for line in lines)
    assert any("File" in line for line in lines)
    assert last_words(lines, "killed by SIGABRT") == [
        "[mlx] no kernel",
        "KeyError: 'n_heads'",
        "OSError: the weights are short",
        "bye",
    ]


def test_what_the_reason_says_is_not_said_again() -> None:
    lines = lines_of(ValueError("not allowed to raise maximum limit"))
    assert last_words(lines, "can't start: ValueError: not allowed to raise maximum limit") == []
    assert last_words(["x.load.LoadError: no weights"], "no weights") == []
    assert last_words(["no weights", "none at all"], "no weights") == ["none at all"]


def test_the_last_five_lines_that_tell_something_are_enough() -> None:
    lines = ["1", "2", "3", "  File", "4", "5", "6", "NoneType: None"]
    assert last_words(lines, "killed by SIGABRT") == ["2", "3", "4", "5", "6"]
