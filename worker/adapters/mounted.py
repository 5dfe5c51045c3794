"""Which adapters of one model are mounted, by id: what a request that names some gets, and what gives way.

A mounted adapter is what its files are: where they have changed it is read again for requests to come, where
they are gone it is too. One in the home's adapters folder is mounted by the first request that names it.
Beside a cap nothing keeps them: the least recently used that no request uses goes first. Rows hold the set
that they began with, so nothing that happens here changes a running answer.

Owned by the event loop; files are read beside it, arrays are made on the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlxpool.shared import adapters
from mlxpool.shared.adapters import AdapterError
from mlxpool.shared.control import AdaptersLaunch, MountedAdapter
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut
from mlxpool.worker.adapters import reading
from mlxpool.worker.adapters.layers import AdapterSet, Mount, Switch, mount, namespace_of

# Of what the model may allocate, an eighth at most: an adapter of rank 16 takes a hundredth of its model.
_SHARE = 8
MAX_BYTES = 512 * 1024 * 1024

# Sets of what is mounted that are kept ready: of twenty adapters there are a hundred thousand.
_SETS_KEPT = 64
# Adapters whose refusal is remembered.
_REFUSALS_KEPT = 64

# Of the pass that shows whether the model runs with an adapter.
_TRIAL_TOKENS = 2

PARAM = "adapter"

# Why none is mounted on a model whose experts come from disk: they would be read as they were, without it.
STREAMED_REFUSAL = (
    "this model's experts are streamed from disk; adapters are for models that are held in memory"
)


class Engine(Protocol):
    """What is asked of the engine."""

    @property
    def switch(self) -> Switch: ...

    async def call(self, function: Callable[[], Any]) -> Any: ...


class _Passing(AdapterError):
    """A refusal that may be gone the next time, such as one for want of memory."""


class _Place(NamedTuple):
    """Where an adapter lies, and the state of its files."""

    folder: Path
    stamp: adapters.Stamp


class _Mounted(NamedTuple):
    """folder: where it was read. read: what its files said, without the numbers."""

    folder: Path
    read: reading.Read
    mount: Mount


class Adapters:
    """One model's. make_cache: fresh caches of one row. folders: see AdaptersLaunch. none: why this model
    takes none at all."""

    def __init__(
        self,
        engine: Engine,
        make_cache: Callable[[], list[Any]],
        launch: AdaptersLaunch,
        memory_bytes: int,
        none: str | None = None,
    ) -> None:
        self._none = none
        self._engine = engine
        self._make_cache = make_cache
        self._launch = launch
        self._root = None if launch.folder is None else Path(launch.folder).resolve()
        self.max_bytes = min(MAX_BYTES, memory_bytes // _SHARE)
        self._mounted: OrderedDict[str, _Mounted] = OrderedDict()  # the least recently used first
        self._sets: OrderedDict[tuple[bytes, ...], AdapterSet] = OrderedDict()  # as above
        # By id what its files, as they were, are refused with: each request of many clients that go on asking
        # would read them, and run the model, for nothing.
        self._refused: dict[str, tuple[_Place, str]] = {}
        self._uses: Counter[AdapterSet] = Counter()
        self._mounting = asyncio.Lock()

    # Requests

    def is_plain(self, asked: str | None) -> bool:
        """Whether a request that asks this needs nothing of here."""
        return asked == adapters.NONE or (asked is None and self._launch.default is None)

    async def of(self, asked: str | None) -> AdapterSet | None:
        """The set that a request asks for; None: the model as it is. Raises ApiError 400."""
        text = self._launch.default if asked is None else asked
        if text is None:
            return None
        try:
            ids = adapters.read_set(text)
            if not ids:
                return None
            if not await self._are_fresh(ids):
                async with self._mounting:
                    return self._set_of(ids, [(await self._keep_fresh(one, ids)).mount for one in ids])
        except (AdapterError, ValueError) as problem:
            raise self._refusal(problem, asked) from None
        for adapter_id in ids:
            self._mounted.move_to_end(adapter_id)
        return self._set_of(ids, [self._mounted[adapter_id].mount for adapter_id in ids])

    async def _are_fresh(self, ids: Sequence[str]) -> bool:
        """Whether all of these are mounted as their files are: then nobody's mounting is waited for."""
        try:
            places = await asyncio.to_thread(self._look_at, {one: self._folder_of(one) for one in ids})
        except AdapterError:
            return False
        return all(map(self._is_as, ids, places))

    @contextlib.contextmanager
    def in_use(self, held: AdapterSet | None) -> Iterator[None]:
        """While a request runs with this set, its adapters do not give way to others."""
        if held is None:
            yield
            return
        self._uses[held] += 1
        try:
            yield
        finally:
            self._uses[held] -= 1
            if not self._uses[held]:
                del self._uses[held]

    def _refusal(self, problem: Exception, asked: str | None) -> ApiError:
        message = f"adapter {problem}"
        if asked is None:
            message += f'; it is the default in the settings, which adapter "{adapters.NONE}" switches off'
        return error("invalid_request", message, param=PARAM)

    def _set_of(self, ids: Sequence[str], mounts: Sequence[Mount]) -> AdapterSet:
        key = tuple(sorted(one.digest for one in mounts))
        made = self._sets.get(key)
        if made is None:
            made = self._sets[key] = AdapterSet(ids, mounts)
            if len(self._sets) > _SETS_KEPT:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        return made

    # Mounting

    async def mount(self, adapter_id: str, folder: Path | None) -> MountedAdapter:
        """Mount an adapter, in place of one of that id. folder: where it is; None: in the home. Raises
        ApiError 400."""
        try:
            if not adapters.is_id(adapter_id):
                raise AdapterError(f"{cut(adapter_id)!r} is no id; use {adapters.ID_RULE}")
            async with self._mounting:
                if folder is None and self._root is not None:
                    folder = self._root / adapter_id
                self._refused.pop(adapter_id, None)
                await self._keep_fresh(adapter_id, (), folder)
        except AdapterError as problem:
            raise error("invalid_request", f"adapter {problem}", param="id") from None
        return self._view(adapter_id)

    def unmount(self, adapter_id: str) -> None:
        """Forget an adapter; rows that run with it do so to their ends. Raises ApiError 404."""
        if adapter_id not in self._mounted:
            mounted = f"mounted are {', '.join(self._mounted)}" if self._mounted else "none is"
            raise error("not_found", f"no adapter {cut(adapter_id)!r} is mounted; {mounted}", param="id")
        self._forget(adapter_id)

    def listed(self) -> list[MountedAdapter]:
        """Those that are mounted, by id."""
        return [self._view(adapter_id) for adapter_id in sorted(self._mounted)]

    def _view(self, adapter_id: str) -> MountedAdapter:
        folder, read, mounted = self._mounted[adapter_id]
        default = self._launch.default
        return MountedAdapter(
            id=adapter_id,
            path=str(folder),
            rank=read.facts.rank,
            scale=read.facts.scale,
            layers=len(read.facts.layers),
            bytes=mounted.size_bytes,
            namespace=namespace_of([mounted]),
            default=default is not None and adapter_id in adapters.read_set(default),
        )

    async def _keep_fresh(
        self, adapter_id: str, beside: Sequence[str], folder: Path | None = None
    ) -> _Mounted:
        """See that an adapter is mounted as its files are now; where they can't be had, it is so no longer.
        beside: ids that stay. Raises AdapterError."""
        if self._none is not None:
            raise AdapterError(f"{cut(adapter_id)!r} can't be mounted: {self._none}")
        wanted = self._folder_of(adapter_id) if folder is None else folder
        try:
            (place,) = await asyncio.to_thread(self._look_at, {adapter_id: wanted})
            if not self._is_as(adapter_id, place):
                await self._read(adapter_id, place, beside)
        except AdapterError:
            held = self._mounted.get(adapter_id)
            if held is not None and held.folder == wanted:
                self._forget(adapter_id)
            raise
        self._mounted.move_to_end(adapter_id)
        return self._mounted[adapter_id]

    def _folder_of(self, adapter_id: str) -> Path | None:
        """Where an adapter was mounted from, else where in the home it would be."""
        held = self._mounted.get(adapter_id)
        if held is not None:
            return held.folder
        return None if self._root is None else self._root / adapter_id

    def _is_as(self, adapter_id: str, place: _Place) -> bool:
        held = self._mounted.get(adapter_id)
        return held is not None and (held.folder, held.read.stamp) == place

    def _look_at(self, folders: Mapping[str, Path | None]) -> list[_Place]:
        """The state of these adapters' files. Any thread. Raises AdapterError."""
        root, places = self._root, []
        for adapter_id, folder in folders.items():
            if folder is None or not folder.is_dir():
                here = [] if root is None else adapters.listing(root)
                raise AdapterError(f"{cut(adapter_id)!r} is not here; {adapters.some(here)}")
            try:
                if root is not None and folder.parent == root:
                    adapters.inside(folder, [root])
                elif folder.resolve() != folder:
                    # What its path led to was decided when it was mounted.
                    raise AdapterError("its path leads elsewhere now; mount it again")
                places.append(_Place(folder, adapters.stamp(folder)))
            except AdapterError as problem:
                raise AdapterError(f"{adapter_id!r} can't be mounted: {problem}") from None
        return places

    async def _read(self, adapter_id: str, place: _Place, beside: Sequence[str]) -> None:
        try:
            known, why = self._refused.get(adapter_id, (None, ""))
            if known == place:
                raise AdapterError(why)
            with self._remembered(adapter_id, place):
                read = await asyncio.to_thread(reading.read, place.folder, self.max_bytes)
            made = self._same_as(read)
            if made is None:
                self._make_room(read.facts.size_bytes, adapter_id, beside)
                with self._remembered(adapter_id, place):
                    made = await self._engine.call(lambda: self._mount(read))
                # Its files may be of a narrower type than the layers are.
                self._make_room(made.size_bytes, adapter_id, beside)
        except AdapterError as problem:
            raise AdapterError(f"{adapter_id!r} can't be mounted: {problem}") from None
        if adapter_id in self._mounted:
            self._forget(adapter_id)
        self._mounted[adapter_id] = _Mounted(place.folder, read._replace(arrays={}), made)

    def _same_as(self, read: reading.Read) -> Mount | None:
        """What does the same, under whatever id, and is mounted or in use: it is held once."""
        held = [one.mount for one in self._mounted.values()]
        held += [one for used in self._uses for one in used.mounts]
        return next((one for one in held if one.digest == read.digest), None)

    @contextlib.contextmanager
    def _remembered(self, adapter_id: str, place: _Place) -> Iterator[None]:
        """Whatever the files are refused with inside stands until they change, or are mounted by a route."""
        try:
            yield
        except _Passing:
            raise
        except AdapterError as problem:
            self._refused.pop(adapter_id, None)
            if len(self._refused) >= _REFUSALS_KEPT:
                self._refused.pop(next(iter(self._refused)))
            self._refused[adapter_id] = place, str(problem)
            raise

    def _mount(self, read: reading.Read) -> Mount:
        """The engine's thread: the arrays, and one small pass with them, for a model may ask of a layer what
        no other can answer."""
        switch = self._engine.switch
        try:
            made = mount(switch.under(None), read)
            model = switch.under(AdapterSet((), (made,)))
            tokens = mx.zeros((1, _TRIAL_TOKENS), dtype=mx.uint32)
            logits = model(tokens, cache=self._make_cache())
            finite = bool(mx.isfinite(logits).all().item())
        except AdapterError:
            raise
        except Exception as err:
            what = cut(f"{type(err).__name__}: {err}", 200)
            raise _Passing(f"the model does not run with it: {what}") from err
        finally:
            switch.under(None)
        if not finite:
            raise AdapterError("with it the model's logits are no numbers; is its scale right?")
        return made

    def _make_room(self, more_bytes: int, adapter_id: str, beside: Sequence[str]) -> None:
        """Unmount what nobody uses until there is room for so much more. Raises AdapterError."""
        in_use = {one.digest for held in self._uses for one in held.mounts}
        stays = {adapter_id, *beside}
        for other in list(self._mounted):
            if self._held_bytes(adapter_id) + more_bytes <= self.max_bytes:
                return
            if other not in stays and self._mounted[other].mount.digest not in in_use:
                self._forget(other)
        held_bytes = self._held_bytes(adapter_id)
        if held_bytes + more_bytes > self.max_bytes:
            raise AdapterError(
                f"it takes {more_bytes:,} bytes; {held_bytes:,} of the {self.max_bytes:,} that this model's "
                "adapters may take are in use"
            )

    def _held_bytes(self, replaced: str) -> int:
        """Of all arrays that are mounted or that a request uses; those that are to be replaced once they are
        used no more."""
        mounts = {one.mount.digest: one.mount for name, one in self._mounted.items() if name != replaced}
        mounts |= {one.digest: one for held in self._uses for one in held.mounts}
        return sum(one.size_bytes for one in mounts.values())

    def _forget(self, adapter_id: str) -> None:
        gone = self._mounted.pop(adapter_id).mount.digest
        for key in [key for key in self._sets if gone in key]:
            del self._sets[key]
