"""Tokenizers in the parent, for what can be said of a prompt without a worker.

A vocabulary takes up to 100 MB and half a second to read, so at most two are held, the ones used last, and at
most two are read at a time, whatever is asked for. Each is read when it is needed, on a thread, once however
many wait for it. A folder whose files have changed is another tokenizer. Event loop only; what it hands out
is immutable and may be used on any thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from mlxpool.parent.library import LibraryModel
from mlxpool.shared.errors import error

if TYPE_CHECKING:
    from mlxpool.shared.chat import ChatTokenizer
    from mlxpool.shared.prompt.rendering import Renderer

# Of a fleet of models two are talked to at a time; a third one's vocabulary is worth less than its memory.
KEPT = 2
# What is being read takes as much memory as what is held.
READ_AT_ONCE = 2

# What a tokenizer and its renderer are made of.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)

# Path, settings that decide how a prompt is rendered, and each file's time and size.
_Key = tuple[Path, str | None, str | None, bool | None, tuple[tuple[int, int] | None, ...]]


class Counter:
    """Renders and encodes for one model."""

    def __init__(self, tokenizer: ChatTokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer


class Tokenizers:
    """The counters of the models asked for last."""

    def __init__(self) -> None:
        # Those that are read and those yet to be, the ones used last at the end.
        self._held: OrderedDict[_Key, asyncio.Task[Counter]] = OrderedDict()
        self._turns = asyncio.Semaphore(READ_AT_ONCE)

    async def of(self, model: LibraryModel) -> Counter:
        """This model's, as its files and settings are now. Raises ApiError 503 where they can't be used."""
        key = _key(model)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = asyncio.create_task(self._read(model))
            found.add_done_callback(lambda done: self._settled(key, done))
        self._held.move_to_end(key)
        # A client that leaves must not end what others wait for.
        return await asyncio.shield(found)

    async def _read(self, model: LibraryModel) -> Counter:
        async with self._turns:
            return await asyncio.to_thread(_open, model)

    def _settled(self, key: _Key, done: asyncio.Task[Counter]) -> None:
        """A folder that failed is looked at again by the next one who asks; one that was read takes the place
        of another."""
        if done.cancelled() or done.exception() is not None:
            self._held.pop(key, None)
        read = [held for held, task in self._held.items() if task.done()]
        for oldest in read[:-KEPT]:
            del self._held[oldest]


def _key(model: LibraryModel) -> _Key:
    own = model.settings
    stamps = tuple(_stamp(model.path / name) for name in _FILES)
    return model.path, own.tool_parser, own.reasoning_parser, own.thinking, stamps


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size


def _open(model: LibraryModel) -> Counter:
    # Not imported by a parent that is never asked: they take longer than its start may.
    from mlxpool.shared.chat import ChatTokenizer, ChatTokenizerError
    from mlxpool.shared.prompt.families import families
    from mlxpool.shared.prompt.rendering import Renderer

    own = model.settings
    try:
        tokenizer = ChatTokenizer.open(model.path)
        known = families(tokenizer, own.tool_parser, own.reasoning_parser)
    except (ChatTokenizerError, OSError, ValueError) as err:
        raise error(
            "load_failed", f"the tokenizer of model {model.name!r} can't be used: {err}", param="model"
        ) from err
    return Counter(tokenizer, Renderer(tokenizer, known, own.thinking))
