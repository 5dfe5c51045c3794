"""The scheduler's rules, one story each. No event loop, no process, no sleep."""

from __future__ import annotations

import msgspec
import pytest

from mlxpool.parent.pool.scheduler import Scheduler
from mlxpool.shared.errors import ApiError
from tests.unit.pool_world import World, model


def test_a_cold_request_loads_its_model_and_is_granted():
    world = World()
    pool = world.pool(20)
    ticket = pool.on_request(model("a"))
    assert (ticket.state, pool.slots["a"].phase) == ("queued", "starting")
    assert world.held_bytes == 10  # reserved at the decision, not when loaded
    world.step("a")
    assert (ticket.state, pool.slots["a"].phase) == ("granted", "ready")
    assert pool.counters.loads == 1


def test_ten_first_requests_join_one_load():
    world = World()
    pool = world.pool(20)
    tickets = [pool.on_request(model("a")) for _ in range(10)]
    world.run()
    assert pool.counters.loads == 1
    assert [t.number for t in world.granted] == [t.number for t in tickets]


def test_two_models_in_a_budget_for_one_are_served_in_turn():
    world = World()
    pool = world.pool(15)
    first = pool.on_request(model("a"))
    second = pool.on_request(model("b"))
    world.step("a")
    assert (first.state, second.state) == ("granted", "queued")
    assert world.resident() == ["a"]  # a waiting request evicts nobody who still serves
    pool.on_done(first)
    assert pool.slots["a"].phase == "draining"
    world.run()
    assert second.state == "done"
    assert world.resident() == ["b"]
    assert (pool.counters.loads, pool.counters.evictions) == (2, 1)


def test_a_model_is_not_evicted_before_the_request_it_was_loaded_for_is_served():
    world = World()
    pool = world.pool(10)
    a = pool.on_request(model("a"))
    b = pool.on_request(model("b"))
    c = pool.on_request(model("c"))
    world.step("a")
    assert a.state == "granted"
    world.run()
    assert [t.number for t in world.granted] == [a.number, b.number, c.number]
    assert (pool.counters.loads, pool.counters.evictions) == (3, 2)


def test_the_least_recently_used_idle_model_is_the_victim():
    world = World()
    pool = world.pool(30)
    for name in ("a", "b", "c"):
        world.clock += 1
        world.load(model(name))
    world.clock += 1
    used = pool.on_request(model("a"))
    pool.on_done(used)
    pool.on_request(model("d"))
    world.run()
    assert world.resident() == ["a", "c", "d"]


def test_small_victims_are_spared_when_a_larger_one_is_needed_anyway():
    world = World()
    pool = world.pool(20)
    for name, size in (("small", 4), ("large", 12)):
        world.clock += 1
        world.load(model(name, size))
    pool.on_request(model("new", 14))
    world.run()
    assert world.resident() == ["new", "small"]


def test_a_pinned_model_is_never_a_victim_and_what_can_never_fit_beside_it_is_refused():
    world = World()
    pool = world.pool(20)
    a = model("a")
    pool.on_pin(a, True)
    world.load(a)
    world.load(model("b"))
    pool.on_request(model("c"))
    world.run()
    assert world.resident() == ["a", "c"]
    with pytest.raises(ApiError) as refused:
        pool.on_request(model("d", 11))
    assert (refused.value.status, refused.value.code) == (400, "model_too_large")
    assert "unpin" in refused.value.message
    assert "a" in refused.value.message


def test_a_new_pin_that_leaves_no_room_refuses_those_who_wait():
    world = World()
    pool = world.pool(10)
    a = model("a")
    running = pool.on_request(a)
    world.step("a")
    waiting = pool.on_request(model("b"))
    pool.on_pin(a, True)
    assert running.state == "granted"
    assert [(t, e.code) for t, e in world.rejected] == [(waiting, "model_too_large")]


def test_resident_models_keep_serving_while_another_loads():
    world = World()
    pool = world.pool(20)
    world.load(model("a"))
    pool.on_request(model("b"))
    assert pool.slots["b"].phase == "starting"
    assert pool.on_request(model("a")).state == "granted"


def test_a_loading_model_is_never_a_victim():
    world = World()
    pool = world.pool(10)
    a = pool.on_request(model("a"))
    b = pool.on_request(model("b"))
    pool.on_loading(a.worker or 1, 1, 2)
    assert pool.slots["a"].phase == "loading"
    assert (b.state, pool.slots["b"].phase) == ("queued", "absent")
    assert "evict" not in [e for e, _, _ in world.events]


