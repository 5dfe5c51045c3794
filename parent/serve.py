"""The parent's event loop: the app on its socket, the pool behind it, signals, and the way down."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from mlxpool.shared.backend import detect, worker_environment
from mlxpool.shared.config import ConfigError, Settings
from mlxpool.shared.memory import Budget
from mlxpool.shared.units import format_size

from . import run_folder
from .database import FILE_NAME as STATE_FILE
from .database import Database
from .edge.app import Parts, make_app
from .edge.events import EventHub
from .edge.http_server import listen
from .edge.models import view_model
from .edge.responses_background import interrupted
from .edge.trace import Trace
from .history.store import HistoryStore
from .jobs.runner import Jobs
from .library import Library
from .migrations import MIGRATIONS
from .pool.service import PoolService
from .prompt_disk import clean_before_serving
from .reload import Live, Reloader, switch_trace

logger = logging.getLogger("mlxpool")

# After the drain: answers whose last bytes are still on their way get this long.
CLOSE_TIMEOUT_S = 5.0


async def serve(
    settings: Settings,
    read_again: Callable[[], Settings],
    listener: socket.socket,
    folder: Path,
    argv: Sequence[str],
) -> None:
    """Until a signal says otherwise. `listener` is bound and listening; it stays the caller's to close.

    read_again: the settings as they are now, for a reload.
    """
    loop = asyncio.get_running_loop()
    await clean_before_serving(settings)
    backend = detect()
    library = Library(settings)
    pool = PoolService(
        settings,
        library,
        backend,
        argv=argv,
        env=worker_environment(backend, os.environ),
        run_folder=folder,
    )
    live, trace = Live(settings), Trace()
    database = Database(settings.home / STATE_FILE, MIGRATIONS)
    own_url = _own_url(listener)
    jobs = Jobs(lambda: live.settings, folder, database, pool, backend, own_url=own_url)
    history = HistoryStore(database, lambda: live.settings.history)
    await history.open(interrupted)
    await jobs.open()
    switch_trace(trace, settings)
    reloader = Reloader(live, read_again, library, pool, trace, history)
    hub = EventHub(
        {
            "pool": pool.view,
            "models": lambda: [view_model(pool, library, model) for model in library.models()],
        }
    )
    pool.changed = hub.changed
    pool.listeners.event = partial(hub.line, "event")
    pool.listeners.log_line = hub.log_line
    jobs.subscribe(partial(hub.line, "job"))
    telling = loop.create_task(hub.run())
    runner = web.AppRunner(
        make_app(
            Parts(pool, library, jobs, hub, trace, lambda: live.settings.server, reloader.reload, history)
        ),
        handler_cancellation=True,
        shutdown_timeout=CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    server = await listen(runner, listener)

    # Before the address is told: whoever reads it may stop us the next moment.
    stop = asyncio.Event()
    asked = 0

    def on_signal(name: str) -> None:
        nonlocal asked
        asked += 1
        logger.info("%s: %s", name, "stopping" if asked == 1 else "stopping now")
        if asked == 1:
            stop.set()
        else:
            pool.close_now()

    def on_hangup() -> None:
        try:
            reloader.reload()
        except ConfigError as err:
            logger.error("config: nothing was changed: %s", err)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)

    host, port = listener.getsockname()[:2]
    run_folder.write_address(
        settings.home, run_folder.Address(os.getpid(), time.time(), settings.server.host, port)
    )
    shown = f"[{host}]" if ":" in host else host
    print(f"mlxpool serves on http://{shown}:{port}", flush=True)
    _tell_memory(pool.budget)
    await library.look()
    pool.start()
    await stop.wait()
    server.close()  # no new connections; those that are open get their answers or their error
    await jobs.close()  # first: a job may wait for the pool, never the pool for a job
    await pool.close()
    telling.cancel()
    await runner.cleanup()
    await history.close()
    await database.close()
    trace.switch(None)


def _own_url(listener: socket.socket) -> str:
    """Where a process of this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    # One that listens everywhere is reached on the machine's own address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _tell_memory(budget: Budget) -> None:
    prompts = (
        f", {format_size(budget.prompt_cache_bytes)} for their prompts" if budget.prompt_cache_bytes else ""
    )
    logger.info("memory: %s for models%s", format_size(budget.models_bytes), prompts)
