"""What a checkpoint's folder holds, from its headers: which tensors are experts', and which are not.

Experts come as one tensor each (`experts.7.up_proj.weight`, or Mixtral's w1, w2, w3), plain or as fp8 with a
scale per block of 128 x 128 beside; stacked with an axis of experts, plain or packed by MLX; or, as
transformers 5 holds them, with gate and up in one (`experts.gate_up_proj`, gate's rows first). Whichever it
is, `Experts` says where each part of each expert lies. Everything that is missing, cut short or of another
shape than its neighbours is found here, before a byte is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from mlxpool.shared import checkpoint
from mlxpool.shared.checkpoint import CheckpointError, CutShort
from mlxpool.shared.colibri import families, records
from mlxpool.shared.colibri.layout import PROJECTIONS, Place, Projection
from mlxpool.shared.colibri.records import SourceFile
from mlxpool.shared.colibri.shards import NUMBER, PROJECTION_OF
from mlxpool.shared.files import open_regular

from .terms import ConvertError

# scale_inv: of fp8, float per block of BLOCK x BLOCK weights.
Key = Literal["weight", "scales", "biases", "bias", "scale_inv"]
Kind = Literal["float", "fp8", "mlx"]

BLOCK = 128
_UNSERVED = "mtp."
_FLOATS = ("F32", "F16", "BF16")
_KEYS: dict[str, Key] = {
    "weight": "weight",
    "scales": "scales",
    "biases": "biases",
    "bias": "bias",
    "weight_scale_inv": "scale_inv",
}
_LAYER = re.compile(rf"(?:^|\.)layers\.({NUMBER})\.")
_SINGLE = re.compile(rf"^(.*\.)experts\.({NUMBER})\.({'|'.join(PROJECTION_OF)})\.(\w+)$")
_STACKED = re.compile(r"^(.*\.)(switch_mlp|switch_glu|experts)\.(gate_proj|up_proj|down_proj)\.(\w+)$")
_FUSED = re.compile(r"^(.*\.)experts\.(gate_up_proj|down_proj)$")
_ROUTER = re.compile(r"\.(?:gate|router)\.weight$")
_FOREIGN = re.compile(r"\.experts\..*(_blocks|_scales|_packed|_scale|qweight|qzeros)$")


class Experts(msgspec.Struct, frozen=True):
    """The experts of one layer. module: as ExpertLayout's, by the names of the file. places: per projection
    and part, each expert's. dtype: of a float weight."""

    layer: int
    module: str
    kind: Kind
    count: int
    places: dict[tuple[Projection, Key], tuple[Place, ...]]

    def shape(self, projection: Projection) -> tuple[int, ...]:
        """Of one expert's weight as the file holds it."""
        return self.places[projection, "weight"][0].shape

    @property
    def size_bytes(self) -> int:
        """What one expert takes in the file."""
        return sum(each[0].size_bytes for each in self.places.values())


class Source(msgspec.Struct, frozen=True):
    """A folder that can be converted. layers: experts of the main model's layers, in order. mtp: the draft
    layer's. dense: all other tensors. expert_tensors: names and shapes of those that experts lie in.
    files: of weights, with stamps by which a change is noticed."""

    folder: Path
    config: dict[str, Any]
    layers: tuple[Experts, ...]
    mtp: Experts | None
    dense: dict[str, Place]
    expert_tensors: dict[str, tuple[int, ...]]
    files: tuple[SourceFile, ...]

    @property
    def quantised(self) -> bool:
        """Whether it is packed by MLX already."""
        return self.layers[0].kind == "mlx"

    @property
    def draft_layer(self) -> int:
        """Index from which layers are no longer the main model's."""
        return layer_count(self.config)


