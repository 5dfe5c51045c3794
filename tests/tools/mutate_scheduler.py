"""Break the scheduler's rules one at a time and see the tests fail.

    python tests/tools/mutate_scheduler.py [--machine-only]

Each mutation is applied to a copy of the package in a temporary folder; the working tree is never touched.
Prints one line per rule and exits non-zero if a mutation survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEDULER, PLACEMENT, ADMISSION, DEADLINES, LEASES, LENDING, STATE = (
    f"parent/pool/{name}.py"
    for name in ("scheduler", "placement", "admission", "deadlines", "leases", "lending", "state")
)

# rule, file, text, replacement
MUTATIONS: list[tuple[str, str, str, str]] = [
    (
        "who waits is placed by what its model takes now",
        SCHEDULER,
        "        for spec in specs:\n            self._slot(spec)\n",
        "",
    ),
    (
        "who waits for what a lowered budget never holds hears it",
        SCHEDULER,
        "        self._reject_unplaceable()\n        self._settle()\n\n    def on_shutdown(self)",
        "        self._settle()\n\n    def on_shutdown(self)",
    ),
    (
        "who waits and has a process that waits hears it too",
        SCHEDULER,
        "if slot.waiting and not loads:",
        "if slot.waiting and not slot.alive:",
    ),
    (
        "memory is reserved at the decision",
        SCHEDULER,
        "slot.reserved = slot.spec.planned_bytes if go else slot.spec.overhead_bytes",
        "slot.reserved = 0",
    ),
    (
        "memory stays reserved until the process is gone",
        SCHEDULER,
        "self._fx.stop(slot.worker)",
        "slot.reserved = 0; self._fx.stop(slot.worker)",
    ),
    (
        "a start must fit what is free",
        PLACEMENT,
        "if need <= free and need <= free + releasing - promised:",
        "if need <= free + releasing - promised:",
    ),
    (
        "an older request's room is not taken",
        PLACEMENT,
        "if need <= free and need <= free + releasing - promised:",
        "if need <= free:",
    ),
    (
        "an import needs room for its overhead",
        PLACEMENT,
        "0 < slot.spec.overhead_bytes <= free",
        "0 < slot.spec.overhead_bytes",
    ),
    (
        "only ready models are victims",
        PLACEMENT,
        'return slot.phase == "ready" and not slot.pinned',
        'return slot.phase in ("ready", "loading") and not slot.pinned',
    ),
    (
        "pinned models are no victims",
        PLACEMENT,
        'return slot.phase == "ready" and not slot.pinned',
        'return slot.phase == "ready"',
    ),
    (
        "busy models are not drained",
        PLACEMENT,
        'if any(v.phase == "ready" and v.owes(barrier, gate) for v in victims):',
        "if False:",
    ),
    ("least recently used first", PLACEMENT, "else (1, slot.last_used)", "else (1, -slot.last_used)"),
    ("later tickets wait behind an eviction", SCHEDULER, "and slot.waiting[0].number < held", ""),
    (
        "tickets already queued for the victim go first",
        PLACEMENT,
        "barrier = next_ticket if slot.evicts_from is None else slot.evicts_from",
        "barrier = 0",
    ),
    (
        "the line is kept over all models",
        PLACEMENT,
        "key=lambda s: s.waiting[0].number",
        "key=lambda s: -s.waiting[0].number",
    ),
    (
        "the choice between busy victims is stable",
        PLACEMENT,
        "return (2, slot.last_granted)",
        "return (2, -slot.last_granted)",
    ),
    (
        "one model's tickets in their order",
        SCHEDULER,
        "ticket = slot.waiting.popleft()",
        "ticket = slot.waiting.pop()",
    ),
    ("rows are limited", SCHEDULER, "and len(slot.running) < slot.spec.max_running", ""),
    ("queues are limited", ADMISSION, "if queued >= slot.spec.queue_limit and not internal:", "if False:"),
    (
        "a client that left starts nothing",
        SCHEDULER,
        'self._cancel_load(slot, "nobody waits for it any more")\n        elif',
        "pass\n        elif",
    ),
    ("queue time-out", SCHEDULER, "if passed(expires(slot, t, limits, gate))]:", "if False]:"),
    (
        "idle time-out",
        SCHEDULER,
        'is not None and deadline <= now:\n                self._drain(slot, "idle")',
        'is not None and False:\n                self._drain(slot, "idle")',
    ),
    (
        "pinned models never time out",
        DEADLINES,
        'slot.phase != "ready" or slot.pinned or slot.running',
        'slot.phase != "ready" or slot.running',
    ),
    (
        "a model in use never times out",
        DEADLINES,
        'slot.phase != "ready" or slot.pinned or slot.running or slot.waiting',
        'slot.phase != "ready" or slot.pinned',
    ),
    ("keep_alive of a request", SCHEDULER, "slot.keep_alive_s = ticket.keep_alive_s", "pass"),
    (
        "a failed load is told to every ticket",
        SCHEDULER,
        "self._reject(slot, ticket, load_failed(slot.name, reason, rest_s))",
        "pass",
    ),
    (
        "backoff after a failed load",
        ADMISSION,
        "if slot.reason is not None and slot.retry_at > now:",
        "if False:",
    ),
    ("backoff grows", SCHEDULER, "slot.failures += 1", "pass"),
    (
        "load by name forgets old failures",
        SCHEDULER,
        "slot.failures, slot.cooldown_s, slot.retry_at = 0, 0.0, now",
        "pass",
    ),
    ("a change of files forgets old failures", SCHEDULER, "slot.spec.stamp != spec.stamp", "False"),
    (
        "a crash ends the model's streams",
        SCHEDULER,
        'self._revoke_all(slot, error("worker_crashed"',
        'str(("worker_crashed"',
    ),
    ("cool-down after three crashes", SCHEDULER, "if len(slot.crashes) >= CRASH_LIMIT:", "if False:"),
    ("the cool-down doubles", SCHEDULER, "slot.cooldown_s * 2 or COOLDOWN_FIRST_S", "COOLDOWN_FIRST_S"),
    (
        "crashes are forgotten after a minute",
        SCHEDULER,
        "while slot.crashes[0] < now - CRASH_WINDOW_S:",
        "while False:",
    ),
    ("stall", DEADLINES, 'if slot.phase in ("ready", "draining") and slot.works:', "if False:"),
    ("a stall whose clients have left", DEADLINES, "and slot.works:", "and slot.running:"),
    ("a stall in a shutdown's drain", SCHEDULER, "if s.works]", "if s.running]"),
    (
        "who comes to a hung worker waits no longer than who was there",
        SCHEDULER,
        "if not slot.works:\n                        slot.last_progress",
        "if not slot.running:\n                        slot.last_progress",
    ),
    (
        "what a process owed is not its successor's",
        SCHEDULER,
        "slot.progress, slot.pending, slot.unload_before, slot.keep_alive_s = -1, 0, None, None",
        "slot.progress, slot.unload_before, slot.keep_alive_s = -1, None, None",
    ),
    ("a slow client is no stall", SCHEDULER, "or pending == 0", ""),
    ("idle time is no stall", SCHEDULER, "slot.last_progress = now  # what it did", "pass  # what it did"),
    (
        "load time-out",
        SCHEDULER,
        "elif passed(load_deadline(slot, limits)):",
        "elif False:",
    ),
    ("the same bytes are no loading progress", SCHEDULER, "if done_bytes > slot.loaded_bytes:", "if True:"),
    (
        "no weights before go",
        SCHEDULER,
        'self._fail(slot, "the worker loads weights before it was told to")',
        "pass",
    ),
    (
        "forced unload ends streams",
        SCHEDULER,
        "            self._revoke_all(slot, _unloaded(name))",
        "            pass",
    ),
    (
        "unload lets running requests end",
        SCHEDULER,
        "if slot.unload_before is not None and not slot.owes(slot.unload_before):",
        "if slot.unload_before is not None:",
    ),
    (
        "late events are dropped",
        SCHEDULER,
        "slot = self._by_worker.pop(worker, None)",
        "slot = self._by_worker.pop(worker, None) or next(iter(self.slots.values()))",
    ),
    (
        "one load per model",
        PLACEMENT,
        'if slot.phase == "loading" or (slot.phase == "starting" and slot.told_go):',
        "if False:",
    ),
    (
        "an older ticket of the victim is served first",
        PLACEMENT,
        "barrier = max(barrier, slot.waiting[0].number)",
        "pass",
    ),
    (
        "a model serves what it was loaded for",
        SCHEDULER,
        "slot.serves_before = self._next_ticket",
        "pass",
    ),
    (
        "the spare's bytes are reserved",
        SCHEDULER,
        "spare.reserved = self.limits.spare_bytes",
        "spare.reserved = 0",
    ),
    (
        "the spare is kept only where there is room",
        SCHEDULER,
        "if used + self.limits.spare_bytes > self.limits.budget_bytes:",
        "if False:",
    ),
    (
        "no spare is started while a model loads",
        SCHEDULER,
        'if any(s.waiting or s.phase in ("starting", "loading") for s in self.slots.values()):',
        "if False:",
    ),
    (
        "one model takes the spare",
        PLACEMENT,
        "out.adopt, adoptable, taken = slot.name, 0",
        "out.adopt, _, taken = slot.name, 0",
    ),
    (
        "the spare goes before any model",
        SCHEDULER,
        'if self.spare.phase == "starting" and is_over_budget(self._processes(), budget):',
        "if False:",
    ),
    (
        "a dead spare says nothing about the model",
        SCHEDULER,
        "and not was_dead_spare",
        "",
    ),
    (
        "shutdown refuses new requests",
        SCHEDULER,
        "        if self.closed:\n            raise",
        "        if False:\n            raise",
    ),
    (
        "nothing is granted behind a job",
        SCHEDULER,
        "held = min(max(held, slot.serves_before), self.leases.gate)",
        "held = max(held, slot.serves_before)",
    ),
    (
        "nothing is loaded behind a job",
        PLACEMENT,
        "if s.waiting and s.waiting[0].number < gate and s.phase",
        "if s.waiting and s.phase",
    ),
    (
        "no spare is started while a job waits",
        SCHEDULER,
        " or self.leases.front is not None:\n            return",
        ":\n            return",
    ),
    (
        "who waits behind a job is not waited for by an eviction",
        STATE,
        "first < min(gate, max(before, self.serves_before))",
        "first < max(before, self.serves_before)",
    ),
    (
        "a ticket that is over leaves the line",
        SCHEDULER,
        "        self.leases.leave(ticket.number)\n",
        "        pass\n",
    ),
    (
        "a ticket shares from its admission",
        SCHEDULER,
        "        self.leases.share(ticket.number)\n",
        "",
    ),
    (
        "a job waits for those before it",
        LEASES,
        "return front if next(iter(self._shared), OPEN) > front.number else None",
        "return front",
    ),
    (
        "first come, first served among jobs",
        LEASES,
        "return next(iter(self._exclusive.values()), None)",
        "return next(reversed(self._exclusive.values()), None)",
    ),
    (
        "a job's memory is the budget's",
        LENDING,
        "if victims := _victims(lease, slots, budget):",
        "if False:",
    ),
    (
        "a job's memory is reserved",
        LEASES,
        "return self.memory_bytes if self.has_room else 0",
        "return 0",
    ),
    (
        "pinned models stay for a job too",
        LENDING,
        'if not s.pinned or s.phase == "starting"',
        "if True",
    ),
    (
        "a job waits for loads and stops",
        LENDING,
        "if any(_is_moving(slot) for slot in slots):",
        "if False:",
    ),
    (
        "who only imports holds no job up",
        LENDING,
        '(slot.phase == "starting" and slot.told_go)',
        'slot.phase == "starting"',
    ),
    (
        "every loaded model is asked to rest",
        LENDING,
        'if s.phase == "ready"]',
        "if False]",
    ),
    (
        "a job waits for every answer",
        LENDING,
        'lend=all(s.lease == "held" for s in ready)',
        "lend=True",
    ),
    (
        "models go on after the job",
        SCHEDULER,
        "            self._recall()\n            return False",
        "            return False",
    ),
    (
        "what can't ever fit is refused",
        LENDING,
        "    if memory_bytes + held > budget:",
        "    if False:",
    ),
    (
        "a job that a new pin has no room for hears it",
        SCHEDULER,
        "                    self._deny(lease, err)",
        "                    pass",
    ),
    (
        "a worker under a lease is never stalled",
        DEADLINES,
        'if slot.lease == "asked" else None',
        'if slot.lease == "asked" else slot.last_progress + limits.stall_timeout_s',
    ),
    (
        "a worker that does not let go is ended",
        DEADLINES,
        'slot.lease_since + limits.stall_timeout_s if slot.lease == "asked" else None',
        "None",
    ),
    (
        "time behind a job counts also while the model loads",
        DEADLINES,
        "if loading and ticket.number < gate else",
        "if loading else",
    ),
    (
        "a job that gives up opens the gate",
        SCHEDULER,
        "        self._end_lease(lease)\n        self._settle()",
        "        self._end_lease(lease)",
    ),
    (
        "a load behind a job is not given up",
        DEADLINES,
        "if ticket.internal and ticket.number >= gate:",
        "if False:",
    ),
    ("a load's time begins after the job", SCHEDULER, "ticket.arrived = now", "pass"),
    (
        "that a model rested is no stall of its drain",
        SCHEDULER,
        'slot.lease, slot.last_progress = "none", slot.since',
        'slot.lease = "none"',
    ),
    (
        "stopping refuses jobs that wait",
        SCHEDULER,
        "            if waits:\n",
        "            if False:\n",
    ),
]


def survives(mutation: tuple[str, str, str, str], tests: list[str]) -> bool:
    """True when the tests pass although the rule is broken."""
    _, file, old, new = mutation
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "mlxpool"
        package.mkdir()
        for part in ("parent", "shared"):
            shutil.copytree(ROOT / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
        target = package / file
        text = target.read_text()
        if text.count(old) < 1:
            raise SystemExit(f"{mutation[0]}: the text to break is gone from {file}: {old!r}")
        target.write_text(text.replace(old, new, 1))
        unit = Path(folder) / "tests" / "unit"
        shutil.copytree(ROOT / "tests" / "unit", unit, ignore=shutil.ignore_patterns("__pycache__"))
        (unit.parent / "__init__.py").touch()
        # A failure is enough: the shortest example of it is of no interest here.
        (unit / "conftest.py").write_text(
            "from hypothesis import Phase, settings\n"
            "settings.register_profile('mutate', phases=[Phase.generate], database=None)\n"
            "settings.load_profile('mutate')\n"
        )
        env = dict(os.environ, PYTHONPATH=folder)
        # The tree copied above shadows the installed package: say so if it does not.
        probe = "import mlxpool.parent.pool.scheduler as s; print(s.__file__)"
        seen = subprocess.run(
            [sys.executable, "-c", probe], env=env, capture_output=True, text=True, check=True
        ).stdout
        if folder not in seen:
            raise SystemExit(f"the copy in {folder} is not what gets imported: {seen}")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", folder]
        command += [str(unit / t) for t in tests]
        return subprocess.run(command, env=env, cwd=folder, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Run every mutation; 1 if any survives."""
    tests = ["test_scheduler_machine.py"]
    if "--machine-only" not in sys.argv:
        tests[:0] = ["test_placement.py", "test_scheduler.py", "test_leases.py"]
    survivors = 0
    for mutation in MUTATIONS:
        alive = survives(mutation, tests)
        survivors += alive
        print(f"{'SURVIVES' if alive else 'caught  '}  {mutation[0]}", flush=True)
    print(
        f"{len(MUTATIONS) - survivors} of {len(MUTATIONS)} broken rules were caught by {' and '.join(tests)}"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
