"""What a folder holds of a mixture of experts, and where each expert lies, from headers alone.

Four forms are read (layout.Form). Experts are found by their tensors' names and shapes, in any architecture
whose experts can be streamed (families.py): what stands in the MLX form under `….gate_proj.weight` with an
axis of experts is a layer of experts. A folder of 400 GB with a hundred thousand tensors is read in about a
second; what is wrong with it is told with file, layer and expert.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared import checkpoint
from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError, Tensor
from mlxpool.shared.colibri import families, geometry, packing, records, shards
from mlxpool.shared.colibri.folder import CONTAINER_PATTERN, is_container, is_records, stamp
from mlxpool.shared.colibri.layout import (
    PROJECTIONS,
    Artifact,
    ExpertLayout,
    Form,
    Piece,
    Place,
    Projection,
    Scattered,
    Strided,
)
from mlxpool.shared.colibri.shards import Entry, Shards
from mlxpool.shared.text import cut

# Where the draft layer is in our own model of these architectures. Others' mlx-lm class drops it.
DRAFTING = frozenset({"glm_moe_dsa"})
MTP_MODULE = "mtp.mlp.switch_mlp"

# Where that model has the routed experts of its other layers.
_OWN_MODULE = "model.layers.{}.mlp.switch_mlp"
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)+")

# mlx-lm's name of the module, for a checkpoint whose experts stand under "….experts.N."; "switch_mlp" in all
# other architectures.
_MODULES = dict.fromkeys(("afmoe", "dots1", "gpt_oss", "Klear", "llama4", "muse_spark"), "experts")
_LAYER = re.compile(rf".*?\blayers\.({shards.NUMBER})\.")
_INDEXER = ".self_attn.indexer."
_FUSED = re.compile(r".*\bexperts\.gate_up_proj(\.weight|_blocks)?")
_STAMPS_KEY = "colibri.fmt"


def read(folder: Path) -> Artifact:
    """What the folder holds, as it lies on disk; `on_backend` says how memory holds it. Raises
    CheckpointError, also where it holds no experts that can be streamed."""
    identity = stamp(folder)
    config = checkpoint.read_config(folder / checkpoint.CONFIG_FILE)
    if config["model_type"] in DRAFTING:
        geometry.read(config)
    else:
        families.check_numbers(config)
    if is_records(folder):
        families.check(config["model_type"])
        found = _of_records(folder, config)
    elif is_container(folder):
        found = _of_shards(folder, config, CONTAINER_PATTERN)
    else:
        found = _of_shards(folder, config, checkpoint.WEIGHTS_PATTERN)
    form, layouts, dense, files = found
    count = _layers_of(config)
    of_draft = {name for name in dense if (at := _layer(name)) is not None and at >= count}
    main = tuple(layout for layout in layouts if layout.layer < count)
    _check_layers(config, folder, main)
    return Artifact(
        folder=str(folder),
        form=form,
        model_type=config["model_type"],
        config=config,
        layers=main,
        mtp=next((one for one in layouts if one.module == MTP_MODULE), None),
        dense={name: place for name, place in dense.items() if name not in of_draft},
        mtp_dense={name: dense[name] for name in dense if name in of_draft},
        has_indexer=any(_INDEXER in name for name in dense if name not in of_draft),
        files=files,
        stamp=identity,
    )


def on_backend(artifact: Artifact, backend: Backend) -> Artifact:
    """The artifact with its layouts as slots on this backend hold them."""
    if backend != "cpu":
        return artifact
    mtp = artifact.mtp
    return msgspec.structs.replace(
        artifact,
        layers=tuple(_widened(layout) for layout in artifact.layers),
        mtp=None if mtp is None else _widened(mtp),
    )


def _widened(layout: ExpertLayout) -> ExpertLayout:
    parts = tuple(
        packing.widened(part)
        if packing.is_narrow_float(layout.packing[part.projection].scheme, part)
        else part
        for part in layout.parts
    )
    return layout if parts == layout.parts else msgspec.structs.replace(layout, parts=parts)


_Found = tuple[Form, list[ExpertLayout], dict[str, Place], tuple[str, ...]]


def _of_records(folder: Path, config: Mapping[str, Any]) -> _Found:
    index = records.read_index(folder)
    if index.model_type != config["model_type"]:
        raise CheckpointError(
            f"{records.INDEX_FILE}: is of a {index.model_type}, config.json of a {config['model_type']}"
        )
    held = shards.read(folder, records.DENSE_PATTERN)
    if set(held.files) != {file.name for file in index.dense}:
        raise CheckpointError(f"{records.INDEX_FILE}: lists other {records.DENSE_PATTERN} than are there")
    for layer in index.layers:
        check_record(layer, config)
    layouts = [records.layout(layer) for layer in index.layers]
    dense = {name: held.place(name) for name in held.entries}
    return "records", layouts, dense, (*held.files, *(layer.file for layer in index.layers))


def check_record(layer: records.RecordLayer, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless this model's config and a layer's index say the same of its experts."""
    at = f"{records.INDEX_FILE}: layer {layer.layer}"
    _check_module(at, layer, config)
    due = families.number(config, families.EXPERTS)
    if due and layer.experts != due:
        raise CheckpointError(f"{at}: has {layer.experts} experts where config.json says {due}")
    packed: dict[Projection, packing.Packed] = {}
    for projection in PROJECTIONS:
        tensors: dict[str, Tensor] = {
            field.part: Tensor(field.dtype, field.shape, field.size_bytes)
            for field in layer.fields
            if field.projection == projection
        }
        where = f"{at}: {projection}"
        if "weight" not in tensors:
            raise CheckpointError(f"{where}: has no weight in its records")
        packed[projection] = packing.record(where, projection, tensors, layer.packing[projection])
    _check_shapes(at, packed, config)


