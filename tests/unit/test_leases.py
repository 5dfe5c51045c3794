"""Who may use the GPU: the line against the slowest way to say the same, and the scheduler's stories."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.parent.pool.leases import OPEN, Lease, Leases
from mlxpool.parent.pool.scheduler import Scheduler
from mlxpool.parent.pool.views import leases_view, queue_view, reason_of
from mlxpool.shared.errors import ApiError
from tests.unit.pool_world import World, model

# The line's own deed: an ask, a ticket, or the end of whoever is at this place among those who are there.
DEEDS = st.lists(st.one_of(st.sampled_from(["share", "ask", "hold"]), st.integers(0, 20)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(DEEDS)
def test_the_line_says_what_walking_over_everybody_says(deeds: list[str | int]) -> None:
    line, everybody = Leases(), list[int | Lease]()
    number = 0
    for deed in deeds:
        if deed == "share":
            number += 1
            line.share(number)
            everybody.append(number)
        elif deed == "ask":
            number += 1
            lease = Lease(number, f"job {number}", 5, 0.0)
            line.ask(lease)
            everybody.append(lease)
        elif deed == "hold":
            if (turn := line.turn) is not None:
                turn.state, turn.has_room = "held", True
        elif isinstance(deed, int) and everybody:
            gone = everybody.pop(deed % len(everybody))
            (line.end if isinstance(gone, Lease) else line.leave)(gone)  # type: ignore[arg-type]
        asks = [one for one in everybody if isinstance(one, Lease)]
        sharers = [one for one in everybody if isinstance(one, int)]
        gate = asks[0].number if asks else OPEN
        assert line.gate == gate
        assert line.front is (asks[0] if asks else None)
        assert line.turn is (asks[0] if asks and everybody[0] is asks[0] else None)
        assert line.reserved == (5 if asks and asks[0].has_room else 0)
        held = sum(lease.state == "held" for lease in asks)
        sharing = sum(one < gate for one in sharers)
        assert line.counts() == (sharing, held, len(everybody) - sharing - held)


def test_a_decision_costs_the_same_behind_a_thousand_who_have_left() -> None:
    line = Leases()
    for number in range(100_000):
        line.share(number)
    line.ask(Lease(100_000, "job", 0, 0.0))
    began_s = time.perf_counter()
    for number in range(99_999):
        line.leave(number)
        assert line.turn is None
    # A walk over those that have left would take minutes.
    assert time.perf_counter() - began_s < 30
    line.leave(99_999)
    assert line.turn is line.front


def loaded(budget: int, *names: str, **limits: float) -> tuple[World, Scheduler]:
    """A pool with these models of ten bytes resident, the first one used the longest ago."""
    world = World()
    pool = world.pool(budget, **limits)
    for name in names:
        world.clock += 1
        world.load(model(name))
    return world, pool


def test_requests_before_a_job_are_served_load_and_eviction_included_those_behind_it_wait():
    world, pool = loaded(10, "a")
    runs = pool.on_request(model("a"))
    cold = pool.on_request(model("b"))
    job = pool.on_exclusive("job", 0)
    behind = pool.on_request(model("a"))
    behind_cold = pool.on_request(model("c"))
    pool.on_done(runs)
    world.step("a")
    world.step("a")  # evicted although a request waits for it: that one waits for the job
    world.step("b")
    assert (cold.state, behind.state, job.state) == ("granted", "queued", "waiting")
    assert world.lent == []
    pool.on_done(cold)
    assert [w.lease for w in world.workers.values() if w.state == "ready"] == ["asked"]
    assert job.state == "waiting"
    world.answer_lease("b")
    assert job.state == "held"
    assert world.lent == [job]
    assert (behind.state, behind_cold.state) == ("queued", "queued")
    assert world.alive("c") is None
    pool.on_release(job)
    world.run()
    assert [t.state for t in (behind, behind_cold)] == ["done", "done"]


def test_a_job_alone_in_an_empty_pool_has_the_gpu_at_once():
    world = World()
    pool = world.pool(10)
    job = pool.on_exclusive("job", 10)
    assert job.state == "held"
    assert pool.leases.reserved == 10


def test_an_older_request_evicts_a_model_that_others_wait_for_behind_a_job():
    world, pool = loaded(20, "a", "b")
    busy = [pool.on_request(model(name)) for name in ("a", "b")]
    cold = pool.on_request(model("c", planned=20))
    pool.on_exclusive("job", 0)
    for name in ("a", "b"):
        pool.on_request(model(name))
    for ticket in busy:
        pool.on_done(ticket)
    for name in ("a", "b"):
        assert world.alive(name).state == "draining"
        world.step(name)
        world.step(name)
    world.step("c")
    assert cold.state == "granted"


def test_two_jobs_in_a_row_keep_the_models_at_rest_between_them():
    world, pool = loaded(10, "a")
    first = pool.on_exclusive("first", 0)
    second = pool.on_exclusive("second", 0)
    world.answer_lease("a")
    assert (first.state, second.state) == ("held", "waiting")
    pool.on_release(first)
    assert second.state == "held"
    assert world.alive("a").lease == "held"
    between = pool.on_request(model("a"))
    pool.on_release(second)
    assert between.state == "granted"
    assert world.alive("a").lease == "none"


def test_a_job_that_gives_up_while_models_come_to_rest_lets_them_go_on():
    world, pool = loaded(10, "a")
    job = pool.on_exclusive("job", 0)
    waits = pool.on_request(model("a"))
    pool.on_release(job)
    assert waits.state == "granted"
    assert world.alive("a").lease == "none"
    pool.on_leased(world.alive("a").number)  # its answer comes too late and means nothing
    assert pool.slots["a"].lease == "none"


def test_memory_comes_from_who_imports_then_from_the_least_recently_used_and_never_from_pinned():
    world, pool = loaded(40, "pinned", "old", "new")
    pool.on_pin(model("pinned"), True)
    job = pool.on_exclusive("job", 15)
    assert world.alive("old").state == "draining"
    assert world.alive("new").state == "ready"
    assert pool.leases.reserved == 0  # not before it is free
    world.step("old")
    world.step("old")
    assert pool.leases.reserved == 15
    world.answer_lease("new")
    assert job.state == "waiting"
    world.answer_lease("pinned")
    assert job.state == "held"


def test_the_spare_goes_first_and_comes_back_after_the_job():
    world, pool = loaded(20, "a", spare_bytes=4)
    assert world.alive("") is not None
    job = pool.on_exclusive("job", 8)
    assert world.alive("").state == "stopping"
    world.step("")
    world.answer_lease("a")
    assert job.state == "held"
    assert world.alive("") is None
    pool.on_release(job)
    assert world.alive("") is not None


def test_a_spare_that_is_in_nobodys_way_stays_and_holds_nobody_up():
    world, pool = loaded(30, "a", spare_bytes=4)
    job = pool.on_exclusive("job", 10)
    world.answer_lease("a")
    assert job.state == "held"
    assert world.alive("").state == "importing"


def test_what_never_fits_is_refused_with_the_numbers_at_once_and_when_it_comes_to_be_so():
    world, pool = loaded(20, "a")
    with pytest.raises(ApiError, match="job needs 21 B of memory, more than the memory budget of 20 B"):
        pool.on_exclusive("job", 21)
    waits_for = pool.on_request(model("a"))
    job = pool.on_exclusive("job", 15)
    pool.on_pin(model("a"), True)
    ((denied, err),) = world.denied
    assert denied is job
    assert "pinned models (a) hold 10 B" in err.message
    assert job.state == "over"
    assert waits_for.state == "granted"
    with pytest.raises(ApiError, match="unpin one"):
        pool.on_exclusive("job", 15)


def test_a_pinned_model_that_was_loaded_meanwhile_is_no_reason_to_wait_for_ever():
    world, pool = loaded(15, "x")
    runs = pool.on_request(model("x"))
    pool.on_pin(model("p"), True)
    request = pool.on_request(model("p"))
    job = pool.on_exclusive("job", 10)
    behind = pool.on_request(model("p"))
    pool.on_done(runs)
    for name in ("x", "x", "p"):
        world.step(name)
    assert request.state == "granted"
    pool.on_done(request)
    assert [lease for lease, _ in world.denied] == [job]
    assert behind.state == "granted"


def test_a_worker_that_dies_under_a_lease_holds_nothing_and_what_waits_for_it_is_served_afterwards():
    world, pool = loaded(20, "a")
    pool.on_pin(model("a"), True)
    job = pool.on_exclusive("job", 0)
    world.exit("a")
    assert job.state == "held"
    behind = pool.on_request(model("a"))
    pool.on_tick()
    assert world.alive("a") is None  # not revived before the job is done
    pool.on_release(job)
    world.run()
    assert behind.state == "done"


def test_a_pinned_model_that_crashed_under_a_lease_comes_back_after_it():
    world, pool = loaded(20, "a")
    pool.on_pin(model("a"), True)
    job = pool.on_exclusive("job", 0)
    world.answer_lease("a")
    world.exit("a")
    assert world.alive("a") is None
    pool.on_release(job)
    world.run()
    assert world.resident() == ["a"]


def test_loads_that_wait_behind_a_long_job_are_not_given_up():
    world, pool = loaded(20, "pinned", queue_timeout_s=500)
    pool.on_pin(model("pinned"), True)
    job = pool.on_exclusive("finetune m", 0)
    world.answer_lease("pinned")
    world.exit("pinned")
    pool.on_load(model("b"))
    request = pool.on_request(model("b"))
    for _ in range(20):
        world.clock += 500
        pool.on_tick()
    assert request.state == "done"  # its client waited long enough
    pool.on_release(job)
    pool.on_tick()
    world.run()
    assert world.resident() == ["b", "pinned"]


def test_a_load_that_waits_for_memory_after_a_long_job_has_all_its_time_and_no_more():
    world, pool = loaded(10, "a", queue_timeout_s=500, stall_timeout_s=9000)
    job = pool.on_exclusive("finetune m", 0)
    world.answer_lease("a")
    busy = pool.on_request(model("a"))
    pool.on_load(model("b"))
    world.clock += 499
    pool.on_release(job)
    assert busy.state == "granted"
    world.clock += 499
    pool.on_tick()
    assert pool.slots["b"].waiting
    late = pool.on_exclusive("eval m", 0)
    world.clock += 1
    pool.on_tick()
    assert not pool.slots["b"].waiting
    pool.on_done(busy)
    world.answer_lease("a")
    assert late.state == "held"  # it holds up no job for ever


def test_a_worker_that_does_not_let_go_is_killed_and_one_that_does_is_never_stalled():
    world, pool = loaded(20, "a", "b", stall_timeout_s=60)
    job = pool.on_exclusive("job", 0)
    world.answer_lease("b")
    worker = world.alive("b").number
    pool.on_heartbeat(worker, 1, 3)  # rows wait in it
    assert pool.next_deadline() == world.clock + 60
    world.clock += 60
    pool.on_tick()
    assert world.alive("a").state == "stopping"
    assert ("crash", "a", "stalled: it did not let go of the GPU for 60 s") in world.events
    assert job.state == "waiting"  # what it computes is over when it is gone
    world.step("a")
    assert job.state == "held"
    world.clock += 10_000
    pool.on_heartbeat(worker, 1, 3)
    pool.on_tick()
    assert world.alive("b").state == "ready"
    pool.on_release(job)
    pool.on_tick()
    assert world.alive("b").state == "ready"  # its time begins now


def test_a_model_that_is_unloaded_after_a_long_rest_has_its_time_to_drain():
    world, pool = loaded(20, "a", stall_timeout_s=60)
    pool.on_exclusive("job", 0)
    world.answer_lease("a")
    pool.on_heartbeat(world.alive("a").number, 1, 3)  # rows wait in it
    world.clock += 10_000
    pool.on_unload("a")
    pool.on_tick()
    assert world.alive("a").state == "draining"
    assert pool.next_deadline() == world.clock + 60
    assert pool.counters.crashes == 0


def test_a_lease_that_breaks_ends_its_worker_and_not_the_job():
    world, pool = loaded(20, "a")
    job = pool.on_exclusive("job", 0)
    world.answer_lease("a")
    pool.on_unleased(world.alive("a").number, "its lease broke")
    assert world.alive("a").state == "stopping"
    assert job.state == "held"
    assert pool.counters.crashes == 1


def test_who_waits_too_long_behind_a_job_hears_of_the_job_also_while_its_model_loads():
    world, pool = loaded(20, queue_timeout_s=500, load_timeout_s=2000)
    first = pool.on_request(model("a"))
    job = pool.on_exclusive("finetune m", 0)
    behind = pool.on_request(model("a"))
    assert queue_view(pool.slots["a"], behind, job, 3.0).waits_for == "lease"
    assert queue_view(pool.slots["a"], first, job, 3.0).waits_for == "load"
    world.clock += 500
    pool.on_tick()
    ((late, err),) = world.rejected
    assert late is behind
    assert (err.code, err.status, err.retry_after_s) == ("gpu_leased", 503, 10.0)
    assert err.message == "waited 8 min for model 'a': finetune m waits for the GPU before it"
    world.step("a")
    assert first.state == "granted"
    pool.on_done(first)
    world.answer_lease("a")
    held = pool.on_request(model("a"))
    world.clock += 500
    pool.on_tick()
    assert world.rejected[-1][0] is held
    assert "the GPU is held by finetune m" in world.rejected[-1][1].message


def test_the_queue_of_a_model_keeps_its_limit_behind_a_job():
    world = World()
    pool = world.pool(20)
    pool.on_exclusive("job", 0)
    for _ in range(3):
        pool.on_request(model("a", queue_limit=3))
    with pytest.raises(ApiError, match="has 3 requests waiting"):
        pool.on_request(model("a", queue_limit=3))


def test_a_load_waits_behind_a_job_and_says_so_and_an_unload_does_not():
    world, pool = loaded(30, "a")
    job = pool.on_exclusive("quantize x", 0)
    world.answer_lease("a")
    pool.on_load(model("b"))
    assert world.alive("b") is None
    assert reason_of(pool.slots["b"], job) == "its load waits: the GPU is held by quantize x"
    pool.on_unload("a")
    assert world.alive("a").state == "draining"
    world.run()
    assert world.resident() == ["b"]
    assert reason_of(pool.slots["b"], None) is None


def test_an_unload_with_force_ends_who_waits_behind_the_job_too():
    world, pool = loaded(30, "a")
    pool.on_exclusive("job", 0)
    world.answer_lease("a")
    waits = pool.on_request(model("a"))
    pool.on_unload("a", force=True)
    assert waits.state == "done"
    assert world.alive("a").state == "stopping"


def test_a_model_that_drains_is_waited_for_and_not_asked():
    world, pool = loaded(20, "a")
    pool.on_unload("a")
    job = pool.on_exclusive("job", 0)
    assert (world.alive("a").state, job.state) == ("draining", "waiting")
    world.step("a")
    world.step("a")
    assert job.state == "held"


def test_a_worker_that_only_imports_holds_nobody_up_and_is_let_go_on_after_the_job():
    world, pool = loaded(15, "a")
    runs = pool.on_request(model("a"))
    first = pool.on_request(model("b"))
    pool.on_done(runs)  # a drains, b imports meanwhile
    assert world.alive("b").state == "importing"
    job = pool.on_exclusive("job", 0)
    behind = pool.on_request(model("b"))
    pool.on_done(first)
    assert world.alive("b").state == "importing"
    world.step("a")
    world.step("a")
    assert job.state == "held"
    assert world.alive("b").state == "importing"
    pool.on_release(job)
    world.run()
    assert behind.state == "done"


def test_stopping_the_server_refuses_who_waits_for_the_gpu_and_waits_for_nobody_who_has_it():
    world, pool = loaded(20, "a")
    held = pool.on_exclusive("held", 0)
    world.answer_lease("a")
    waits = pool.on_exclusive("waits", 0)
    pool.on_shutdown()
    assert [(lease, err.code) for lease, err in world.denied] == [(waits, "shutting_down")]
    assert world.alive("a").state == "draining"
    with pytest.raises(ApiError, match="shutting down"):
        pool.on_exclusive("late", 0)
    pool.on_release(held)
    world.run()
    assert pool.empty


def test_a_lowered_budget_refuses_the_job_that_it_has_no_room_for():
    world, pool = loaded(20, "a")
    runs = pool.on_request(model("a"))
    job = pool.on_exclusive("job", 15)
    pool.on_limits(type(pool.limits)(budget_bytes=12))
    assert [lease for lease, _ in world.denied] == [job]
    assert runs.state == "granted"


def test_the_line_is_shown_as_it_is():
    _, pool = loaded(20, "a")
    assert leases_view(pool.leases).holder is None
    runs = pool.on_request(model("a", max_running=1))
    place = pool.on_request(model("a", max_running=1))
    job = pool.on_exclusive("job", 0)
    memory = pool.on_request(model("c", planned=20))
    view = leases_view(pool.leases)
    assert (view.shared, view.exclusive, view.waiting, view.holder) == (2, 0, 2, "job")
    assert queue_view(pool.slots["a"], place, job, 1.0).waits_for == "place"
    shown = queue_view(pool.slots["c"], memory, job, 1.0)
    assert (shown.waits_for, shown.holder) == ("lease", "job")
    pool.on_release(job)
    shown = queue_view(pool.slots["c"], memory, None, 1.0)
    assert (shown.waits_for, shown.holder) == ("memory", None)
    assert runs.state == "granted"