def test_tickets_already_queued_for_a_victim_are_served_first_and_later_ones_wait_behind():
    world = World()
    pool = world.pool(10)
    a = model("a", max_running=1)
    first, second = pool.on_request(a), pool.on_request(a)
    world.step("a")
    other = pool.on_request(model("b"))
    late = pool.on_request(a)
    assert (first.state, second.state, late.state) == ("granted", "queued", "queued")
    pool.on_done(first)
    assert second.state == "granted"
    pool.on_done(second)
    assert late.state == "queued"  # it would keep b waiting for ever, one by one
    assert pool.slots["a"].phase == "draining"
    world.run()
    assert [t.number for t in world.granted] == [first.number, second.number, other.number, late.number]


def test_a_steady_stream_to_one_model_can_not_starve_another():
    world = World()
    pool = world.pool(10)
    a, b = model("a"), model("b")
    stream = [pool.on_request(a)]
    world.step("a")
    waiting = pool.on_request(b)
    for _ in range(20):
        stream.append(pool.on_request(a))
        running = [t for t in stream if t.state == "granted"]
        if running:
            pool.on_done(running[0])
        for name in ("a", "b"):
            world.step(name)
    assert waiting.state in ("granted", "done")


def test_two_busy_victims_do_not_take_turns_in_putting_an_eviction_off():
    world = World()
    pool = world.pool(20)
    specs = (model("a", max_running=2), model("b", max_running=2))
    running = {spec.name: pool.on_request(spec) for spec in specs}
    world.step("a")
    world.step("b")
    waiting = pool.on_request(model("c"))
    for _ in range(10):
        fresh = {}
        for spec in specs:  # before the old ones end
            world.clock += 1
            fresh[spec.name] = pool.on_request(spec)
        for old in running.values():
            world.clock += 1
            pool.on_tick()
            pool.on_done(old)
        running = fresh
        for name in ("a", "b", "c"):
            world.step(name)
    assert waiting.state in ("granted", "done")


def test_a_victim_that_is_no_longer_needed_reopens():
    world = World()
    pool = world.pool(10)
    a = model("a")
    pool.on_request(a)
    world.step("a")
    waiting = pool.on_request(model("b"))
    held = pool.on_request(a)
    assert held.state == "queued"
    pool.on_done(waiting)  # its client left
    assert held.state == "granted"


def test_a_worker_imports_while_its_victim_drains_and_loads_once_it_is_gone():
    world = World()
    pool = world.pool(12)
    world.load(model("a"))
    pool.on_request(model("b"))
    b = world.alive("b")
    assert b is not None
    assert (pool.slots["a"].phase, b.state, b.holds) == ("draining", "importing", 1)
    world.step("a")
    assert (pool.slots["a"].phase, b.state) == ("stopping", "importing")
    world.step("a")
    assert (b.state, b.holds) == ("loading", 10)


def test_without_room_for_its_overhead_a_worker_starts_after_its_victim_is_gone():
    world = World()
    pool = world.pool(10)
    world.load(model("a"))
    pool.on_request(model("b"))
    assert world.alive("b") is None
    world.step("a")
    assert world.alive("b") is None
    world.step("a")
    assert world.alive("b") is not None


def test_an_import_of_a_younger_request_yields_to_an_older_one():
    world = World()
    pool = world.pool(12)
    world.load(model("a"))
    b = model("b")
    first_b = pool.on_request(b)
    c = pool.on_request(model("c", 12))
    pool.on_request(b)
    pool.on_done(first_b)  # c is the oldest now, and needs the byte that b's import holds
    world.run()
    assert c.state == "done"
    assert [t.model for t in world.granted if not t.internal] == ["c", "b"]


def test_a_smaller_younger_request_loads_beside_when_it_delays_nobody():
    world = World()
    pool = world.pool(30)
    world.load(model("a", 20))
    busy = pool.on_request(model("a", 20))
    pool.on_request(model("big", 20))
    small = pool.on_request(model("small", 5))
    world.step("small")
    assert small.state == "granted"
    pool.on_done(busy)
    world.run()
    assert "big" in world.resident()