def _check_module(at: str, layer: records.RecordLayer, config: Mapping[str, Any]) -> None:
    """Other experts than its own would answer in a layer, or a worker would look for them in vain."""
    number, module = layer.layer, layer.module
    if config["model_type"] in DRAFTING:
        count = _layers_of(config)
        if number > count:
            raise CheckpointError(f"{at}: config.json says {count} layers and a draft layer at most")
        due = MTP_MODULE if number == count else _OWN_MODULE.format(number)
        if module != due:
            raise CheckpointError(f"{at}: its module is {cut(repr(module))} where {due!r} is due")
    elif not _DOTTED.fullmatch(module) or _layer(f"{module}.") != number:
        raise CheckpointError(f"{at}: {cut(repr(module))} is no module of that layer")


class _Layer:
    """A layer's experts as they are found. stacked: by piece. singles: by piece, then expert."""

    def __init__(self, prefix: str, layer: int) -> None:
        self.prefix, self.layer = prefix, layer
        self.stacked: dict[str, Entry] = {}
        self.singles: dict[str, dict[int, Entry]] = defaultdict(dict)


def _of_shards(folder: Path, config: Mapping[str, Any], pattern: str) -> _Found:
    held = shards.read(folder, pattern)
    found, dense = _sorted_out(held)
    families.check(config["model_type"], bool(found))
    if not found:
        fused = next((name for name in dense if _FUSED.fullmatch(name)), None)
        raise CheckpointError(
            f"{checkpoint.called(folder)}: "
            + (f"experts are fused in {fused}: {packing.CONVERT}" if fused else "holds no routed experts")
        )
    is_colibri = pattern == CONTAINER_PATTERN
    form: Form = "container" if is_colibri else "experts" if any(one.singles for one in found) else "stacked"
    stamps = _stamps(held) if is_colibri else {}
    layouts = []
    drafts = _layers_of(config)
    for layer in sorted(found, key=lambda one: one.layer):
        # Beyond the draft layer there is nothing that any model of these runs.
        if layer.layer <= drafts:
            layouts.append(_layout(layer, held, config, stamps if is_colibri else None))
    return form, layouts, {name: held.place(name) for name in dense}, held.files


