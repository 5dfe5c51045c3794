"""A conversion from beginning to end.

Everything that can be known from headers is checked first: nothing is written for a source that is not whole,
parameters that do not fit, or a disk without room. The result is put together in a hidden folder beside its
place and renamed at the end, so what has its name is whole, and what was killed goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec

from mlxpool.shared import checkpoint, staging
from mlxpool.shared.colibri import artifact, records
from mlxpool.shared.colibri.records import Recipe, RecordIndex
from mlxpool.shared.files import write_whole
from mlxpool.shared.units import format_duration, format_size

from . import dense, numbers, plan, state, verify, writing
from .source import Source
from .source import read as read_source
from .terms import ConvertError, Teller

# Tokenizer, config, index and the file system's own, beside the weights.
_MARGIN_BYTES = 64_000_000
# Where the stages begin, of the whole.
_READ, _WRITTEN = 0.01, 0.98
# Reading again is as many bytes as writing, at a higher rate.
_WRITTEN_OF_VERIFIED = 0.75
_MIN_ETA_S = 3.0

MakeModel = Callable[[Mapping[str, Any]], Any]
CopyOthers = Callable[[Path, Path], None]


class Order(NamedTuple):
    """What is to be made. source: a folder. target: a folder that does not exist yet. recipe: bits None keeps
    weights as they are, which is what happens to those that are packed already. given: whether the person
    said the recipe's bits."""

    source: Path
    target: Path
    recipe: Recipe
    given: bool = False
    verify: bool = True


class Result(NamedTuple):
    """experts_bytes, dense_bytes: written, paddings included. kept: of them, by earlier runs."""

    experts_bytes: int
    dense_bytes: int
    kept_bytes: int
    layers: int
    has_draft: bool


