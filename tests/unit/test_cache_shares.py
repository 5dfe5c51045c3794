"""Shares of the prompt cache: equal in the end, and never too much together on the way."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxpool.parent.pool.cache_shares import CacheShares, Move


def settled(shares: CacheShares) -> list[Move]:
    """Let every move be answered until nothing is left to tell; all moves in order."""
    told = []
    while moves := shares.moves():
        told += moves
        for move in moves:
            shares.answered(move.worker)
    return told


def test_the_only_worker_has_all_of_it() -> None:
    shares = CacheShares(900)
    assert shares.join(1) == 900
    shares.reach(1)
    assert shares.moves() == []


def test_a_newcomer_gets_its_part_once_the_others_have_given_it_up() -> None:
    shares = CacheShares(900)
    shares.join(1)
    shares.reach(1)
    assert shares.join(2) == 0
    assert shares.moves() == [Move(1, 450)]
    shares.reach(2)
    assert shares.moves() == []
    shares.answered(1)
    assert shares.moves() == [Move(2, 450)]
    shares.answered(2)
    assert shares.moves() == []


def test_one_raise_comes_when_all_that_it_waits_for_is_free() -> None:
    shares = CacheShares(900)
    shares.join(1)
    shares.reach(1)
    shares.join(2)
    shares.reach(2)
    assert shares.moves() == [Move(1, 450)]
    shares.resize(1000)
    # 100 are free at once; raised by so little it would only be asked twice.
    assert shares.moves() == []
    shares.answered(1)
    assert shares.moves() == [Move(1, 500), Move(2, 500)]


def test_a_newcomer_begins_with_what_is_free() -> None:
    shares = CacheShares(900)
    assert shares.join(1) == 900
    shares.resize(1200)
    assert shares.join(2) == 300


def test_a_worker_whose_socket_does_not_answer_yet_is_told_later() -> None:
    shares = CacheShares(900)
    shares.join(1)
    shares.join(2)
    assert shares.moves() == []
    shares.reach(2)
    assert shares.moves() == []
    shares.reach(1)
    assert settled(shares) == [Move(1, 450), Move(2, 450)]


def test_what_a_worker_leaves_goes_to_the_others() -> None:
    shares = CacheShares(900)
    for worker in (1, 2, 3):
        shares.join(worker)
        shares.reach(worker)
        settled(shares)
    shares.leave(2)
    assert settled(shares) == [Move(1, 450), Move(3, 450)]


def test_one_that_drains_keeps_its_share_and_is_told_nothing() -> None:
    shares = CacheShares(900)
    for worker in (1, 2):
        shares.join(worker)
        shares.reach(worker)
        settled(shares)
    shares.settle(1)
    assert shares.join(3) == 0
    assert settled(shares) == [Move(2, 300)]
    shares.reach(3)
    # 450 stay with the one that drains: its part can't be given away before it is gone.
    assert settled(shares) == [Move(3, 150)]
    shares.leave(1)
    assert settled(shares) == [Move(2, 450), Move(3, 450)]


def test_a_worker_that_leaves_with_a_move_out_is_forgotten() -> None:
    shares = CacheShares(900)
    shares.join(1)
    shares.reach(1)
    shares.join(2)
    assert shares.moves() == [Move(1, 450)]
    shares.leave(1)
    shares.answered(1)
    shares.reach(2)
    assert settled(shares) == [Move(2, 900)]
    assert shares.held_bytes == 900


def test_no_memory_for_prompts_is_a_share_of_none() -> None:
    shares = CacheShares(0)
    assert shares.join(1) == 0
    shares.reach(1)
    assert shares.moves() == []
    shares.resize(100)
    assert settled(shares) == [Move(1, 100)]
    shares.resize(0)
    assert settled(shares) == [Move(1, 0)]


def two(total: int = 900) -> CacheShares:
    """Worker 1 has all of it, worker 2 came later; both can be told."""
    shares = CacheShares(total)
    for worker in (1, 2):
        shares.join(worker)
        shares.reach(worker)
    return shares


def test_a_raise_that_never_arrived_is_told_again_after_a_rest() -> None:
    shares = two()
    assert shares.moves() == [Move(1, 450)]
    shares.answered(1)
    assert shares.moves() == [Move(2, 450)]
    shares.failed(2, unheard=True)
    assert (shares.of(2), shares.moves()) == (0, [])
    shares.again(2)
    assert shares.moves() == [Move(2, 450)]
    shares.answered(2)
    assert (shares.of(2), shares.moves()) == (450, [])


def test_a_raise_that_may_have_arrived_is_counted_and_told_again() -> None:
    shares = two()
    shares.moves()
    shares.answered(1)
    shares.moves()
    shares.failed(2, unheard=False)
    assert shares.of(2) == 450
    assert shares.moves() == []
    shares.again(2)
    assert shares.moves() == [Move(2, 450)]
    shares.answered(2)
    assert shares.moves() == []


@pytest.mark.parametrize("unheard", [True, False])
def test_bytes_that_were_not_given_up_go_to_nobody(unheard: bool) -> None:
    shares = two()
    assert shares.moves() == [Move(1, 450)]
    shares.failed(1, unheard=unheard)
    assert (shares.of(1), shares.moves()) == (900, [])
    shares.again(1)
    assert settled(shares) == [Move(1, 450), Move(2, 450)]


def test_one_that_is_late_does_not_hold_up_what_is_free_without_it() -> None:
    shares = CacheShares(900)
    for worker in (1, 2):
        shares.join(worker)
        shares.reach(worker)
        settled(shares)
    shares.join(3)
    shares.reach(3)
    assert shares.moves() == [Move(1, 300), Move(2, 300)]
    shares.answered(2)
    assert shares.moves() == []
    shares.late(1)
    assert shares.moves() == [Move(3, 150)]
    shares.answered(3)
    assert shares.moves() == []
    shares.answered(1)
    assert settled(shares) == [Move(3, 300)]


def test_a_raise_that_fits_waits_for_nobody() -> None:
    shares = two()
    settled(shares)
    shares.join(3)
    shares.reach(3)
    assert shares.moves() == [Move(1, 300), Move(2, 300)]
    shares.resize(2000)
    assert shares.moves() == [Move(3, 666)]


def test_a_failure_of_one_that_has_left_is_nobodys() -> None:
    shares = two()
    shares.moves()
    shares.leave(1)
    shares.failed(1, unheard=True)
    shares.again(1)
    shares.late(1)
    assert settled(shares) == [Move(2, 900)]


class Story(RuleBasedStateMachine):
    """Workers come, answer, fail, drain and go in any order; the world keeps its own account of all."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.most = 1000
        self.shares = CacheShares(self.total)
        self.holds: dict[int, int] = {}  # the most that a worker may believe its share to be
        self.least: dict[int, int] = {}  # the least
        self.out: dict[int, int] = {}
        self.before: dict[int, int] = {}  # what those that were told something held
        self.reachable: set[int] = set()
        self.resting: set[int] = set()
        self.last = 0

    def tell(self) -> None:
        for worker, share in self.shares.moves():
            assert worker in self.reachable
            assert worker not in self.out
            assert worker not in self.resting
            self.out[worker] = share
            self.before[worker] = self.holds[worker]
            if share > self.holds[worker]:
                # A larger one may be used from the moment it is told; a smaller one holds from the answer on.
                self.holds[worker] = share
                assert sum(self.holds.values()) <= self.total, "raised by what is not there"

    @rule()
    def join(self) -> None:
        self.last += 1
        share = self.shares.join(self.last)
        assert share == 0 or sum(self.holds.values()) + share <= self.total
        self.holds[self.last] = self.least[self.last] = share
        self.tell()

    def some(self, pick: int, among: set[int] | dict[int, int]) -> int | None:
        return sorted(among)[pick % len(among)] if among else None

    @rule(total=st.sampled_from([0, 500, 1000, 1001, 2000]))
    def resize(self, total: int) -> None:
        self.total = total
        self.shares.resize(total)
        self.tell()

    @rule(pick=st.integers(0, 9))
    def reach(self, pick: int) -> None:
        if (worker := self.some(pick, self.holds)) is not None:
            self.shares.reach(worker)
            self.reachable.add(worker)
            self.tell()

    @rule(pick=st.integers(0, 9))
    def drain(self, pick: int) -> None:
        if (worker := self.some(pick, self.reachable)) is not None:
            self.shares.settle(worker)
            self.reachable.discard(worker)

    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        if (worker := self.some(pick, self.holds)) is not None:
            self.shares.leave(worker)
            del self.holds[worker]
            del self.least[worker]
            self.out.pop(worker, None)
            self.reachable.discard(worker)
            self.resting.discard(worker)
            self.tell()

    @rule(pick=st.integers(0, 9))
    def answer(self, pick: int) -> None:
        if (worker := self.some(pick, self.out)) is not None:
            self.holds[worker] = self.least[worker] = self.out.pop(worker)
            self.shares.answered(worker)
            self.tell()

    @rule(pick=st.integers(0, 9), unheard=st.booleans())
    def fail(self, pick: int, unheard: bool) -> None:
        if (worker := self.some(pick, self.out)) is not None:
            share = self.out.pop(worker)
            if unheard:
                self.holds[worker] = self.before[worker]
            else:
                self.least[worker] = min(self.least[worker], share)
            self.shares.failed(worker, unheard=unheard)
            self.resting.add(worker)
            self.tell()

    @rule(pick=st.integers(0, 9))
    def again(self, pick: int) -> None:
        if (worker := self.some(pick, self.resting)) is not None:
            self.shares.again(worker)
            self.resting.discard(worker)
            self.tell()

    @rule(pick=st.integers(0, 9))
    def late(self, pick: int) -> None:
        if (worker := self.some(pick, self.out)) is not None:
            self.shares.late(worker)
            self.tell()

    @invariant()
    def never_too_much_together(self) -> None:
        # A lowered total is passed by what was told before, and by nothing that is told from then on.
        self.most = max(self.total, min(self.most, sum(self.holds.values())))
        assert sum(self.holds.values()) <= self.most
        assert self.shares.held_bytes == sum(self.holds.values())

    @invariant()
    def all_that_can_be_told_end_with_equal_parts(self) -> None:
        if not self.out and not self.resting and self.holds and self.reachable == set(self.holds):
            assert set(self.holds.values()) == {self.total // len(self.holds)}
            assert self.least == self.holds


Story.TestCase.settings = hypothesis_settings(max_examples=200, stateful_step_count=40, deadline=None)
test_any_story_of_workers = Story.TestCase
