"""A grammar that compiles to little and costs much as soon as somebody follows it."""

from __future__ import annotations

from mlxpool.worker.grammar import messages
from mlxpool.worker.grammar.trial import too_much

MUCH_BYTES = messages.BEGIN_LIMIT_BYTES * 2


class Machine:
    """Each begin takes its seconds and bytes; beside the first, others take some too."""

    def __init__(self, seconds: float = 0.0, size: int = 0, others: tuple[int, ...] = ()) -> None:
        self.seconds, self.size, self.others = seconds, size, [*others]
        self.now_s = 0.0
        self.memory_bytes = 0
        self.begun = 0

    def begin(self) -> object:
        self.begun += 1
        self.now_s += self.seconds
        self.memory_bytes += self.size + (self.others.pop(0) if self.others else 0)
        return object()

    def verdict(self) -> str | None:
        return too_much(self.begin, lambda: self.now_s, lambda: self.memory_bytes)


def test_a_grammar_that_takes_much_time_or_memory_to_begin_is_too_much() -> None:
    assert Machine(seconds=0.5).verdict() == "its first token takes 0.50 s, and 0.25 are allowed"
    reason = Machine(size=MUCH_BYTES).verdict()
    assert reason == f"following it takes {MUCH_BYTES} bytes, and {messages.BEGIN_LIMIT_BYTES} are allowed"


def test_what_others_take_meanwhile_is_not_the_grammars() -> None:
    beside_others = Machine(size=1000, others=(MUCH_BYTES,))
    assert beside_others.verdict() is None
    assert beside_others.begun == 2


def test_a_usual_grammar_is_begun_once() -> None:
    usual = Machine(seconds=0.001, size=4096)
    assert usual.verdict() is None
    assert usual.begun == 1
