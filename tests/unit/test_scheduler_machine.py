"""The scheduler under every order of events that hypothesis can think of, design.md's rules as invariants.

The rules are judged from what the scheduler did to the world (pool_world.World), not from its own books.
`tests/tools/mutate_scheduler.py` breaks the rules one by one and sees this file or its neighbours fail.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxpool.parent.pool.leases import Lease
from mlxpool.parent.pool.state import Ticket
from mlxpool.shared.errors import ApiError
from tests.unit.pool_world import World, model

BUDGET = 20
SPECS = {
    "a": model("a", 8, overhead_bytes=2, max_running=2, queue_limit=4, idle_ttl_s=300.0),
    "b": model("b", 10, overhead_bytes=2, max_running=1, queue_limit=4, idle_ttl_s=None),
    "c": model("c", 13, overhead_bytes=3, max_running=2, queue_limit=4, idle_ttl_s=30.0),
    "d": model("d", 20, overhead_bytes=0, max_running=1, queue_limit=3, idle_ttl_s=300.0),
}
NAMES = st.sampled_from(sorted(SPECS))


class PoolMachine(RuleBasedStateMachine):
    """Clients, processes, an operator and a clock, all acting at random on one pool."""

    spare_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.pool = self.world.pool(
            BUDGET, spare_bytes=self.spare_bytes, queue_timeout_s=500, load_timeout_s=200, stall_timeout_s=60
        )
        self.tickets: list[Ticket] = []
        self.pinned: set[str] = set()
        self.failed_until: dict[str, float] = {}
        self.seen = {"events": 0, "granted": 0, "granted behind": 0, "workers": 0}
        self.leases: list[Lease] = []

    # ---- clients ----

    @rule(name=NAMES, keep_alive=st.sampled_from([None, None, 0.0, 10.0, -1.0]))
    def request(self, name: str, keep_alive: float | None) -> None:
        waiting = sum(t.state == "queued" and t.model == name for t in self.tickets)
        before = len(self.world.workers)
        refusal: ApiError | None = None
        try:
            self.tickets.append(self.pool.on_request(SPECS[name], keep_alive_s=keep_alive))
        except ApiError as err:
            refusal = err
        if refusal is None:
            assert waiting < SPECS[name].queue_limit
            return
        assert len(self.world.workers) == before, "a refused request started a process"
        if refusal.code == "queue_full":
            assert waiting >= SPECS[name].queue_limit
        elif refusal.code == "load_failed":
            assert self.world.clock < self.failed_until.get(name, 0.0), "refused although its rest is over"
            assert refusal.retry_after_s is not None
        else:
            assert refusal.code == "model_too_large"
            assert self.pinned - {name}

    @precondition(lambda self: any(t.state != "done" for t in self.tickets))
    @rule(data=st.data())
    def finish_or_leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([t for t in self.tickets if t.state != "done"]))
        self.pool.on_done(ticket)
        assert ticket.state == "done"

    # ---- jobs ----

    @property
    def asks(self) -> list[Lease]:
        """Jobs that want the GPU or have it."""
        return [lease for lease in self.leases if lease.state != "over"]

    @precondition(lambda self: len(self.asks) < 3)
    @rule(needs=st.sampled_from([0, 0, 3, 9, 14, 20, 21]))
    def want_the_gpu(self, needs: int) -> None:
        kept = sum(w.holds for w in self.world.workers.values() if self._is_kept(w.spec.name, w.state))
        try:
            self.leases.append(self.pool.on_exclusive(f"job {len(self.leases)}", needs))
        except ApiError as err:
            refusal = err.code
        else:
            assert needs + kept <= BUDGET
            return
        assert refusal == "model_too_large"
        assert needs + kept > BUDGET, "refused although it may fit"

    def _is_kept(self, name: str, state: str) -> bool:
        return name in self.pinned and state != "gone"

    @precondition(lambda self: bool(self.asks))
    @rule(data=st.data())
    def give_back_or_give_up(self, data: st.DataObject) -> None:
        self.pool.on_release(data.draw(st.sampled_from(self.asks)))

    @rule(name=NAMES)
    def lease_answered(self, name: str) -> None:
        self.world.answer_lease(name)

    @rule(name=NAMES)
    def lease_breaks(self, name: str) -> None:
        worker = self.world.alive(name)
        if worker is not None and worker.state == "ready" and worker.lease != "none":
            self.pool.on_unleased(worker.number, "its lease broke")
            self.failed_until[name] = self.world.clock + 600

    # ---- processes ----

    @rule(name=NAMES)
    def process_moves(self, name: str) -> None:
        self.world.step(name)

    @rule()
    def all_processes_come_to_rest(self) -> None:
        """Without it a model is seldom ready: each of its steps is one rule of twenty."""
        while any(self.world.step(name) for name in SPECS):
            pass

    @rule(names=st.lists(NAMES, max_size=2))
    def requests_are_served(self, names: list[str]) -> None:
        for name in names:
            self.request(name, None)
        self.all_processes_come_to_rest()

    @rule(name=NAMES)
    def imported(self, name: str) -> None:
        worker = self.world.alive(name)
        if worker is not None and worker.state in ("importing", "loading"):
            self.pool.on_imported(worker.number)

    @rule()
    def spare_dies(self) -> None:
        if self.world.alive("") is not None:
            self.world.exit("")

    @precondition(lambda self: any(t.state == "granted" for t in self.tickets))
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.pool.on_first_token(
            data.draw(st.sampled_from([t for t in self.tickets if t.state == "granted"]))
        )

    @rule(name=st.sampled_from([*sorted(SPECS), ""]))
    def process_is_gone(self, name: str) -> None:
        worker = self.world.alive(name)
        if worker is not None and worker.state == "stopping":
            self.world.step(name)

    @rule(name=NAMES)
    def load_fails(self, name: str) -> None:
        worker = self.world.alive(name)
        if worker is not None and worker.state in ("importing", "loading"):
            self.pool.on_failed(worker.number, "bad weights")
            self.failed_until[name] = self.world.clock + 30

    @rule(name=NAMES)
    def process_dies(self, name: str) -> None:
        if self.world.alive(name) is not None:
            running = [t for t in self.tickets if t.state == "granted" and t.model == name]
            others = [t for t in self.tickets if t.state == "granted" and t.model != name]
            self.world.exit(name, "killed by SIGABRT")
            self.failed_until[name] = self.world.clock + 600
            assert all(t.state == "done" for t in running)
            assert all(t.state == "granted" for t in others), "a crash touched another model's streams"

    @rule(name=NAMES, moved=st.booleans())
    def heartbeat(self, name: str, moved: bool) -> None:
        worker = self.world.alive(name)
        if worker is not None and worker.state == "ready":
            self.pool.on_heartbeat(worker.number, int(self.world.clock) if moved else 0, 1)

    # ---- operator ----

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        try:
            self.pool.on_load(SPECS[name])
        except ApiError:
            pass
        else:
            self.failed_until.pop(name, None)

    @rule(name=NAMES, force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        self.pool.on_unload(name, force=force)
        if force:
            assert not [t for t in self.tickets if t.state != "done" and t.model == name]

    @rule(name=NAMES, pin=st.booleans())
    def pin(self, name: str, pin: bool) -> None:
        (self.pinned.add if pin else self.pinned.discard)(name)
        self.pool.on_pin(SPECS[name], pin)

    # ---- time ----

    @rule(seconds=st.sampled_from([0.5, 5.0, 31.0, 61.0, 250.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock += seconds
        for ticket in self.tickets:  # a load failed by the clock rests too
            self.failed_until.setdefault(ticket.model, 0.0)
        before = {w.number: w.state for w in self.world.workers.values()}
        self.pool.on_tick()
        for worker in self.world.workers.values():
            if worker.state == "stopping" and before.get(worker.number) in ("loading", "importing", "ready"):
                self.failed_until[worker.spec.name] = self.world.clock + 600
        deadline = self.pool.next_deadline()
        assert deadline is None or deadline > self.world.clock, "a limit has passed and nothing was done"

    # ---- invariants ----

    @invariant()
    def memory_is_never_promised_twice(self) -> None:
        assert self.world.held_bytes + self.pool.leases.reserved <= BUDGET
        reserved = sum(s.reserved for s in self.pool.slots.values()) + self.pool.spare.reserved
        assert reserved == self.world.held_bytes

    @invariant()
    def only_idle_unpinned_ready_models_are_evicted(self) -> None:
        new, self.seen["events"] = self.world.events[self.seen["events"] :], len(self.world.events)
        for event, name, _ in new:
            if event in ("evict", "drain"):
                assert not [t for t in self.tickets if t.state == "granted" and t.model == name]
            if event == "evict":
                assert name not in self.pinned

    @invariant()
    def tickets_of_one_model_are_granted_in_their_order(self) -> None:
        new, self.seen["granted"] = self.world.granted[self.seen["granted"] :], len(self.world.granted)
        for ticket in new:
            if ticket.internal:
                continue
            older = [
                t
                for t in self.tickets
                if t.model == ticket.model and t.number < ticket.number and t.state == "queued"
            ]
            assert not older

    @invariant()
    def rows_and_queues_keep_their_limits(self) -> None:
        for name, spec in SPECS.items():
            of = [t for t in self.tickets if t.model == name]
            assert sum(t.state == "granted" for t in of) <= spec.max_running
            assert sum(t.state == "queued" for t in of) <= spec.queue_limit

    @invariant()
    def nothing_starts_or_loads_that_nobody_waits_for(self) -> None:
        for worker in self.world.workers.values():
            if worker.state in ("importing", "loading") and worker.spec.name:
                slot = self.pool.slots[worker.spec.name]
                assert slot.waiting, "a process works for nobody"

    @invariant()
    def a_ready_model_with_free_rows_holds_back_only_for_an_older_wish(self) -> None:
        for name, slot in self.pool.slots.items():
            if slot.phase == "ready" and slot.waiting and len(slot.running) < SPECS[name].max_running:
                head = slot.waiting[0].number
                evictions = [
                    s.evicts_from
                    for s in self.pool.slots.values()
                    if s.waiting and s.evicts_from is not None and s.name != name
                ]
                unload = [slot.unload_before] if slot.unload_before is not None else []
                jobs = [lease.number for lease in self.asks]
                assert any(b <= head for b in evictions + unload + jobs), "held back for nothing"

    @invariant()
    def nothing_is_granted_or_started_behind_a_job(self) -> None:
        first = min((lease.number for lease in self.asks), default=None)
        granted = self.world.granted[self.seen["granted behind"] :]
        started = list(self.world.workers.values())[self.seen["workers"] :]
        self.seen["granted behind"], self.seen["workers"] = (
            len(self.world.granted),
            len(self.world.workers),
        )
        if first is None:
            return
        assert not [t for t in granted if t.number > first]
        for worker in started:
            if worker.state in ("importing", "loading"):
                assert worker.spec.name, "a spare was started while a job waits"
                assert self.pool.slots[worker.spec.name].waiting[0].number < first

    @invariant()
    def a_job_that_has_the_gpu_is_alone_and_has_its_memory(self) -> None:
        held = [lease for lease in self.asks if lease.state == "held"]
        assert len(held) <= 1
        if held:
            assert held[0] is self.asks[0], "it overtook another one"
            assert self.pool.leases.reserved == held[0].memory_bytes
            assert not [t for t in self.tickets if t.state == "granted"]
            for worker in self.world.workers.values():
                assert worker.state != "loading"
                assert worker.state != "ready" or worker.lease == "held"

    @invariant()
    def models_rest_for_a_job_whose_turn_it_is_alone(self) -> None:
        asked = [w for w in self.world.workers.values() if w.state == "ready" and w.lease != "none"]
        if asked:
            assert self.asks, "a model rests for nobody"
            assert not [t for t in self.tickets if t.state != "done" and t.number < self.asks[0].number]

    def teardown(self) -> None:
        """From any state, if clients end and processes do their part, no ticket waits for ever."""
        for name in list(self.pinned):
            self.pool.on_pin(SPECS[name], False)
        self.world.run()
        left = [t for t in self.tickets if t.state != "done"]
        assert not left, f"{left} wait for ever"
        assert not self.asks, f"{self.asks} wait for ever"
        states = [w.state for w in self.world.workers.values() if w.spec.name]
        assert not {"importing", "loading", "draining"} & set(states)
        self.pool.on_shutdown()
        self.world.run()
        assert self.pool.empty
        assert self.world.held_bytes == 0


class PoolMachineWithSpare(PoolMachine):
    """The same, with a worker kept in reserve."""

    spare_bytes = 2


PoolMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
TestPoolMachine = PoolMachine.TestCase
PoolMachineWithSpare.TestCase.settings = PoolMachine.TestCase.settings
TestPoolMachineWithSpare = PoolMachineWithSpare.TestCase