def test_a_smaller_younger_request_does_not_take_room_an_older_one_waits_for():
    world = World()
    pool = world.pool(30)
    world.load(model("a", 20))
    busy = pool.on_request(model("a", 20))
    big = pool.on_request(model("big", 30))
    small = pool.on_request(model("small", 5))
    assert world.alive("small") is None
    pool.on_done(busy)
    world.run()
    assert [t.number for t in world.granted[-2:]] == [big.number, small.number]


def test_a_client_that_leaves_the_queue_starts_nothing_and_evicts_nobody():
    world = World()
    pool = world.pool(10)
    a = pool.on_request(model("a"))
    world.step("a")
    b = pool.on_request(model("b"))
    pool.on_done(b)
    pool.on_done(a)
    world.run()
    assert world.resident() == ["a"]
    assert pool.counters.evictions == 0


def test_a_load_that_nobody_waits_for_any_more_is_cancelled():
    world = World()
    pool = world.pool(10)
    tickets = [pool.on_request(model("a")) for _ in range(2)]
    pool.on_done(tickets[0])
    assert pool.slots["a"].phase == "starting"
    pool.on_done(tickets[1])
    assert pool.slots["a"].phase == "stopping"
    world.run()
    assert world.held_bytes == 0
    assert pool.slots["a"].phase == "absent"


def test_over_the_queue_limit_a_request_gets_429_with_retry_after():
    world = World()
    pool = world.pool(10)
    spec = model("a", max_running=1, queue_limit=2)
    for _ in range(2):
        pool.on_request(spec)
    with pytest.raises(ApiError) as refused:
        pool.on_request(spec)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.headers() == {"Retry-After": "5"}


def test_a_ticket_that_waited_too_long_gets_503_and_loads_nothing():
    world = World()
    pool = world.pool(10, queue_timeout_s=60)
    pool.on_request(model("a"))
    world.step("a")
    waiting = pool.on_request(model("b"))
    assert pool.next_deadline() == world.clock + 60
    world.clock += 60
    pool.on_tick()
    [(ticket, err)] = world.rejected
    assert (ticket, err.status, err.code) == (waiting, 503, "queue_timeout")
    assert err.retry_after_s is not None
    assert pool.slots["b"].phase == "absent"


def test_a_load_failure_reaches_every_waiting_ticket_with_the_reason():
    world = World()
    pool = world.pool(20)
    tickets = [pool.on_request(model("a")) for _ in range(3)]
    pool.on_failed(world.alive("a").number, "no safetensors found")
    assert [t for t, _ in world.rejected] == tickets
    assert {(e.status, e.code) for _, e in world.rejected} == {(503, "load_failed")}
    assert all("no safetensors found" in e.message for _, e in world.rejected)
    world.run()
    assert (pool.slots["a"].phase, pool.slots["a"].reason) == ("failed", "no safetensors found")
    assert world.held_bytes == 0


def test_requests_within_the_backoff_are_refused_and_the_next_one_tries_again():
    world = World()
    pool = world.pool(20)
    waits = []
    for _ in range(5):
        pool.on_request(model("a"))
        world.exit("a", "exit code 3")
        with pytest.raises(ApiError) as refused:
            pool.on_request(model("a"))
        assert refused.value.code == "load_failed"
        assert "exit code 3" in refused.value.message
        waits.append(refused.value.retry_after_s)
        world.clock += waits[-1]
    assert waits == [1, 5, 30, 30, 30]
    pool.on_request(model("a"))
    world.run()
    assert world.resident() == ["a"]


def test_the_backoff_holds_while_the_failed_process_is_still_ending():
    world = World()
    pool = world.pool(20)
    pool.on_request(model("a"))
    pool.on_failed(world.alive("a").number, "bad")
    assert pool.slots["a"].phase == "stopping"
    with pytest.raises(ApiError, match="bad"):
        pool.on_request(model("a"))


def test_load_by_name_tries_again_at_once_and_so_does_a_change_of_files():
    world = World()
    pool = world.pool(20)
    pool.on_request(model("a"))
    world.exit("a")
    pool.on_load(model("a"))
    assert world.alive("a") is not None
    world.exit("a")
    with pytest.raises(ApiError):
        pool.on_request(model("a"))
    pool.on_request(model("a", stamp="new files"))
    assert world.alive("a") is not None