def read(folder: Path) -> Source:
    """What `folder` holds. Raises CheckpointError, ConvertError."""
    if (folder / records.INDEX_FILE).exists():
        raise ConvertError(f"{folder.name} is of records already; there is nothing to convert")
    config = checkpoint.read_config(folder / checkpoint.CONFIG_FILE)
    index = checkpoint.read_index(folder / checkpoint.INDEX_FILE)
    names = _weight_files(folder, index)
    tensors: dict[str, Place] = {}
    files = []
    for name in names:
        for tensor, place in _read_file(folder / name).items():
            if tensor in tensors:
                raise CheckpointError(f"{name}: tensor {tensor!r} is in {tensors[tensor].file} already")
            tensors[tensor] = place
        files.append(_stamp(folder / name))
    for tensor, shard in index.items():
        if tensor not in tensors:
            raise CheckpointError(
                f"{checkpoint.INDEX_FILE}: lists {named(tensor)} in {shard}, which does not hold it"
            )
    # Draft layers of families whose drafts nothing here serves; mlx-lm drops them too.
    tensors = {name: place for name, place in tensors.items() if not name.startswith(_UNSERVED)}
    _check_kind(folder, tensors)
    found = _experts(tensors)
    families.check(config["model_type"], bool(found))
    if not found:
        raise ConvertError(f"{folder.name} has no routed experts; only mixtures of experts can be streamed")
    expected = families.number(config, families.EXPERTS) or None
    last = layer_count(config)
    of_experts = {name for name in tensors if tensor_of(name) is not None}
    groups = [_group(prefix, parts, expected) for prefix, parts in found.items()]
    groups.sort(key=lambda group: group.layer)
    _check_alike(groups, last)
    _check_routers(tensors, {group.layer for group in groups})
    drafts = [group for group in groups if group.layer >= last]
    if len(drafts) > 1:
        raise ConvertError(
            f"layers {drafts[0].layer} to {drafts[-1].layer} come after the last of {last} layers; one draft "
            "layer can be converted"
        )
    return Source(
        folder=folder,
        config=config,
        layers=tuple(group for group in groups if group.layer < last),
        mtp=drafts[0] if drafts else None,
        dense={name: place for name, place in tensors.items() if name not in of_experts},
        expert_tensors={name: tensors[name].shape for name in sorted(of_experts)},
        files=tuple(files),
    )


def layer_of(name: str) -> int:
    """The layer that a tensor belongs to, -1 for none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def named(tensor: str) -> str:
    """A tensor for a person: layer and expert in front of its name."""
    layer, single = layer_of(tensor), _SINGLE.match(tensor)
    if single:
        return f"layer {layer}, expert {int(single[2])} ({tensor})"
    return f"layer {layer} ({tensor})" if layer >= 0 else tensor


def layer_count(config: Mapping[str, Any]) -> int:
    """Layers of the main model. Raises ConvertError."""
    count = families.number(config, families.LAYERS)
    if not count:
        said = families.language(config).get("num_hidden_layers")
        raise ConvertError(f"{checkpoint.CONFIG_FILE}: num_hidden_layers is {said!r}; a count is due")
    return count


def _weight_files(folder: Path, index: Mapping[str, str]) -> list[str]:
    """Names of the files that hold the model: those of the index, else those that mlx-lm would load, else
    all. Raises CheckpointError where there is none, or one of them is missing."""
    there = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    usual = sorted(path.name for path in folder.glob(checkpoint.WEIGHTS_PATTERN))
    listed = set(index.values())
    names = [name for name in there if name in listed] if listed else usual or there
    if not names and not index:
        raise CheckpointError(f"{folder.name}: no safetensors file in the folder")
    _check_shards(names, index)
    return names


def _check_shards(names: list[str], index: Mapping[str, str]) -> None:
    """A shard that the index names, or that its neighbours' names count, is missing."""
    for tensor, shard in sorted(index.items(), key=lambda item: (item[1], layer_of(item[0]), item[0])):
        if shard not in names:
            others = sum(other == shard for other in index.values()) - 1
            more = f" and {others} more tensors" if others else ""
            raise CheckpointError(f"{shard} is missing: it holds {named(tensor)}{more}")
    for name in names:
        counted = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)", name)
        for number in range(1, int(counted[3]) + 1) if counted else ():
            assert counted
            due = f"{counted[1]}{number:05}-of-{counted[3]}{counted[4]}"
            if due not in names:
                raise CheckpointError(
                    f"{due} is missing, and {name} says that there are {int(counted[3])} files"
                )


def _read_file(path: Path) -> dict[str, Place]:
    try:
        header = checkpoint.read_whole_header(path)
    except CutShort as problem:
        raise CheckpointError(f"{problem}: {named(problem.tensor)} is not whole") from None
    return {
        name: Place(path.name, header.offsets[name], tensor.dtype, tensor.shape, tensor.size_bytes)
        for name, tensor in header.tensors.items()
    }