def _sorted_out(held: Shards) -> tuple[list[_Layer], list[str]]:
    """Layers of experts, and the names of all other tensors."""
    found: dict[str, _Layer] = {}
    dense: list[str] = []
    maybe: list[tuple[str, re.Match[str]]] = []
    for name, entry in held.entries.items():
        single = shards.SINGLE.fullmatch(name) if "experts." in name else None
        if single:
            prefix, layer, expert, projection, what = single.groups()
            one = found.get(prefix) or found.setdefault(prefix, _Layer(prefix, int(layer)))
            one.singles[f"{shards.PROJECTION_OF[projection]}.{what}"][int(expert)] = entry
        elif (stacked := shards.STACKED.fullmatch(name)) and len(entry.tensor.shape) > 1:
            maybe.append((name, stacked))
        else:
            dense.append(name)
    for name, stacked in maybe:
        prefix, layer, projection, what = stacked.groups()
        weight = held.entries.get(f"{prefix}.{projection}.weight")
        if weight is None or len(weight.tensor.shape) != 3:
            dense.append(name)
            continue
        one = found.get(prefix) or found.setdefault(prefix, _Layer(prefix, int(layer)))
        one.stacked[f"{projection}.{what}"] = held.entries[name]
    return list(found.values()), dense


def _layout(
    layer: _Layer, held: Shards, config: Mapping[str, Any], stamps: Mapping[str, str] | None
) -> ExpertLayout:
    """stamps: of a container, None for MLX's forms."""
    at = f"layer {layer.layer}"
    if layer.singles and layer.stacked:
        raise CheckpointError(f"{at}: has experts one by one and stacked, under {layer.prefix}")
    count = families.number(config, families.EXPERTS) or _seen(layer)
    if not 0 < count <= families.MAX_EXPERTS:
        raise CheckpointError(f"{at}: is of {count} experts; a layer has 1 to {families.MAX_EXPERTS}")
    pieces: dict[str, Piece] = {}
    for name, entry in layer.stacked.items():
        pieces[name] = _strided(f"{at}: {name}", name, entry, held, count)
    for name, places in layer.singles.items():
        pieces[name] = _scattered(at, name, places, held, count)
    path = layer.prefix
    if layer.singles:
        path = f"{path}.{_MODULES.get(config['model_type'], 'switch_mlp')}"
    packed: dict[Projection, packing.Packed] = {}
    for projection in PROJECTIONS:
        tensors = {
            name.removeprefix(f"{projection}."): Tensor(piece.dtype, piece.shape, piece.size_bytes)
            for name, piece in pieces.items()
            if name.startswith(f"{projection}.")
        }
        where = f"{at}: {projection}"
        if "weight" not in tensors:
            raise CheckpointError(f"{where}: has no weight in any file")
        if stamps is None:
            packed[projection] = packing.mlx(where, f"{path}.{projection}", projection, tensors, config)
        else:
            shape = _container_shape(config, projection)
            full = f"{layer.prefix}.experts.0.{projection}.weight"
            packed[projection] = packing.container(where, projection, shape, tensors, stamps.get(full))
    _check_shapes(at, packed, config)
    is_draft = layer.layer >= _layers_of(config) and config["model_type"] in DRAFTING
    parts = tuple(part for one in packed.values() for part in one.parts)
    used = dict.fromkeys(part.piece for part in parts)
    return ExpertLayout(
        layer=layer.layer,
        module=MTP_MODULE if is_draft else path,
        experts=count,
        pieces=tuple(pieces[name] for name in used),
        parts=parts,
        packing={projection: one.quantised for projection, one in packed.items()},
    )


def _seen(layer: _Layer) -> int:
    """How many experts there seem to be, where the config does not say."""
    if layer.stacked:
        return next(iter(layer.stacked.values())).tensor.shape[0]
    return 1 + max(max(places) for places in layer.singles.values())


def _strided(where: str, name: str, entry: Entry, held: Shards, count: int) -> Piece:
    tensor, file = entry.tensor, held.files[entry.file]
    if tensor.shape[0] != count:
        raise CheckpointError(f"{file}: {where} is of {tensor.shape[0]} experts where {count} are due")
    each = tensor.size_bytes // count
    return Piece(name, tensor.dtype, tensor.shape[1:], each, Strided(file, entry.offset, each))