def test_a_folder_with_a_fault_fails_without_a_process_and_recovers_when_mended():
    world = World()
    pool = world.pool(20)
    with pytest.raises(ApiError, match="config.json is missing"):
        pool.on_request(model("a", fault="config.json is missing"))
    assert (pool.slots["a"].phase, world.workers) == ("failed", {})
    assert pool.on_request(model("a", stamp="2")).state == "queued"


def test_a_crash_ends_that_models_streams_alone_and_the_next_request_is_served():
    world = World()
    pool = world.pool(20)
    a, b = pool.on_request(model("a")), pool.on_request(model("b"))
    world.step("a")
    world.step("b")
    world.exit("a", "killed by SIGKILL")
    [(ticket, err)] = world.revoked
    assert (ticket, err.status, err.code) == (a, 502, "worker_crashed")
    assert "SIGKILL" in err.message
    assert b.state == "granted"
    again = pool.on_request(model("a"))
    world.step("a")
    assert again.state == "granted"
    assert pool.counters.crashes == 1


def test_tickets_queued_behind_a_crash_are_served_by_the_next_worker():
    world = World()
    pool = world.pool(20)
    spec = model("a", max_running=1)
    pool.on_request(spec)
    world.step("a")
    queued = pool.on_request(spec)
    world.exit("a")
    world.step("a")
    assert queued.state == "granted"


def test_three_crashes_in_a_minute_start_a_cool_down_that_doubles_to_ten_minutes():
    world = World()
    pool = world.pool(20)
    cooldowns = []
    for _ in range(7):
        for _ in range(3):
            try:
                pool.on_request(model("a"))
            except ApiError:
                break
            world.step("a")
            world.exit("a")
        with pytest.raises(ApiError) as refused:
            pool.on_request(model("a"))
        assert refused.value.status == 503
        cooldowns.append(refused.value.retry_after_s)
        world.clock += cooldowns[-1]
    assert cooldowns[:4] == [30, 60, 120, 240]
    assert max(cooldowns) == 600


def test_two_crashes_are_forgiven():
    world = World()
    pool = world.pool(20)
    for _ in range(6):
        pool.on_request(model("a"))
        world.step("a")
        world.exit("a")
        world.clock += 31
    assert pool.on_request(model("a")).state == "queued"


def test_a_pinned_model_that_crashed_comes_back_by_itself():
    world = World()
    pool = world.pool(20)
    pool.on_pin(model("a"), True)
    world.load(model("a"))
    world.exit("a")
    world.run()
    assert world.resident() == ["a"]
    for _ in range(2):
        world.exit("a")
        world.run()
    assert world.resident() == []  # cooling down
    assert pool.next_deadline() == world.clock + 30
    world.clock += 30
    pool.on_tick()
    world.run()
    assert world.resident() == ["a"]


def test_no_progress_with_work_pending_is_a_crash():
    world = World()
    pool = world.pool(20, stall_timeout_s=60)
    ticket = pool.on_request(model("a"))
    world.step("a")
    worker = ticket.worker
    for _ in range(5):
        world.clock += 30
        pool.on_heartbeat(worker, progress=int(world.clock), pending=1)
    for _ in range(59):
        world.clock += 1
        pool.on_heartbeat(worker, progress=1150, pending=1)
        pool.on_tick()
    assert ticket.state == "granted"
    world.clock += 1
    pool.on_tick()
    [(revoked, err)] = world.revoked
    assert (revoked, err.code) == (ticket, "worker_crashed")
    assert "no progress" in err.message
    assert world.workers[worker].state == "stopping"


def test_a_worker_that_only_waits_for_a_slow_client_is_not_stalled():
    world = World()
    pool = world.pool(20, stall_timeout_s=60)
    ticket = pool.on_request(model("a"))
    world.step("a")
    for _ in range(10):
        world.clock += 30
        pool.on_heartbeat(ticket.worker, progress=7, pending=0)
        pool.on_tick()
    assert ticket.state == "granted"


def hung_and_left(world: World, **limits: float) -> Scheduler:
    """A pool whose model "a" has stood still since now, owing a row whose client has just left."""
    pool = world.pool(20, stall_timeout_s=60, **limits)
    ticket = pool.on_request(model("a"))
    world.step("a")
    pool.on_heartbeat(ticket.worker, progress=7, pending=1)
    pool.on_done(ticket)
    return pool


def still_hung(world: World, pool: Scheduler, seconds: int) -> None:
    """Heartbeats that say so, for as long."""
    worker = world.alive("a")
    assert worker is not None
    for _ in range(seconds):
        world.clock += 1
        pool.on_heartbeat(worker.number, progress=7, pending=1)
        pool.on_tick()


