"""Adapters on disk: what they and sets of them are called, and whether one fits a model, without a tensor.

An adapter is a folder as `mlx_lm.lora` writes it: adapter_config.json, and adapters.safetensors with a pair
of low-rank matrices for each layer it changes. A set of them is named by their ids joined with +, in any
order. Everything here is told from the config and the header alone, by parent and worker with the same words;
whether a layer is of a kind that can be adapted is the worker's to say. Nothing is kept or changed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared import checkpoint
from mlxpool.shared.checkpoint import Tensor
from mlxpool.shared.files import open_regular
from mlxpool.shared.text import cut

ADAPTERS_FOLDER = "adapters"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"

# Asks for the model as it is, where a default set would apply.
NONE = "none"
# The key of the config under which a fine-tuning job says which model it trained.
BASE_KEY = "mlxpool_base"

# A path's part that is never hidden, and that neither + nor : nor a slash can be mistaken in.
ID_PATTERN = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"
_ID = re.compile(ID_PATTERN)
ID_RULE = "letters, digits, dots, dashes and underscores, at most 100, no dot first"
# Each is two more multiplications in every layer.
SET_LIMIT = 8

# The config holds the arguments of a training, a few hundred bytes.
_MAX_CONFIG_BYTES = 1024 * 1024
_FLOATS = ("F32", "F16", "BF16")
# Of affine and other quantised weights.
_QUANTISED_BITS = (2, 3, 4, 5, 6, 8)
# mlx-lm's own default is 20; a thousand times that is a mistake, and near the end of what 16 bits hold.
_MAX_SCALE = 20_000
# How many ids an error lists.
_NAMED = 8


# Of each of an adapter's files: inode, size, time of writing in nanoseconds.
Stamp = tuple[tuple[int, int, int], ...]


class AdapterError(Exception):
    """No adapter that can be used. One line that names the file, and what is wrong with it."""


class Pair(msgspec.Struct, frozen=True):
    """A layer's two matrices: of a linear layer a [in, rank] and b [rank, out]; of experts a [experts, rank,
    in] and b [experts, out, rank]."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[1]


class Adapter(msgspec.Struct, frozen=True):
    """What an adapter's files say. rank: the largest of its layers'. layers: by name. size_bytes: of its
    tensors. base: the model that it was trained on, where it says so."""

    rank: int
    scale: float
    layers: dict[str, Pair]
    size_bytes: int
    base: str | None = None


class _Config(msgspec.Struct):
    fine_tune_type: Any = "lora"
    lora_parameters: Any = None
    mlxpool_base: Any = None


_CONFIG = msgspec.json.Decoder(_Config)


def is_id(text: str) -> bool:
    """Whether an adapter may be called that."""
    return bool(_ID.fullmatch(text)) and text != NONE


