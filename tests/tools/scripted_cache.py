"""The prompt cache of a scripted worker: what it would hold, told the way a real one tells it.

A prompt is one record of `prompt_bytes`; asked again it is a hit. Nothing is kept anywhere: "on disk" is a
count. Owned by the engine that it belongs to.
"""

from __future__ import annotations

import msgspec

from mlxpool.shared.control import (
    CacheLaunch,
    CacheSummary,
    DrainReport,
    PromptCacheStats,
    SsdCacheStats,
    summarise,
)
from tests.tools.scripted_script import Script


class ScriptedCache:
    """Records by prompt, with whether each is on disk."""

    def __init__(self, launch: CacheLaunch | None, script: Script) -> None:
        self._launch = launch if launch is not None else CacheLaunch(0)
        self._script = script
        self._durable: dict[str, bool] = {}
        self._hits = self._misses = self._cached_tokens = self._spills = 0
        self.share_bytes = self._launch.ram_bytes

    def ask(self, prompt: str, tokens: int) -> None:
        """A request with this prompt."""
        if prompt in self._durable:
            self._hits += 1
            self._cached_tokens += tokens
        else:
            self._misses += 1
            self._durable[prompt] = False

    def flush(self) -> DrainReport:
        """Everything is written but what the script says can't be; nothing where there is no disk."""
        if self._launch.folder is None:
            return DrainReport(durable=True)
        missing = min(self._script.cache_missing, len(self._durable))
        fresh = [prompt for prompt, durable in self._durable.items() if not durable]
        written = fresh[: len(fresh) - missing]
        for prompt in written:
            self._durable[prompt] = True
        self._spills += len(written)
        off = "the disk is full" if missing else msgspec.UNSET
        return DrainReport(missing == 0, flushed=len(written), missing=missing, failed=missing, off=off)

    @property
    def prompt_stats(self) -> PromptCacheStats:
        """The tier in memory."""
        return PromptCacheStats(
            entries=len(self._durable),
            bytes=min(len(self._durable) * self._script.prompt_bytes, self.share_bytes),
            max_bytes=self.share_bytes,
            hits=self._hits,
            misses=self._misses,
            cached_tokens=self._cached_tokens,
        )

    @property
    def ssd_stats(self) -> SsdCacheStats | None:
        """The tier on disk, None where the launch has none."""
        if self._launch.folder is None:
            return None
        on_disk = sum(self._durable.values())
        return SsdCacheStats(
            dir=self._launch.folder,
            entries=on_disk,
            bytes=on_disk * self._script.prompt_bytes,
            max_bytes=self._launch.ssd_budget_bytes,
            spills=self._spills,
            pending=len(self._durable) - on_disk,
            off=self._script.cache_off or None,
        )

    @property
    def summary(self) -> CacheSummary:
        """A heartbeat's word, with what the script wants said otherwise."""
        told = summarise(self.prompt_stats, self.ssd_stats)
        return msgspec.structs.replace(told, **self._script.cache_says)