def _stamp(path: Path) -> SourceFile:
    with open_regular(path) as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        size = file.seek(0, 2)
    return SourceFile(path.name, size, xxhash.xxh3_64_hexdigest(header))


def _check_kind(folder: Path, tensors: Mapping[str, Place]) -> None:
    """Forms that are not for this."""
    for name in tensors:
        if name.endswith(".qs"):
            raise ConvertError(
                f"{folder.name} is colibri's own container, which is served as it is; there is nothing to "
                "convert"
            )
        if _FOREIGN.search(name):
            raise ConvertError(
                f"{name} is packed in a way that is not read here; convert a checkpoint in bf16, fp8 or one "
                "that MLX has packed"
            )


class OfExperts(NamedTuple):
    """What an expert's tensor is by its name. expert: None for all of them in one."""

    module: str
    projection: Projection | Literal["gate_up"]
    key: Key
    expert: int | None


def tensor_of(name: str) -> OfExperts | None:
    """None where it is no expert's."""
    single = _SINGLE.match(name)
    if single and single[4] in _KEYS:
        return OfExperts(f"{single[1]}switch_mlp", PROJECTION_OF[single[3]], _KEYS[single[4]], int(single[2]))
    stacked = _STACKED.match(name)
    if stacked and stacked[4] in _KEYS:
        return OfExperts(f"{stacked[1]}{stacked[2]}", PROJECTION_OF[stacked[3]], _KEYS[stacked[4]], None)
    fused = _FUSED.match(name)
    if fused:
        which: Projection | Literal["gate_up"] = "gate_up" if fused[2] == "gate_up_proj" else "down_proj"
        return OfExperts(f"{fused[1]}switch_mlp", which, "weight", None)
    return None


_Parts = dict[tuple[Projection, Key], dict[int, Place]]


def _experts(tensors: Mapping[str, Place]) -> dict[str, _Parts]:
    """By module, each part's places by expert."""
    found: dict[str, _Parts] = {}
    for name, place in tensors.items():
        of = tensor_of(name)
        if of is None:
            continue
        module, projection, key, expert = of
        parts = found.setdefault(module, {})
        if expert is not None:
            assert projection != "gate_up"
            parts.setdefault((projection, key), {})[expert] = place
        elif projection == "gate_up":
            gate, up = _halves(name, place)
            parts["gate_proj", key], parts["up_proj", key] = gate, up
        else:
            parts[projection, key] = _slices(name, place)
    return found


def _slices(name: str, place: Place) -> dict[int, Place]:
    """A stacked tensor's experts."""
    if len(place.shape) < 2 or not 0 < place.shape[0] <= families.MAX_EXPERTS:
        raise CheckpointError(f"{place.file}: {name} of shape {list(place.shape)} has no axis of experts")
    count, shape = place.shape[0], place.shape[1:]
    step = place.size_bytes // count
    return {
        expert: Place(place.file, place.offset + expert * step, place.dtype, shape, step)
        for expert in range(count)
    }


