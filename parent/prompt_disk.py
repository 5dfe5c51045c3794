"""The prompt cache's folder as the parent sees it: made right before anybody serves, looked at now and then.

The folder's own module (shared/kv/folder.py) does both; here is when, on which thread, and that nothing that
is wrong with a disk is a reason not to serve. All threads here are daemons, unlike the loop's own: neither a
request nor the server's end waits for a disk that hangs.

`PromptDisk` is owned by the event loop; its thread hands over what it found and keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from mlxpool.shared.config import Cache, Settings
from mlxpool.shared.units import format_count, format_size

if TYPE_CHECKING:
    from mlxpool.shared.kv.folder import FolderUse

logger = logging.getLogger("mlxpool")

# Listing and deleting ten thousand files takes a fraction of a second; a disk that needs longer than this is
# waited for no more. The work goes on beside the serving, which it does not disturb.
CLEAN_LIMIT_S = 5.0
# Who asks what is there gets what was there last when the disk needs longer than this to say.
LOOK_LIMIT_S = 5.0
# Figures for people: records come and go while they watch.
LOOK_INTERVAL_S = 5.0
# Ten thousand files take 0.1 s and more to list: resting ten times as long, that is never a tenth of a core.
REST_PER_LOOK = 10.0


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

    threading.Thread(target=work, daemon=True, name="clean prompts").start()
    try:
        async with asyncio.timeout(CLEAN_LIMIT_S):
            await done.wait()
    except TimeoutError:
        logger.warning(
            "the prompt cache's folder %s is still being cleaned; serving begins", settings.kv_folder
        )


def _clean(root: Path, max_bytes: int) -> bool:
    """Whether the folder could be cleaned. Never raises."""
    from mlxpool.shared.kv import folder

    try:
        if not root.is_dir():
            raise NotADirectoryError("it is no folder")
        cleaned = folder.clean(root, max_bytes)
    except Exception as err:  # a broken folder is no cache, and no reason not to serve
        logger.warning("the prompt cache's folder %s can't be used: %s", root, err)
        return False
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
    return True


class _Found(NamedTuple):
    """What a look found. stuck_bytes: so much is over the budget and can't be deleted; else 0."""

    folders: Sequence[FolderUse]
    stuck_bytes: int


class PromptDisk:
    """What all models have on disk, as it was when it was looked at last, and that it keeps a lowered budget.

    Workers keep the budget that they were launched with; one that a reload has lowered is kept from here.
    """

    def __init__(self, root: Path, cache: Cache, changed: Callable[[], None]) -> None:
        """changed: called after every look. Create it inside the running loop."""
        self._root = root
        self._cache = cache
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._soon = asyncio.Event()
        self._found = _Found((), 0)
        self._begun = self._ended = 0  # looks; at most one is under way
        self._over = asyncio.Event()  # the one under way is over

    @property
    def folders(self) -> Sequence[FolderUse]:
        """Each folder, last used first."""
        return self._found.folders

    @property
    def bytes(self) -> int:
        """Of all records."""
        return sum(use.bytes for use in self.folders)

    @property
    def entries(self) -> int:
        """Records."""
        return sum(use.entries for use in self.folders)

    def use(self, cache: Cache) -> None:
        """Other settings from now on."""
        self._cache = cache
        self.look_soon()

    def look_soon(self) -> None:
        """Something there is different."""
        self._soon.set()

    async def watch(self) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            self._soon.clear()
            began_s = time.monotonic()
            await self.look()
            await asyncio.sleep(REST_PER_LOOK * (time.monotonic() - began_s))
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._soon.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Look anew, for LOOK_LIMIT_S at most: later looks find what this one did. Never raises."""
        wanted = self._begun + 1  # one that is under way may have passed by what the caller wants to see
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                while self._ended < wanted:
                    if self._begun == self._ended:
                        self._begin()
                    await self._over.wait()
        except TimeoutError:
            logger.warning("the prompt cache's folder %s does not answer", self._root)

    def _begin(self) -> None:
        self._begun += 1
        self._over = asyncio.Event()
        max_bytes = self._cache.ssd_budget if self._cache.ssd else None
        stuck_bytes = self._found.stuck_bytes

        def work() -> None:
            try:
                found = _look(self._root, max_bytes, stuck_bytes)
            except Exception as err:  # what can't be read holds nothing that anybody could use
                logger.warning("the prompt cache's folder %s can't be read: %s", self._root, err)
                found = _Found((), 0)
            try:
                self._loop.call_soon_threadsafe(self._end, found)
            except RuntimeError:
                pass  # the server has ended in the meantime

        threading.Thread(target=work, daemon=True, name="look at prompts").start()

    def _end(self, found: _Found) -> None:
        self._found = found
        self._ended = self._begun
        self._over.set()
        self._changed()


def _look(root: Path, max_bytes: int | None, stuck_bytes: int) -> _Found:
    """What is there, once it is no more than `max_bytes`. stuck_bytes: what the last look left over that."""
    from mlxpool.shared.kv import folder

    uses = folder.scan(root)
    held = sum(use.bytes for use in uses)
    if max_bytes is None or held <= max_bytes:
        return _Found(uses, 0)
    if held == stuck_bytes:
        return _Found(uses, stuck_bytes)
    cleaned = _clean(root, max_bytes)
    uses = folder.scan(root)
    held = sum(use.bytes for use in uses)
    return _Found(uses, held if cleaned and held > max_bytes else 0)