def test_a_hung_worker_is_given_up_although_its_clients_have_left():
    world = World()
    pool = hung_and_left(world)
    assert pool.next_deadline() == world.clock + 60
    still_hung(world, pool, 59)
    assert pool.slots["a"].phase == "ready"
    still_hung(world, pool, 1)
    assert (pool.slots["a"].phase, pool.counters.crashes) == ("stopping", 1)
    assert world.events[-1] == ("crash", "a", "stalled: no progress for 60 s")
    world.run()
    ticket = pool.on_request(model("a"))
    world.step("a")
    assert ticket.state == "granted"


def test_a_worker_that_falls_silent_owing_work_is_given_up_although_its_clients_have_left():
    world = World()
    pool = hung_and_left(world)
    world.clock += 60
    pool.on_tick()
    assert pool.slots["a"].phase == "stopping"


def test_who_comes_to_a_hung_worker_waits_for_what_is_left_of_its_time():
    world = World()
    pool = hung_and_left(world)
    still_hung(world, pool, 50)
    for _ in range(3):  # nor does it live longer because others come and leave
        pool.on_done(pool.on_request(model("a")))
    late = pool.on_request(model("a"))
    assert late.state == "granted"
    still_hung(world, pool, 10)
    [(revoked, err)] = world.revoked
    assert (revoked, err.code) == (late, "worker_crashed")


def test_a_worker_that_ends_the_work_of_clients_that_left_is_idle_again():
    world = World()
    pool = hung_and_left(world)
    still_hung(world, pool, 40)
    worker = world.alive("a")
    assert worker is not None
    pool.on_heartbeat(worker.number, progress=8, pending=0)
    world.clock += 600
    pool.on_tick()
    assert pool.slots["a"].phase == "ready"


def test_what_a_dead_worker_owed_is_no_stall_of_the_next_one():
    world = World()
    pool = hung_and_left(world)
    world.exit("a")
    world.load(model("a"))
    world.clock += 600
    pool.on_tick()
    assert pool.slots["a"].phase == "ready"


def test_a_drain_that_stands_still_with_work_pending_ends_like_any_stall():
    world = World()
    pool = hung_and_left(world)
    pool.on_unload("a")
    waiting = pool.on_request(model("a"))
    assert pool.slots["a"].phase == "draining"
    still_hung(world, pool, 60)
    assert pool.slots["a"].phase == "stopping"
    world.step("a")
    world.step("a")
    assert waiting.state == "granted"


def test_a_hung_worker_holds_up_no_shutdown_for_longer_than_its_stall():
    world = World()
    pool = hung_and_left(world)
    pool.on_shutdown()
    assert pool.next_deadline() == world.clock + 60
    still_hung(world, pool, 60)
    world.step("a")
    assert pool.empty


def test_time_spent_idle_does_not_count_as_a_stall():
    world = World()
    pool = world.pool(20, stall_timeout_s=60)
    world.load(model("a"))
    world.clock += 3600
    ticket = pool.on_request(model("a"))
    pool.on_tick()
    assert ticket.state == "granted"
    world.clock += 59
    pool.on_tick()
    assert ticket.state == "granted"


def test_a_load_without_progress_fails_and_one_with_progress_may_take_its_time():
    world = World()
    pool = world.pool(20, load_timeout_s=600)
    ticket = pool.on_request(model("a"))
    worker = world.alive("a").number
    for done in range(1, 6):
        world.clock += 500
        pool.on_loading(worker, done, 6)
        pool.on_tick()
    assert ticket.state == "queued"
    world.clock += 500
    pool.on_loading(worker, 5, 6)  # the same bytes again are no progress
    world.clock += 100
    pool.on_tick()
    [(_, err)] = world.rejected
    assert err.code == "load_failed"
    assert "no loading progress" in err.message


def test_an_idle_model_leaves_after_its_time_and_a_pinned_one_stays():
    world = World()
    pool = world.pool(20)
    pool.on_pin(model("b", idle_ttl_s=60.0), True)
    for name in ("a", "b"):
        world.load(model(name, idle_ttl_s=60.0))
    assert pool.next_deadline() == world.clock + 60
    world.clock += 60
    pool.on_tick()
    world.run()
    assert world.resident() == ["b"]
    assert pool.counters.evictions == 0