def _scattered(at: str, name: str, places: Mapping[int, Entry], held: Shards, count: int) -> Piece:
    if len(places) != count or max(places) >= count:
        odd = next((expert for expert in sorted(places) if expert >= count), None)
        if odd is not None:
            raise CheckpointError(
                f"{held.files[places[odd].file]}: {at}, expert {odd}: config.json says {count} experts"
            )
        lost = next(expert for expert in range(count) if expert not in places)
        raise CheckpointError(f"{at}, expert {lost}: {name} is in none of the {len(held.files)} files")
    ordered = [places[expert] for expert in range(count)]
    first = ordered[0].tensor
    for expert, entry in enumerate(ordered):
        tensor = entry.tensor
        if tensor != first:
            raise CheckpointError(
                f"{held.files[entry.file]}: {at}, expert {expert}: {name} is {tensor.dtype} "
                f"{list(tensor.shape)} where expert 0's is {first.dtype} {list(first.shape)}"
            )
    used = sorted({entry.file for entry in ordered})
    number = {file: index for index, file in enumerate(used)}
    scattered = Scattered(
        tuple(held.files[file] for file in used),
        tuple(number[entry.file] for entry in ordered),
        tuple(entry.offset for entry in ordered),
    )
    return Piece(name, first.dtype, first.shape, first.size_bytes, scattered)


def _stamps(held: Shards) -> dict[str, str]:
    """Formats by tensor, where colibri's files name them. Raises CheckpointError where they disagree."""
    said: dict[str, str] = {}
    for file, metadata in zip(held.files, held.metadata, strict=True):
        if _STAMPS_KEY not in metadata:
            continue
        try:
            own = msgspec.json.decode(metadata[_STAMPS_KEY], type=dict[str, str])
        except msgspec.DecodeError as problem:
            raise CheckpointError(f"{file}: its {_STAMPS_KEY} can't be read: {problem}") from None
        for tensor, name in own.items():
            if said.setdefault(tensor, name) != name:
                raise CheckpointError(
                    f"{file}: {tensor} is said to be {name!r} here, {said[tensor]!r} before"
                )
    return said


def _check_shapes(at: str, packed: Mapping[Projection, packing.Packed], config: Mapping[str, Any]) -> None:
    gate, up, down = (packed[projection] for projection in PROJECTIONS)
    hidden = families.number(config, families.EXPERT_INPUTS) or gate.inputs
    inner = gate.outputs
    for projection, one, shape in (
        ("gate_proj", gate, (inner, hidden)),
        ("up_proj", up, (inner, hidden)),
        ("down_proj", down, (hidden, inner)),
    ):
        if (one.outputs, one.inputs) != shape:
            raise CheckpointError(
                f"{at}: {projection} is of {one.outputs} × {one.inputs} where {shape[0]} × {shape[1]} is due"
            )


def _container_shape(config: Mapping[str, Any], projection: Projection) -> tuple[int, int]:
    hidden = families.needed(config, ("hidden_size",))
    inner = families.needed(config, ("moe_intermediate_size",))
    return (hidden, inner) if projection == "down_proj" else (inner, hidden)


def _check_layers(config: Mapping[str, Any], folder: Path, layouts: tuple[ExpertLayout, ...]) -> None:
    if not layouts:
        raise CheckpointError(f"{checkpoint.called(folder)}: holds no routed experts")
    seen: set[int] = set()
    for layout in layouts:
        if layout.layer in seen:
            raise CheckpointError(f"layer {layout.layer}: has two modules of routed experts")
        seen.add(layout.layer)
    first, step = config.get("first_k_dense_replace"), config.get("moe_layer_freq", 1)
    if isinstance(first, int) and isinstance(step, int) and step > 0:
        due = (layer for layer in range(first, _layers_of(config)) if layer % step == 0)
        lost = next((layer for layer in due if layer not in seen), None)
        if lost is not None:
            raise CheckpointError(
                f"layer {lost}: its experts are in none of the files of {checkpoint.called(folder)}"
            )
        odd = next((layer for layer in seen if layer < first or layer % step), None)
        if odd is not None and config["model_type"] in DRAFTING:
            raise CheckpointError(
                f"layer {odd}: has experts where config.json has none (first_k_dense_replace is {first}, "
                f"moe_layer_freq {step})"
            )


def _layer(name: str) -> int | None:
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def _layers_of(config: Mapping[str, Any]) -> int:
    return families.needed(config, families.LAYERS)
