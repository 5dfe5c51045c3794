"""What the parent and a worker say to each other outside of HTTP.

Two inherited pipes. The *tether* runs from parent to worker: its closing ends the worker, and one line
on it, a `Launch`, tells the worker which model to load ("go"). A worker that has not been told touches no
weights: it may import while its victim drains. The *status pipe* runs from worker to parent: one JSON
line per `Status` message. Both sides speak msgspec structs tagged by `type`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.stats import ColibriStats, ExpertSummary

# Longest line either side accepts: a failure's reason and nothing else comes near it.
MAX_LINE_BYTES = 64 * 1024

# Heartbeats are sent this often; stall_timeout is counted in the parent and is much longer.
HEARTBEAT_INTERVAL_S = 1.0

# Headers of a relayed request, parent → worker.
HEADER_REQUEST_ID = "X-Request-Id"
HEADER_ASKED_MODEL = "X-Mlxpool-Model"  # the name the client used, percent-encoded: answers echo it
HEADER_RESPONSE_ID = "X-Mlxpool-Response-Id"  # of every stream: the parent may open it in the meantime
HEADER_PREVIOUS_ID = "X-Mlxpool-Previous-Id"  # of the response that this one goes on from: echoed
HEADER_CREATED = "X-Mlxpool-Created"  # the `created` of that stream, unix seconds
HEADER_ADAPTER = "X-Mlxpool-Adapter"  # of the model's name where that was `model:adapter`; absent elsewhere


class CacheLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker keeps prompts. ram_bytes: its share of memory, 0 for none, which `POST /control/cache`
    changes. folder: the home's kv folder, where every model has one of its own; None for no tier on disk.
    ssd_budget_bytes: of all models together. idle_demote_s: None for never. spill_queue_bytes: what may wait
    to be written, before one record more is taken."""

    ram_bytes: int
    folder: str | None = None
    ssd_budget_bytes: int = 0
    idle_demote_s: float | None = 300.0
    verify: bool = True
    spill_queue_bytes: int = 0


class AdaptersLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which adapters a worker finds by themselves. folder: the home's, None for none. default: the set of a
    request that names none."""

    folder: str | None = None
    default: str | None = None


class Launch(msgspec.Struct, frozen=True, tag="launch", forbid_unknown_fields=True):
    """Which model to load and how: sent once, when its bytes are reserved and its victims are gone.

    context: tokens, the enforced limit. batch: rows that decode together. kv_pool_bytes: shared by all
    rows. memory_limit_bytes: what MLX may allocate. prefill_chunk: fixed chunk width in tokens, None to let
    the worker choose. thinking: whether a request that does not say wants reasoning, None for the model's own
    default. tool_parser, reasoning_parser: the families its answers are read by, None to tell them from its
    template and vocabulary. trace_path: where a line per request goes, None for nowhere. cache: None for none
    of prompts. adapters: see there. stream: how its experts are streamed, None where all are in memory.
    """

    model: str
    path: str
    socket: str
    context: int
    batch: int
    kv_pool_bytes: int
    memory_limit_bytes: int
    prefill_chunk: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: bool | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    trace_path: str | None = None
    cache: CacheLaunch | None = None
    adapters: AdaptersLaunch = AdaptersLaunch()
    stream: StreamLaunch | None = None


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """Every heavy import is done; the worker waits for its Launch."""

    backend: str = ""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Weights read so far. Each such line is loading progress."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The socket listens. The parent still asks it once before it believes so."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The model can't be loaded; the worker exits next. reason: for a person."""

    reason: str


class CacheSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker's prompt cache holds now and has done since its start, so that the parent can answer for
    it without asking. bytes: in memory. ssd_bytes, ssd_entries: on disk, of this model. restore_ms: of all
    restores together. The other fields are those of PromptCacheStats and SsdCacheStats."""

    bytes: int = 0
    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0
    ssd_bytes: int = 0
    ssd_entries: int = 0
    spills: int = 0
    restores: int = 0
    restore_ms: float = 0.0
    restore_ms_last: float = 0.0
    pending: int = 0
    dropped: int = 0
    failed: int = 0
    off: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", omit_defaults=True):
    """Sent every HEARTBEAT_INTERVAL_S by the worker's event loop.

    progress: counter of engine steps, prefill chunks, cache restores: it moves whenever work is done.
    pending: rows the engine still owes work to, and what a drain or a flush has asked it. A worker with
    pending work whose progress stands still is stalled; one that only waits for a slow client (pending 0) is
    not. cache: None for no prompt cache. experts: None where none are streamed.
    """

    progress: int
    pending: int
    tokens: int = 0
    cache: CacheSummary | None = None
    experts: ExpertSummary | None = None


Status = Imported | Loading | Ready | Failed | Heartbeat

Phase = Literal["starting", "loading", "ready", "draining", "stopping", "failed", "absent"]


class CacheShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /control/cache`: a worker's new share of memory. Answered once it holds no more."""

    ram_bytes: int


class MountAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /control/adapters`. path: of its folder, None for the one in the home."""

    id: str
    path: str | None = None


class MountedAdapter(msgspec.Struct, frozen=True):
    """One that a worker has mounted. layers: how many it changes. bytes: of its arrays. namespace: of the
    prompts that are kept with it alone. default: it is of the set that applies where a request names none."""

    id: str
    path: str
    rank: int
    scale: float
    layers: int
    bytes: int
    namespace: str
    default: bool = False


class AdapterList(msgspec.Struct, frozen=True):
    """The answer of `GET /control/adapters`."""

    data: list[MountedAdapter]


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one line of the answer of `POST /control/lease`, which begins once the rows that run have ended.
    It stays open, and as long as it does the worker computes nothing: the connection is the lease, and
    closing it, from either side, its end."""

    state: Literal["leased"] = "leased"


class PromptCacheStats(msgspec.Struct, frozen=True):
    """The tier in memory. entries: records held. cached_tokens: prompt tokens that needed no prefill.
    hits and misses: prompts that found a prefix here or on disk, and those that found none."""

    entries: int = 0
    bytes: int = 0
    max_bytes: int = 0
    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0


class SsdCacheStats(msgspec.Struct, frozen=True):
    """The tier on disk. entries, bytes: of this model. max_bytes: of all. spills: records written.
    demotions: records that idled out of memory. pending: records that wait to be written. dropped: records
    given up because too many waited. failed: writes that failed. off: why nothing is written just now, None
    while all is well. restore_ms: of all restores together."""

    dir: str = ""
    entries: int = 0
    bytes: int = 0
    max_bytes: int = 0
    restores: int = 0
    restore_ms_last: float = 0.0
    restore_ms: float = 0.0
    restored_bytes: int = 0
    rejected: int = 0
    spills: int = 0
    demotions: int = 0
    pending: int = 0
    pending_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    longest_durable_prefix_tokens: int = 0
    off: str | None = None


def summarise(prompts: PromptCacheStats, ssd: SsdCacheStats | None) -> CacheSummary:
    """What of these goes into a heartbeat."""
    disk = ssd if ssd is not None else SsdCacheStats()
    return CacheSummary(
        bytes=prompts.bytes,
        hits=prompts.hits,
        misses=prompts.misses,
        cached_tokens=prompts.cached_tokens,
        ssd_bytes=disk.bytes,
        ssd_entries=disk.entries,
        spills=disk.spills,
        restores=disk.restores,
        restore_ms=disk.restore_ms,
        restore_ms_last=disk.restore_ms_last,
        pending=disk.pending,
        dropped=disk.dropped,
        failed=disk.failed,
        off=disk.off,
    )


class KvStats(msgspec.Struct, frozen=True):
    """How keys and values are held. mode: their type. layers: caches by class."""

    mode: str = ""
    layers: dict[str, int] = {}


class WorkerStats(msgspec.Struct, frozen=True):
    """The body of a worker's `GET /stats`: counters since its start. colibri: None where no experts are
    streamed."""

    model: str
    requests: int
    prompt_tokens: int
    tokens: int
    cancelled: int
    errors: int
    rows: int
    waiting: int
    progress: int
    prefill_chunk: int
    context: int
    batch: int
    kv_pool_bytes: int
    kv_used_bytes: int
    active_bytes: int
    peak_bytes: int
    cache_bytes: int
    weights_bytes: int
    backend: str
    dtype: str
    tokens_per_s: float
    open_grammars: int = 0
    prompt_cache: PromptCacheStats = PromptCacheStats()
    ssd_cache: SsdCacheStats | None = None
    kv: KvStats = KvStats()
    colibri: ColibriStats | None = None


class DrainReport(msgspec.Struct, frozen=True):
    """The answer of `POST /control/drain` and `/control/flush`.

    durable: every prefix that memory held can be restored from disk. flushed: records written by this call.
    missing: records that are not on disk. pending: requests that were still open when a drain's time was up.
    dropped, failed: records given up and writes that failed, since the worker's start. off: why nothing is
    written just now, left out while all is well.
    """

    durable: bool
    flushed: int = 0
    missing: int = 0
    pending: int = 0
    dropped: int = 0
    failed: int = 0
    elapsed_ms: float = 0.0
    off: str | msgspec.UnsetType = msgspec.UNSET