@pytest.mark.parametrize(("keep_alive", "resident"), [(0.0, []), (30.0, []), (90.0, ["a"]), (-1.0, ["a"])])
def test_a_request_sets_its_own_keep_alive(keep_alive: float, resident: list[str]):
    world = World()
    pool = world.pool(20)
    pool.on_request(model("a", idle_ttl_s=60.0), keep_alive_s=keep_alive)
    world.run()
    world.clock += 61
    pool.on_tick()
    world.run()
    assert world.resident() == resident


def test_the_next_request_without_keep_alive_brings_the_default_back():
    world = World()
    pool = world.pool(20)
    spec = model("a", idle_ttl_s=60.0)
    pool.on_request(spec, keep_alive_s=-1.0)
    world.run()
    pool.on_request(spec)
    world.run()
    assert pool.next_deadline() == world.clock + 60


def test_unload_serves_what_is_there_and_a_later_request_loads_again():
    world = World()
    pool = world.pool(20)
    spec = model("a", max_running=1)
    running, queued = pool.on_request(spec), pool.on_request(spec)
    world.step("a")
    pool.on_unload("a")
    late = pool.on_request(spec)
    pool.on_done(running)
    assert queued.state == "granted"
    pool.on_done(queued)
    assert (pool.slots["a"].phase, late.state) == ("draining", "queued")
    world.run()
    assert late.state == "done"
    assert pool.counters.loads == 2


def test_forced_unload_ends_running_streams_with_an_error_at_once():
    world = World()
    pool = world.pool(20)
    ticket = pool.on_request(model("a"))
    world.step("a")
    pool.on_unload("a", force=True)
    [(revoked, err)] = world.revoked
    assert (revoked, err.status) == (ticket, 503)
    assert "unloaded by request" in err.message
    world.run()
    assert world.resident() == []
    assert pool.counters.crashes == 0


def test_unload_cancels_a_load_that_was_only_asked_for_by_name():
    world = World()
    pool = world.pool(20)
    pool.on_load(model("a"))
    pool.on_unload("a")
    world.run()
    assert (world.resident(), pool.slots["a"].phase) == ([], "absent")


def test_what_needs_more_than_the_budget_is_refused_with_the_numbers():
    world = World()
    pool = world.pool(10**9)
    with pytest.raises(ApiError) as refused:
        pool.on_request(model("a", 2 * 10**9))
    assert (refused.value.status, refused.value.code) == (400, "model_too_large")
    assert "2.0 GB" in refused.value.message
    assert "1.0 GB" in refused.value.message


def test_real_memory_beyond_the_plans_evicts_the_idle_model():
    world = World()
    pool = world.pool(20)
    world.load(model("a"))
    world.clock += 1
    world.load(model("b"))
    pool.on_footprint(world.alive("b").number, 14)
    world.run()
    assert world.resident() == ["b"]


def test_the_last_model_is_kept_though_its_real_memory_passes_the_budget():
    world = World()
    pool = world.pool(10)
    world.load(model("a"))
    pool.on_footprint(world.alive("a").number, 14)
    assert world.resident() == ["a"]


@pytest.mark.parametrize("early", ["loading", "ready"])
def test_a_worker_that_touches_weights_before_it_is_told_to_is_stopped(early: str):
    world = World()
    pool = world.pool(12)
    world.load(model("a"))
    pool.on_request(model("b"))
    worker = world.alive("b").number
    if early == "loading":
        pool.on_loading(worker, 1, 2)
    else:
        assert not pool.on_says_ready(worker)
    assert world.workers[worker].state == "stopping"
    assert "before it was told" in world.rejected[0][1].message


def test_events_of_a_worker_that_is_gone_change_nothing():
    world = World()
    pool = world.pool(20)
    world.load(model("a"))
    old = world.alive("a").number
    world.exit("a")
    world.load(model("a"))
    pool.on_exit(old, "late")
    pool.on_failed(old, "late")
    pool.on_heartbeat(old, 1, 1)
    assert world.resident() == ["a"]
    assert pool.counters.crashes == 1