def read_set(text: str) -> tuple[str, ...]:
    """The ids of "a", "a+b" or "none", in the order that all spellings of a set share. Raises ValueError,
    with a message that completes "adapter …"."""
    if text == NONE:
        return ()
    if len(text) > SET_LIMIT * 101:
        raise ValueError(f"{cut(text)!r} is too long; at most {SET_LIMIT} ids joined with + work")
    ids = text.split("+")
    for one in ids:
        if not is_id(one):
            what = f"can't be joined with others ({NONE} is the model alone)" if one == NONE else "is no id"
            raise ValueError(f"{cut(text)!r}: {cut(one)!r} {what}; send {_FORMS}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"{cut(text)!r} names an adapter twice; name each once")
    if len(ids) > SET_LIMIT:
        raise ValueError(f"{cut(text)!r} names {len(ids)} adapters; at most {SET_LIMIT} work together")
    return tuple(sorted(ids))


_FORMS = f'an id ({ID_RULE}), several joined with +, or "{NONE}"'


def listing(root: Path) -> list[str]:
    """The ids of the folders in `root`, sorted; what can't be listed holds none."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if is_id(entry.name) and entry.is_dir())
    except OSError:
        return []


def some(ids: list[str]) -> str:
    """For a message: which adapters there are."""
    if not ids:
        return "there are no adapters here yet"
    return f"there are {', '.join(ids[:_NAMED])}{', …' if len(ids) > _NAMED else ''}"


def stamp(folder: Path) -> Stamp:
    """An identity of an adapter's files: it changes when one is replaced or written.

    Raises AdapterError where one is missing, or leads elsewhere.
    """
    return tuple(_stamp(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        facts = path.lstat()
    except OSError as problem:
        missing = isinstance(problem, FileNotFoundError | NotADirectoryError)
        raise AdapterError(f"{path.name}: {'is missing' if missing else problem.strerror}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise AdapterError(f"{path.name}: is no regular file (links are not followed)")
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def inside(folder: Path, roots: list[Path]) -> Path:
    """The folder with every link in it followed. Raises AdapterError where that is in none of `roots`."""
    try:
        real = folder.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise AdapterError(f"there is no folder {cut(str(folder), 300)!r}") from None
    if not any(real != root and real.is_relative_to(root) for root in (root.resolve() for root in roots)):
        raise AdapterError(f"{cut(str(folder), 300)!r} leads out of the folders that adapters may lie in")
    return real


def read(folder: Path) -> Adapter:
    """What the files in `folder` say, from the config and the header. Raises AdapterError."""
    stamp(folder)
    try:
        tensors = checkpoint.read_header(folder / WEIGHTS_FILE)
    except checkpoint.CheckpointError as problem:
        raise AdapterError(str(problem)) from None
    return described(read_config(folder), tensors)


def read_config(folder: Path) -> bytes:
    """The bytes of the config. Raises AdapterError."""
    try:
        with open_regular(folder / CONFIG_FILE) as file:
            raw = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as problem:
        raise AdapterError(f"{CONFIG_FILE}: can't be read: {problem.strerror}") from None
    if len(raw) > _MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_FILE}: larger than {_MAX_CONFIG_BYTES} bytes")
    return raw


def described(config: bytes, tensors: Mapping[str, Tensor]) -> Adapter:
    """An adapter of this config and these tensors. Raises AdapterError."""
    rank, scale, base = _parameters(config)
    if not tensors:
        raise AdapterError(f"{WEIGHTS_FILE}: holds no tensors")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, half = name.rpartition(".")
        if half not in ("lora_a", "lora_b") or not layer:
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {cut(name)!r} is no layer's lora_a or lora_b")
        if tensor.dtype not in _FLOATS:
            kinds = ", ".join(_FLOATS)
            raise AdapterError(f"{WEIGHTS_FILE}: {cut(name)!r} is of type {tensor.dtype}; use {kinds}")
        halves.setdefault(layer, {})[half] = tensor
    layers = {}
    for layer, pair in halves.items():
        if len(pair) != 2:
            lacks = "lora_b" if "lora_a" in pair else "lora_a"
            raise AdapterError(f"{WEIGHTS_FILE}: {cut(layer)!r} has no {lacks}")
        layers[layer] = _pair(layer, pair["lora_a"], pair["lora_b"], rank)
    size_bytes = sum(tensor.size_bytes for tensor in tensors.values())
    return Adapter(max(pair.rank for pair in layers.values()), scale, layers, size_bytes, base)


def _pair(layer: str, a: Tensor, b: Tensor, rank: int) -> Pair:
    linear = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
    experts = len(a.shape) == len(b.shape) == 3 and a.shape[0] == b.shape[0] and a.shape[1] == b.shape[2]
    if not (linear or experts) or not a.elements or not b.elements:
        raise AdapterError(
            f"{WEIGHTS_FILE}: lora_a {list(a.shape)} and lora_b {list(b.shape)} of {cut(layer)!r} make no "
            "low-rank pair"
        )
    if a.shape[1] != rank:
        raise AdapterError(
            f"{CONFIG_FILE}: rank is {rank}, but {cut(layer)!r} has one of {a.shape[1]} in {WEIGHTS_FILE}"
        )
    return Pair(a, b)


def _parameters(config: bytes) -> tuple[int, float, str | None]:
    """Rank, scale and base model."""
    try:
        said = _CONFIG.decode(config)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise AdapterError(f"{CONFIG_FILE}: no JSON object that can be read: {cut(str(problem))}") from None
    if said.fine_tune_type != "lora":
        raise AdapterError(
            f"{CONFIG_FILE}: fine_tune_type is {cut(repr(said.fine_tune_type))}; only 'lora' can be mounted"
            + (", fuse it into a model instead" if said.fine_tune_type in ("dora", "full") else "")
        )
    lora = said.lora_parameters
    if not isinstance(lora, dict):
        raise AdapterError(f"{CONFIG_FILE}: has no lora_parameters with rank and scale")
    rank, scale = lora.get("rank"), lora.get("scale")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{CONFIG_FILE}: rank is {cut(repr(rank))}; it must be a whole number, 1 or more")
    if (
        isinstance(scale, bool)
        or not isinstance(scale, int | float)
        or not -_MAX_SCALE <= scale <= _MAX_SCALE
    ):
        what = f"it must be a number, at most {_MAX_SCALE:,}"
        raise AdapterError(f"{CONFIG_FILE}: scale is {cut(repr(scale))}; {what}")
    base = said.mlxpool_base
    return rank, float(scale), base if isinstance(base, str) else None


class Fit(msgspec.Struct, frozen=True):
    """fits: None where the model's files name their layers otherwise than the model does, so that only
    mounting can tell. reason: why it does not fit, or can't be told."""

    fits: bool | None
    reason: str | None = None


def fit(adapter: Adapter, tensors: Mapping[str, Tensor]) -> Fit:
    """Whether an adapter's layers are in a checkpoint of these tensors, and of the right sizes."""
    unknown = []
    for layer, pair in adapter.layers.items():
        weight = tensors.get(f"{layer}.weight")
        if weight is None:
            unknown.append(layer)
            continue
        shape = _layer_shape(pair)
        if not _matches(weight, shape, f"{layer}.scales" in tensors):
            has = f"{list(weight.shape)}{' of packed numbers' if weight.dtype == 'U32' else ''}"
            return Fit(False, f"{cut(layer)!r} is for a weight of {list(shape)}, and the model's is {has}")
    if not unknown:
        return Fit(True)
    missing = [layer for layer in unknown if _looks_alike(layer, tensors)]
    # Experts are one layer in the model, and one each in the files of most of those that nobody converted.
    certain = next((layer for layer in missing if len(adapter.layers[layer].a.shape) == 2), None)
    if certain is not None:
        return Fit(False, f"the model has no layer {cut(certain)!r}")
    return Fit(None, "the model's files name their layers otherwise; mounting it tells")


def _looks_alike(layer: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the checkpoint has anything under the layer's name but for its number."""
    head = re.match(r".*?\.(?=\d+\.)", layer)
    return head is not None and any(name.startswith(head.group()) for name in tensors)


def _layer_shape(pair: Pair) -> tuple[int, ...]:
    """Of the weight that a pair is for: [out, in], with the experts before it where there are some."""
    if len(pair.a.shape) == 2:
        return pair.b.shape[1], pair.a.shape[0]
    return pair.a.shape[0], pair.b.shape[1], pair.a.shape[2]


def _matches(weight: Tensor, shape: tuple[int, ...], quantised: bool) -> bool:
    if not quantised:
        return weight.shape == shape
    if len(weight.shape) != len(shape) or weight.shape[:-1] != shape[:-1]:
        return False
    bits, rest = divmod(weight.shape[-1] * 32, shape[-1])
    return rest == 0 and bits in _QUANTISED_BITS
