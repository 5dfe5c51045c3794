"""A worker's life: tether, imports, launch, load, serve.

The order is the point. The tether's thread runs before any heavy import, so a parent that dies takes the
worker with it whatever it is doing. Then everything heavy is imported, because a spare or a successor
waits right there for its `Launch`; nothing of a model is touched before it comes. Then the engine's
thread reads the weights while this thread imports the server and opens the tokenizer beside it. `Ready`
is said when the socket listens and the first forward pass is done.

The status pipe is written from several threads; `StatusPipe` owns its lock. A failure to load is said in
one line for a person (`Failed`), with the traceback on stderr, and ends the process with exit code 3.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from mlxpool.shared import tether

if TYPE_CHECKING:
    from mlxpool.shared.control import Launch, Status
    from mlxpool.worker.engine.engine import Engine
    from mlxpool.worker.engine.terms import Loaded

LOAD_FAILED_EXIT_CODE = 3

# What an engine that was told to stop may take to end the pass it is in, between two groups of experts.
LAST_TURN_S = 2.0


class StatusPipe:
    """The worker's end of the status pipe: one JSON line per message, whole, from any thread."""

    def __init__(self, descriptor: int) -> None:
        import msgspec

        self._descriptor = descriptor
        self._encode = msgspec.json.encode
        self._lock = threading.Lock()

    def send(self, status: Status) -> None:
        """Write a message. A parent that no longer reads is the tether's business, not an error here."""
        line = self._encode(status) + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                pass


def _arguments(argv: list[str] | None) -> Any:
    import argparse

    parser = argparse.ArgumentParser(prog="mlxpool.worker", description="One model's process.")
    parser.add_argument("--tether-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--name", default="", help="shown in process listings only")
    return parser.parse_args(argv)


def _import_mlx_lm() -> None:
    """mlx_lm without torch: transformers imports torch where it is installed, for 2 s and 190 MB that
    nothing here uses. The block is lifted again for what needs torch later."""
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import mlx_lm.models.cache
        import mlx_lm.sample_utils
        import mlx_lm.utils  # noqa: F401
    finally:
        if absent:
            del sys.modules["torch"]


def main(argv: list[str] | None = None) -> int:
    """The process. Returns its exit code: 0 after SIGTERM, 3 when the model can't be loaded."""
    options = _arguments(argv)
    lines = tether.watch(options.tether_fd)
    # A person's Ctrl-C reaches the whole foreground; what it means is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Until the loop has its own handler: nothing to clean up yet.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    status = StatusPipe(options.status_fd)

    from mlxpool.shared import control
    from mlxpool.shared.backend import open_files_lack

    lack = open_files_lack()
    if lack is not None:
        return _failed(status, lack)
    try:
        _import_mlx_lm()
        from mlxpool.worker.load import backend

        status.send(control.Imported(backend=backend()))
        # Beside the wait for the launch, which takes a victim's whole drain.
        from mlxpool.worker import server  # noqa: F401
    except Exception as err:
        return _failed(status, f"the worker can't start: {type(err).__name__}: {err}")

    import msgspec

    try:
        launch = msgspec.json.decode(lines.get(), type=control.Launch)
    except msgspec.MsgspecError as err:
        return _failed(status, f"the worker can't read its launch: {err}")
    return _serve(launch, status)


def _failed(status: StatusPipe, reason: str) -> int:
    import traceback

    from mlxpool.shared import control

    if sys.exc_info()[0] is not None:
        traceback.print_exc()
        sys.stderr.flush()
    status.send(control.Failed(reason=reason))
    return LOAD_FAILED_EXIT_CODE


def _serve(launch: Launch, status: StatusPipe) -> int:
    import uvloop

    async def run_and_exit() -> NoReturn:
        code = await _run(launch, status)
        sys.stderr.flush()
        sys.stdout.flush()
        # From inside the loop: the engine's thread may be in a long eval, or about to call a closed loop.
        os._exit(code)

    uvloop.run(run_and_exit())
    raise AssertionError("the worker's loop ended without an exit")