def test_shutdown_refuses_what_is_queued_and_lets_what_runs_end():
    world = World()
    pool = world.pool(10)
    running = pool.on_request(model("a"))
    world.step("a")
    queued = pool.on_request(model("b"))
    pool.on_shutdown()
    assert [(t, e.code) for t, e in world.rejected] == [(queued, "shutting_down")]
    assert (running.state, pool.slots["a"].phase) == ("granted", "draining")
    with pytest.raises(ApiError, match="shutting down"):
        pool.on_request(model("a"))
    pool.on_done(running)
    world.run()
    assert pool.empty


def test_a_drain_that_times_out_at_shutdown_cuts_what_still_runs():
    world = World()
    pool = world.pool(10)
    ticket = pool.on_request(model("a"))
    world.step("a")
    pool.on_shutdown()
    world.step("a")
    assert [(t, e.code) for t, e in world.revoked] == [(ticket, "shutting_down")]
    world.step("a")
    assert pool.empty


def test_a_second_signal_ends_everything_now():
    world = World()
    pool = world.pool(10)
    ticket = pool.on_request(model("a"))
    world.step("a")
    pool.on_shutdown()
    pool.on_shutdown_now()
    assert [t for t, _ in world.revoked] == [ticket]
    assert [w.state for w in world.workers.values()] == ["stopping"]


def stocked(budget: int = 30) -> tuple[World, Scheduler]:
    """A pool with an imported spare of 2 bytes."""
    world = World()
    pool = world.pool(budget, spare_bytes=2)
    pool.on_tick()
    spare = world.alive("")
    assert spare is not None
    pool.on_imported(spare.number)
    return world, pool


def test_the_spare_becomes_the_worker_of_the_next_model_and_is_no_model_itself():
    world, pool = stocked()
    spare = world.alive("")
    assert (pool.slots, world.held_bytes) == ({}, 2)
    pool.on_request(model("a"))
    adopted = world.alive("a")
    assert adopted is spare
    assert (adopted.state, adopted.holds, world.held_bytes) == ("loading", 10, 10)
    assert world.alive("") is None


def test_the_next_spare_is_started_after_the_first_token_and_not_before():
    world, pool = stocked()
    ticket = pool.on_request(model("a"))
    world.step("a")
    assert ticket.state == "granted"
    assert world.alive("") is None
    pool.on_first_token(ticket)
    assert world.alive("") is not None


def test_the_spare_waits_for_the_victim_of_the_model_that_takes_it():
    world, pool = stocked(14)
    world.load(model("a"))
    pool.on_done(pool.on_request(model("a")))
    spare = world.alive("")
    assert spare is not None
    pool.on_request(model("b"))
    assert world.alive("b") is spare
    assert (spare.state, world.held_bytes) == ("importing", 12)
    world.step("a")
    world.step("a")
    assert (spare.state, world.held_bytes) == ("loading", 10)


def test_the_spare_is_the_first_to_go_when_there_is_no_room():
    world, pool = stocked(20)
    world.load(model("a"))
    pool.on_done(pool.on_request(model("a")))
    assert world.alive("") is not None
    ticket = pool.on_request(model("b", 8))
    world.step("b")
    pool.on_done(ticket)
    spare = world.alive("")
    assert spare is not None
    assert world.held_bytes == 20
    pool.on_footprint(world.alive("a").number, 11)  # one byte more than was planned
    assert spare.state == "stopping"
    world.run()
    assert world.resident() == ["a", "b"]
    assert world.alive("") is None
    assert pool.counters.evictions == 0


def test_without_room_there_is_no_spare():
    world = World()
    pool = world.pool(11, spare_bytes=2)
    ticket = pool.on_request(model("a"))
    world.step("a")
    pool.on_first_token(ticket)
    assert world.alive("") is None
    pool.on_done(ticket)
    pool.on_unload("a")
    world.run()
    pool.on_tick()
    assert world.alive("") is not None


def test_two_models_at_once_do_not_share_the_spare():
    world, pool = stocked()
    pool.on_request(model("a"))
    pool.on_request(model("b"))
    assert world.alive("a") is not world.alive("b")
    assert world.held_bytes == 20


def test_a_spare_that_dies_hurts_nobody_and_is_tried_again_later():
    world, pool = stocked()
    world.exit("")
    assert world.alive("") is None
    assert world.rejected == []
    assert pool.counters.crashes == 0
    deadline = pool.next_deadline()
    assert deadline == world.clock + 1
    world.clock = deadline
    pool.on_tick()
    assert world.alive("") is not None