def convert(
    order: Order,
    teller: Teller,
    make_model: MakeModel,
    copy_others: CopyOthers,
    free_bytes: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
) -> Result:
    """Raises ConvertError, CheckpointError, OSError; what is done stays for the next try."""
    source_folder, target = _places(order)
    teller.progress(0.0, "read", "the headers")
    source = read_source(source_folder)
    recipe = _recipe(order, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        if os.path.lexists(target):
            raise ConvertError(f"there is a {target} by now; choose another place")
        stage = staging.stage_folder(target.parent, target.name)
        built = dense.build(source, recipe, make_model)
        layers = _layers(source, recipe, built)
        for layer in layers:
            artifact.check_record(layer.record, source.config)
        files = plan.dense_files([_tensor(name, array) for name, array in built.tensors.items()])
        fresh = state.begin(source_folder, source.files, recipe)
        progress = state.resume(stage, fresh)
        state.drop_others(stage, {layer.record.file for layer in layers} | {file.name for file in files})
        run = _Run(order, teller, stage, progress, layers, files)
        run.keep_what_is_whole()
        _check_room(run, free_bytes)
        stage.mkdir(exist_ok=True)
        state.save(stage, run.progress)
        run.write(source, built.tensors)
        index = _finish(run, source, built, recipe, copy_others)
        if order.verify:
            run.verify(index, source)
        _publish(stage, target, teller)
    return Result(
        experts_bytes=sum(layer.size_bytes for layer in layers),
        dense_bytes=sum(file.size_bytes for file in files),
        kept_bytes=run.kept_bytes,
        layers=len(layers),
        has_draft=source.mtp is not None,
    )


def _places(order: Order) -> tuple[Path, Path]:
    """Source and target as real paths, fit for each other. Raises ConvertError."""
    source = Path(os.path.realpath(order.source))
    target = Path(os.path.realpath(order.target.parent)) / order.target.name
    if not source.is_dir():
        raise ConvertError(f"{order.source} is no folder")
    if os.path.lexists(target):
        if target.exists() and os.path.samefile(source, target):
            raise ConvertError(f"{order.target} is the source itself; choose another place")
        what = "is a model already" if (target / checkpoint.CONFIG_FILE).exists() else "is there already"
        raise ConvertError(f"{order.target} {what}, and nothing is written over; choose another place")
    if target.is_relative_to(source):
        raise ConvertError(f"{order.target} is inside the source; choose a place outside {order.source}")
    return source, target


def _recipe(order: Order, source: Source) -> Recipe:
    """What is really done: packed weights stay as they are. Raises ConvertError."""
    if not source.quantised:
        return order.recipe
    if order.given and order.recipe.bits is not None:
        raise ConvertError(
            f"{order.source} is packed already, and packing again would lose twice; leave --bits out to keep "
            "its bits, or convert what it was made from"
        )
    return Recipe(None, 0, "affine")


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """The only one who makes `target`. The system ends this however the process does."""
    try:
        with staging.locked(target.parent, target.name, None):
            yield
    except staging.PullError:
        raise ConvertError(f"another process is making {target}; wait for it to end") from None


def _layers(source: Source, recipe: Recipe, built: dense.Dense) -> list[plan.Layer]:
    said = source.config.get("quantization", source.config.get("quantization_config")) or {}
    layers = [
        plan.layer(group, recipe, built.modules.get(group.layer, group.module), said)
        for group in source.layers
    ]
    if source.mtp is not None:
        own = recipe if source.mtp.kind == "mlx" else dense.draft_recipe(recipe)
        layers.append(plan.layer(source.mtp, own, plan.draft_module(source.mtp), said))
    return layers


def _tensor(name: str, array: mx.array) -> plan.Tensor:
    return plan.Tensor(name, numbers.NAMES[array.dtype], tuple(array.shape))


class _Run:
    """The state of one run. Owns the progress file."""

    def __init__(
        self,
        order: Order,
        teller: Teller,
        stage: Path,
        progress: state.Progress,
        layers: list[plan.Layer],
        files: list[plan.DenseFile],
    ) -> None:
        self.stage, self.progress = stage, progress
        self.layers, self.files = layers, files
        self.kept_bytes = 0
        self.total_bytes = sum(one.size_bytes for one in layers) + sum(one.size_bytes for one in files)
        self._teller = teller
        self._until = _WRITTEN * (_WRITTEN_OF_VERIFIED if order.verify else 1.0)

    def keep_what_is_whole(self) -> None:
        """Forget of an earlier run's files those that are not as they were written. Raises OSError."""
        due_layers = {layer.record.file: layer for layer in self.layers}
        due_files = {file.name: file for file in self.files}
        count = self._counter("check", 0.0, _READ, sum(self._sizes_done()))
        layers = []
        for layer in self.progress.layers:
            due = due_layers.get(layer.file)
            is_same = due is not None and msgspec.structs.replace(layer, xxh3=()) == due.record
            if is_same and due is not None and self._is_whole(due, layer, count):
                layers.append(layer)
                self.kept_bytes += due.size_bytes
        files = []
        for file in self.progress.dense:
            planned = due_files.get(file.name)
            if planned is None or planned.size_bytes != file.size_bytes:
                continue
            if (self.stage / file.name).is_file() and not verify.dense_faults(self.stage, file, count):
                files.append(file)
                self.kept_bytes += file.size_bytes
        self.progress = msgspec.structs.replace(self.progress, layers=tuple(layers), dense=tuple(files))

    def _is_whole(self, due: plan.Layer, layer: records.RecordLayer, count: writing.Count) -> bool:
        path = self.stage / layer.file
        if not path.is_file() or path.stat().st_size != due.size_bytes:
            return False
        return not verify.layer_faults(self.stage, layer, count)

    def _sizes_done(self) -> Iterator[int]:
        yield from (layer.stride_bytes * layer.experts for layer in self.progress.layers)
        yield from (file.size_bytes for file in self.progress.dense)

    def _counter(self, stage: str, begin: float, end: float, total: int, done: int = 0) -> writing.Count:
        """Of bytes, told as this part of the whole with the time that is left."""
        so_far, since_s, at_first = done, time.monotonic(), done

        def count(more: int) -> None:
            nonlocal so_far
            so_far += more
            took_s = time.monotonic() - since_s
            left = ""
            if took_s >= _MIN_ETA_S and so_far > at_first:
                left = f", {format_duration((total - so_far) * took_s / (so_far - at_first))} left"
            share = begin + (end - begin) * so_far / max(1, total)
            self._teller.progress(share, stage, f"{format_size(so_far)} of {format_size(total)}{left}")

        return count

    def write(self, source: Source, tensors: dict[str, mx.array]) -> None:
        """Everything that is not done; takes the dense tensors out of `tensors`."""
        count = self._counter("write", _READ, self._until, self.total_bytes, self.kept_bytes)
        with writing.opened(source) as files:
            for layer in self.layers:
                if layer.record.file not in self.progress.layers_by_file:
                    written = writing.layer(self.stage, layer, files, count)
                    self._keep(layers=(*self.progress.layers, written))
        for file in self.files:
            if file.name in self.progress.dense_by_name:
                for tensor in file.tensors:
                    del tensors[tensor.name]
            else:
                self._keep(dense=(*self.progress.dense, writing.dense(self.stage, file, tensors, count)))

    def _keep(self, **changed: Any) -> None:
        self.progress = msgspec.structs.replace(self.progress, **changed)
        state.save(self.stage, self.progress)

    def verify(self, index: RecordIndex, source: Source) -> None:
        """Everything as it was written, and of each layer one expert packed a second time. Raises
        ConvertError, after which what is damaged is written again by the next run."""
        count = self._counter("verify", self._until, _WRITTEN, self.total_bytes)
        faults = verify.index_faults(self.stage, index, count)
        faults += verify.sample_faults(source, self.layers, index)
        if faults:
            (self.stage / records.INDEX_FILE).unlink(missing_ok=True)
            more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
            raise ConvertError(f"{faults[0]}{more}: the disk did not keep what was written; run it again")


def _check_room(run: _Run, free_bytes: Callable[[Path], int]) -> None:
    place = run.stage if run.stage.is_dir() else run.stage.parent
    needed = run.total_bytes - run.kept_bytes + _MARGIN_BYTES
    free = free_bytes(place)
    if free < needed:
        raise ConvertError(
            f"there is not enough room under {run.stage.parent}: {format_size(needed)} are still needed, "
            f"{format_size(free)} are free, {format_size(needed - free)} are missing"
        )


def _finish(
    run: _Run, source: Source, built: dense.Dense, recipe: Recipe, copy_others: CopyOthers
) -> RecordIndex:
    """Everything beside weights; config.json last. Raises ConvertError where the whole can't be read."""
    stage = run.stage
    by_file, by_name = run.progress.layers_by_file, run.progress.dense_by_name
    copy_others(source.folder, stage)
    index = RecordIndex(
        format=records.FORMAT,
        version=records.VERSION,
        model_type=source.config["model_type"],
        layers=tuple(by_file[layer.record.file] for layer in run.layers),
        dense=tuple(by_name[file.name] for file in run.files),
        source=source.files,
        made_with=recipe,
    )
    encoded = records.encode(index)
    config = msgspec.json.format(
        msgspec.json.encode(plan.result_config(source, built.quantization)), indent=2
    )
    write_whole(stage / records.INDEX_FILE, lambda file: file.write(encoded))
    write_whole(stage / checkpoint.CONFIG_FILE, lambda file: file.write(config + b"\n"))
    artifact.read(stage)
    return index


def _publish(stage: Path, target: Path, teller: Teller) -> None:
    """Durable, then renamed; what it was gone on with goes last, for a run that is killed in between."""
    teller.progress(_WRITTEN, "publish")
    try:
        staging.give_name(stage, target)
    except OSError as problem:
        raise ConvertError(f"{target} could not be given its name: {problem.strerror}") from None
    (target / records.PROGRESS_FILE).unlink()
