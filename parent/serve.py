"""The parent's event loop: the app on its socket, the pool behind it, signals, and the way down."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from mlxpool.shared.backend import detect, worker_environment
from mlxpool.shared.config import Settings

from . import run_folder
from .edge.app import make_app
from .jobs.runner import Jobs
from .library import Library
from .pool.service import PoolService

logger = logging.getLogger("mlxpool")

# After the drain: answers whose last bytes are still on their way get this long.
CLOSE_TIMEOUT_S = 5.0


async def serve(settings: Settings, listener: socket.socket, folder: Path, argv: Sequence[str]) -> None:
    """Until a signal says otherwise. `listener` is bound and listening; it stays the caller's to close."""
    loop = asyncio.get_running_loop()
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
    jobs = Jobs(settings, folder)
    runner = web.AppRunner(
        make_app(pool, library, jobs, settings.server),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=75.0,
        shutdown_timeout=CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    site = web.SockSite(runner, listener)
    await site.start()

    host, port = listener.getsockname()[:2]
    run_folder.write_address(
        settings.home, run_folder.Address(os.getpid(), time.time(), settings.server.host, port)
    )
    shown = f"[{host}]" if ":" in host else host
    print(f"mlxpool serves on http://{shown}:{port}", flush=True)
    pool.start()

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

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    await stop.wait()
    await site.stop()  # no new connections; those that are open get their answers or their error
    await jobs.close()  # first: a job may wait for the pool, never the pool for a job
    await pool.close()
    await runner.cleanup()
