"""`mlxpool up`: from settings to a served port, and back to nothing left behind.

Order of the start: lock the home, end what a killed predecessor left, bind the port, then build the pool. The
port is bound early so that a second server is told at once; nothing loads before it is served.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence

from mlxpool.shared.config import Settings

from . import run_folder
from .pool import reaper

logger = logging.getLogger("mlxpool")

EXIT_OK = 0
EXIT_FAILED = 1
# Pending connections while the loop is busy: a burst of agents must not be refused.
BACKLOG = 512


def run(
    settings: Settings,
    *,
    read_again: Callable[[], Settings] | None = None,
    worker_argv: Sequence[str] | None = None,
) -> int:
    """Serve in the foreground until SIGTERM or SIGINT. The exit code.

    read_again: the settings as file, environment and flags make them at a later time, for a reload; None =
    they never change. worker_argv: how a worker is started (tests put a scripted one there); None = the real.
    """
    _log_to_stderr()
    try:
        lock = run_folder.acquire_lock(settings.home)
    except run_folder.RunFolderError as err:
        print(f"mlxpool: {err}", file=sys.stderr)
        return EXIT_FAILED
    with lock:
        return _serve_locked(settings, read_again or (lambda: settings), worker_argv)


def _serve_locked(
    settings: Settings, read_again: Callable[[], Settings], worker_argv: Sequence[str] | None
) -> int:
    try:
        folder = run_folder.make_run_folder(settings.home)
        reaped = reaper.reap(folder)
        listener = _bind(settings.server.host, settings.server.port)
    except (run_folder.RunFolderError, OSError) as err:
        print(f"mlxpool: {err}", file=sys.stderr)
        return EXIT_FAILED
    if reaped:
        logger.warning("ended %d worker(s) that a killed server left: %s", len(reaped), reaped)
    import uvloop

    from .serve import serve

    argv = worker_argv if worker_argv is not None else (sys.executable, "-m", "mlxpool.worker")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, read_again, listener, folder, argv))
    finally:
        run_folder.remove_address(settings.home)
        listener.close()
    return EXIT_OK


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError that says which address and what to do."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as err:
        raise OSError(
            f"can't listen on {host}:{port}: {err.strerror or err}; choose another with --port"
        ) from err
    listener.setblocking(False)
    return listener


def _log_to_stderr() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
