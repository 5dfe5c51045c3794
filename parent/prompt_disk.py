"""The prompt cache's folder as the parent sees it: made right before anybody serves, measured now and then.

The folder's own module (shared/kv/folder.py) does both; here is when, on which thread, and that nothing that
is wrong with a disk is a reason not to serve.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from mlxpool.shared.config import Settings
from mlxpool.shared.units import format_count, format_size

logger = logging.getLogger("mlxpool")

# Listing and deleting ten thousand files takes a fraction of a second; a disk that needs longer than this is
# waited for no more. The work goes on beside the serving, which it does not disturb.
CLEAN_LIMIT_S = 5.0


async def clean_before_serving(settings: Settings) -> None:
    """Delete what dead writers left, hold the budget, count anew. Never raises; CLEAN_LIMIT_S at most."""
    if not settings.cache.ssd or not settings.kv_folder.exists():
        return
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def work() -> None:
        _clean(settings.kv_folder, settings.cache.ssd_budget)
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass  # the server has ended in the meantime

    # A daemon, unlike the loop's own threads: a server that is told to stop waits for no disk.
    threading.Thread(target=work, daemon=True, name="clean prompts").start()
    try:
        async with asyncio.timeout(CLEAN_LIMIT_S):
            await done.wait()
    except TimeoutError:
        logger.warning(
            "the prompt cache's folder %s is still being cleaned; serving begins", settings.kv_folder
        )


def _clean(root: Path, max_bytes: int) -> None:
    from mlxpool.shared.kv import folder

    try:
        if not root.is_dir():
            raise NotADirectoryError("it is no folder")
        cleaned = folder.clean(root, max_bytes)
    except Exception as err:  # a broken folder is no cache, and no reason not to serve
        logger.warning("the prompt cache's folder %s can't be used: %s", root, err)
        return
    counts = (
        (cleaned.unfinished, "unfinished file"),
        (cleaned.foreign, "unreadable record"),
        (cleaned.evicted, "record over the budget"),
    )
    removed = ", ".join(format_count(count, noun) for count, noun in counts if count)
    logger.info(
        "prompts on disk: %s, %s%s",
        format_count(cleaned.entries, "record"),
        format_size(cleaned.bytes),
        f"; removed {removed}" if removed else "",
    )


def used_bytes(root: Path) -> int | None:
    """What all models have there, as its ledger says; None where nobody can say. Waits for a lock."""
    from mlxpool.shared.kv.budget import Budget

    try:
        return Budget(root, 0).used() if root.is_dir() else 0
    except OSError:
        return None