def _halves(name: str, place: Place) -> tuple[dict[int, Place], dict[int, Place]]:
    """Gate and up of experts whose rows lie in one tensor [experts, 2 * inner, hidden]."""
    whole = _slices(name, place)
    rows = place.shape[1]
    if len(place.shape) != 3 or rows % 2:
        raise CheckpointError(f"{place.file}: {name} of shape {list(place.shape)} is no gate and up in one")
    half = (rows // 2, place.shape[2])
    step = whole[0].size_bytes // 2
    gate = {one: Place(place.file, at.offset, place.dtype, half, step) for one, at in whole.items()}
    up = {one: Place(place.file, at.offset + step, place.dtype, half, step) for one, at in whole.items()}
    return gate, up


def _group(module: str, parts: _Parts, expected: int | None) -> Experts:
    layer = layer_of(module)
    count = expected or 1 + max(expert for each in parts.values() for expert in each)
    for projection in PROJECTIONS:
        if (projection, "weight") not in parts:
            raise CheckpointError(f"layer {layer} has no {projection} of experts")
    places: dict[tuple[Projection, Key], tuple[Place, ...]] = {}
    for (projection, key), each in sorted(parts.items()):
        told = projection if key == "weight" else f"{projection} {key}"
        for expert in range(count):
            if expert not in each:
                raise CheckpointError(f"layer {layer}, expert {expert}: its {told} is in no file")
            if (each[expert].shape, each[expert].dtype) != (each[0].shape, each[0].dtype):
                raise CheckpointError(
                    f"layer {layer}, expert {expert}: its {told} is {each[expert].dtype} "
                    f"{list(each[expert].shape)}, expert 0's is {each[0].dtype} {list(each[0].shape)}"
                )
        if len(each) != count:
            raise CheckpointError(
                f"layer {layer} has an expert {max(each)}, and config.json says {count} experts"
            )
        places[projection, key] = tuple(each[expert] for expert in range(count))
    return Experts(layer, module, _kind(layer, places), count, places)


def _kind(layer: int, places: Mapping[tuple[Projection, Key], tuple[Place, ...]]) -> Kind:
    """How all three projections are held. Raises CheckpointError where they differ or nothing fits."""
    kinds: set[Kind] = set()
    for projection in PROJECTIONS:
        weight = places[projection, "weight"][0]
        if (projection, "scales") in places:
            kinds.add("mlx")
        elif weight.dtype == "F8_E4M3":
            _check_blocks(layer, projection, places)
            kinds.add("fp8")
        elif weight.dtype in _FLOATS and len(weight.shape) == 2:
            kinds.add("float")
        else:
            raise CheckpointError(
                f"{weight.file}: layer {layer}, expert 0: its {projection} is {weight.dtype} "
                f"{list(weight.shape)}; matrices of {', '.join(_FLOATS)}, fp8 in blocks, or packed by MLX "
                "can be converted"
            )
    gate, up, down = (places[projection, "weight"][0].shape for projection in PROJECTIONS)
    if kinds != {"mlx"} and not gate == up == down[::-1]:
        raise CheckpointError(
            f"layer {layer}: gate {list(gate)}, up {list(up)} and down {list(down)} are not the two ways of "
            "one feed-forward"
        )
    if len(kinds) > 1:
        raise CheckpointError(f"layer {layer}: its projections are {' and '.join(sorted(kinds))}, not alike")
    return kinds.pop()


def _check_blocks(
    layer: int, projection: Projection, places: Mapping[tuple[Projection, Key], tuple[Place, ...]]
) -> None:
    weight = places[projection, "weight"][0]
    if (projection, "scale_inv") not in places:
        raise CheckpointError(
            f"{weight.file}: layer {layer}, expert 0: its {projection} is fp8 without weight_scale_inv"
        )
    scale = places[projection, "scale_inv"][0]
    due = tuple(-(-size // BLOCK) for size in weight.shape)
    if scale.shape != due:
        raise CheckpointError(
            f"{scale.file}: layer {layer}, expert 0: {projection} of {list(weight.shape)} in blocks of "
            f"{BLOCK} has {list(due)} scales, not {list(scale.shape)}"
        )


def _check_alike(groups: list[Experts], last: int) -> None:
    """Experts of the main model's layers have one shape; which layer has another is told."""
    first = next((group for group in groups if group.layer < last), None)
    if first is None:
        raise CheckpointError(f"no layer below {last} has experts")
    for group in groups:
        for projection in PROJECTIONS:
            if group.layer < last and group.kind != first.kind:
                raise CheckpointError(
                    f"layer {group.layer} holds its experts as {group.kind}, layer {first.layer} as "
                    f"{first.kind}"
                )
            if group.kind == first.kind != "mlx" and group.shape(projection) != first.shape(projection):
                raise CheckpointError(
                    f"layer {group.layer}: {projection} of {list(group.shape(projection))}, layer "
                    f"{first.layer}'s is {list(first.shape(projection))}"
                )


def _check_routers(tensors: Mapping[str, Place], layers: set[int]) -> None:
    """Where there is a router there are experts."""
    for name, place in tensors.items():
        if _ROUTER.search(name) and layer_of(name) >= 0 and layer_of(name) not in layers:
            raise CheckpointError(
                f"layer {layer_of(name)} has a router ({name} in {place.file}), but its experts are in no "
                "file"
            )