def test_a_spare_that_was_dead_when_it_was_taken_is_replaced_by_a_fresh_worker():
    world, pool = stocked()
    pool.on_request(model("a"))
    spare = world.alive("a")
    world.exit("a", "exit code 9")
    assert world.rejected == []
    assert world.alive("a") not in (None, spare)
    world.exit("a", "exit code 10")  # this one says something about the model
    assert "exit code 10" in world.rejected[0][1].message


def test_shutdown_ends_the_spare_too():
    world, pool = stocked()
    pool.on_shutdown()
    assert not pool.empty
    world.run()
    assert pool.empty


def test_no_spare_is_started_beside_a_load():
    world, pool = stocked()
    serving = pool.on_request(model("a"))
    world.step("a")
    pool.on_request(model("b"))
    pool.on_first_token(serving)
    assert (pool.slots["b"].phase, world.alive("")) == ("starting", None)
    world.step("b")
    assert world.alive("") is not None


def test_a_worker_that_takes_no_connection_is_ended_and_replaced():
    world = World()
    pool = world.pool(20)
    ticket = pool.on_request(model("a"))
    world.step("a")
    pool.on_unreachable(ticket.worker, "its socket is gone")
    assert [(t, e.code) for t, e in world.revoked] == [(ticket, "worker_crashed")]
    again = pool.on_request(model("a"))
    world.run()
    assert again.state == "done"
    assert pool.counters.crashes == 1
    pool.on_unreachable(ticket.worker, "late")
    assert pool.counters.crashes == 1


def test_a_wish_that_outlived_its_oldest_ticket_evicts_nobody_before_an_older_one_is_served():
    world = World()
    pool = world.pool(10)
    busy = pool.on_request(model("a"))
    world.step("a")
    gone = pool.on_request(model("b"))  # b waits for a's eviction from here on
    d = pool.on_request(model("d"))
    b = pool.on_request(model("b"))
    pool.on_done(gone)  # the oldest now is d's
    pool.on_done(busy)
    world.run()
    assert [t.number for t in world.granted] == [busy.number, d.number, b.number]
    assert pool.counters.loads == 3


def test_what_waits_for_a_model_when_it_becomes_ready_is_granted_though_others_wait_for_its_memory():
    world = World()
    pool = world.pool(10)
    spec = model("a", max_running=1)
    first, second = pool.on_request(spec), pool.on_request(spec)
    other = pool.on_request(model("b"))
    world.step("a")
    assert pool.slots["a"].serves_before == other.number + 1
    late = pool.on_request(spec)
    world.run()
    assert [t.number for t in world.granted] == [first.number, second.number, other.number, late.number]


def test_an_unload_that_is_taken_back_holds_nobody():
    world = World()
    pool = world.pool(20)
    pool.on_request(model("a"))
    world.step("a")
    pool.on_unload("a")
    held = pool.on_request(model("a"))
    assert held.state == "queued"
    pool.on_keep("a")
    assert held.state == "granted"


def test_who_waits_for_room_is_placed_by_what_its_model_takes_now():
    world = World()
    pool = world.pool(15)
    world.load(model("a", 10))
    ticket = pool.on_request(model("b", 10))
    assert (pool.slots["a"].phase, pool.slots["b"].phase) == ("draining", "starting")
    pool.on_limits(msgspec.structs.replace(pool.limits, budget_bytes=25), [model("b", 14)])
    # Beside a's 10, which are not free yet, there is room for 14 now.
    assert (pool.slots["b"].told_go, pool.slots["b"].reserved, world.held_bytes) == (True, 14, 24)
    world.run()
    assert ticket.state == "done"


@pytest.mark.parametrize("phase", ["starting", "stopping", "draining"])
def test_who_waits_for_what_a_lowered_budget_never_holds_hears_it_now(phase: str):
    world = World()
    pool = world.pool(15)
    world.load(model("a", 10))
    ticket = pool.on_request(model("b", 10))
    if phase != "starting":
        world.run()
        pool.on_request(model("a", 10))
        assert pool.slots["b"].phase == "draining"
        if phase == "stopping":
            world.step("b")
        ticket = pool.on_request(model("b", 10))
    assert pool.slots["b"].phase == phase
    pool.on_limits(msgspec.structs.replace(pool.limits, budget_bytes=9))
    assert [(refused, err.code) for refused, err in world.rejected if refused is ticket] == [
        (ticket, "model_too_large")
    ]
    world.run()
    assert world.held_bytes == 0