async def _run(launch: Launch, status: StatusPipe) -> int:
    import asyncio
    import gc
    from pathlib import Path

    from mlxpool.shared import control
    from mlxpool.shared.chat import ChatTokenizerError, read_json
    from mlxpool.shared.prompt.families import families
    from mlxpool.shared.prompt.rendering import Renderer
    from mlxpool.worker import load
    from mlxpool.worker.adapters.mounted import STREAMED_REFUSAL, Adapters
    from mlxpool.worker.cache.open import open_cache
    from mlxpool.worker.engine.chunks import ChunkWidth
    from mlxpool.worker.engine.engine import Engine
    from mlxpool.worker.engine.terms import Limits
    from mlxpool.worker.grammar.service import GrammarService
    from mlxpool.worker.request.model_text import model_text
    from mlxpool.worker.request.plan import defaults
    from mlxpool.worker.request.prepare import Preparer
    from mlxpool.worker.server import Server

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    folder = Path(launch.path)
    began_s = time.perf_counter()

    def load_weights() -> Loaded:
        cached_bytes = launch.cache.ram_bytes if launch.cache is not None else 0
        limit_bytes = launch.memory_limit_bytes + cached_bytes

        def tell(done: int, total: int) -> None:
            status.send(control.Loading(done, total))

        if launch.stream is None:
            load.set_memory_limits(limit_bytes)
            return load.load(folder, tell)
        # Its own imports, of which other models need none.
        from mlxpool.worker.colibri import serving

        serving.set_memory_limits(limit_bytes, launch.stream)
        return serving.load_streamed(folder, launch.stream, tell)

    fixed, flat = launch.prefill_chunk, False
    if launch.stream is not None:
        fixed, flat = launch.stream.chunk, True
    engine = Engine(
        load_weights,
        Limits(launch.batch, launch.kv_pool_bytes),
        ChunkWidth(load.backend(), fixed, flat),
        lambda loaded: open_cache(launch, loaded, load.backend(), engine),
    )
    engine.start()
    heartbeat = asyncio.ensure_future(_heartbeat(engine, status))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        # In the loop's own default pool: the weights are read meanwhile.
        tokenizer = await loop.run_in_executor(None, load.load_tokenizer, folder)
        base = defaults(launch, read_json(folder / "generation_config.json"))
        waits: set[asyncio.Future[Any]] = {engine.loaded, stopped}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        loaded = await engine.loaded
        known = families(tokenizer, launch.tool_parser, launch.reasoning_parser)
        grammars = GrammarService(tokenizer, loaded.logits_width, launch.batch)
        adapters = Adapters(
            engine,
            loaded.make_cache,
            launch.adapters,
            launch.memory_limit_bytes,
            STREAMED_REFUSAL if launch.stream is not None else None,
        )
        renderer = Renderer(tokenizer, known, launch.thinking)
        preparer = Preparer(tokenizer, base, renderer, grammars, adapters)
        text = model_text(tokenizer)
        server = Server(launch, engine, loaded, text, tokenizer, preparer, grammars, adapters)
        await server.start()
    except (load.LoadError, ChatTokenizerError, OSError) as err:
        return _failed(status, str(err))
    except Exception as err:
        return _failed(status, f"loading failed: {type(err).__name__}: {err}")
    # What is here now stays: a full collection would look at all of it, 25 ms with everything waiting.
    gc.freeze()
    status.send(control.Ready())
    sys.stderr.write(
        f"ready: {launch.model}, {loaded.weights_bytes} bytes of {loaded.dtype} in "
        f"{time.perf_counter() - began_s:.2f} s\n"
    )
    sys.stderr.flush()
    await stopped
    heartbeat.cancel()
    # What was counted since the last one, a drain's writes above all.
    _beat(engine, status)
    engine.stop()
    await server.close()
    if loaded.stream is not None:
        # It writes what was learned of the experts.
        await asyncio.to_thread(engine.join, LAST_TURN_S)
    return 0


async def _heartbeat(engine: Engine, status: StatusPipe) -> NoReturn:
    """Progress and what is owed, from the event loop: a hung engine shows as progress standing still."""
    import asyncio

    from mlxpool.shared import control

    while True:
        _beat(engine, status)
        await asyncio.sleep(control.HEARTBEAT_INTERVAL_S)


def _beat(engine: Engine, status: StatusPipe) -> None:
    from mlxpool.shared import control
    from mlxpool.shared.colibri.stats import summarise

    counters, cache = engine.counters, engine.cache
    told = None if cache is None else control.summarise(cache.stats(), cache.ssd_stats())
    experts = None if engine.streamed is None else summarise(engine.streamed.stats())
    # An engine that leaves a drain's calls unanswered is as hung as one that leaves its rows.
    pending = engine.pending + engine.asked
    status.send(control.Heartbeat(engine.progress, pending, counters.tokens, told, experts))
