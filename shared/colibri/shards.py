"""The tensors of a folder's safetensors files and where each begins, from headers alone.

A fault is told by what is lost: "layer 7, expert 12" means more to somebody who waits for a download of 400
GB than a tensor's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mlxpool.shared import checkpoint
from mlxpool.shared.checkpoint import INDEX_FILE, CheckpointError, CutShort, Tensor
from mlxpool.shared.colibri.layout import Place, Projection

# Mixtral's names and those that came after.
PROJECTION_OF: dict[str, Projection] = {
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    "down_proj": "down_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_NAMES = "|".join(PROJECTION_OF)
# Of a layer or an expert. A name with more digits is nobody's, and may have more than Python reads.
NUMBER = r"[0-9]{1,9}"
# One tensor per expert: (prefix, layer, expert, projection, what of it).
SINGLE = re.compile(rf"(.*?\blayers\.({NUMBER})\..*?)\.?experts\.({NUMBER})\.({_NAMES})\.(.+)")
# One tensor for all experts of a layer: (prefix, layer, projection, what of it).
STACKED = re.compile(rf"(.*?\blayers\.({NUMBER})\..*)\.(gate_proj|up_proj|down_proj)\.([a-z_]+)")


class Entry(NamedTuple):
    """A tensor in a file. file: its index in Shards.files. offset: of its first byte in the file."""

    file: int
    tensor: Tensor
    offset: int


class Shards(NamedTuple):
    """files: names, sorted. metadata: each one's free text."""

    files: tuple[str, ...]
    entries: dict[str, Entry]
    metadata: tuple[dict[str, str], ...]

    def place(self, name: str) -> Place:
        file, tensor, offset = self.entries[name]
        return Place(self.files[file], offset, tensor.dtype, tensor.shape, tensor.size_bytes)


def read(folder: Path, pattern: str) -> Shards:
    """The files that match `pattern`. Raises CheckpointError, also where an index file lists others."""
    try:
        files = tuple(sorted(path.name for path in folder.glob(pattern)))
    except OSError as problem:
        raise CheckpointError(f"{checkpoint.called(folder)}: can't be listed: {problem.strerror}") from None
    index = checkpoint.read_index(folder / INDEX_FILE) if pattern == checkpoint.WEIGHTS_PATTERN else {}
    for shard in sorted(set(index.values()) - set(files)):
        lost = [name for name, home in index.items() if home == shard]
        raise CheckpointError(
            f"{INDEX_FILE}: lists {shard!r}, which is not in the folder{_first_lost(lost, ': it holds ')}"
        )
    if not files:
        raise CheckpointError(f"{checkpoint.called(folder)}: no {pattern} file in the folder")
    entries: dict[str, Entry] = {}
    metadata = []
    for number, name in enumerate(files):
        try:
            header = checkpoint.read_whole_header(folder / name)
        except CutShort as problem:
            raise CheckpointError(f"{problem}{_cut_from(problem)}") from None
        for tensor, described in header.tensors.items():
            if tensor in entries:
                home = files[entries[tensor].file]
                raise CheckpointError(f"{name}: tensor {tensor!r} is in {home} already")
            entries[tensor] = Entry(number, described, header.offsets[tensor])
        metadata.append(header.metadata)
    for tensor, shard in index.items():
        if tensor not in entries or files[entries[tensor].file] != shard:
            raise CheckpointError(f"{INDEX_FILE}: lists tensor {tensor!r} in {shard}, which does not hold it")
    return Shards(files, entries, tuple(metadata))


def _first_lost(tensors: list[str], intro: str) -> str:
    """The first expert among them, in words, "" where there is none."""
    experts = [(int(found[2]), int(found[3])) for found in map(SINGLE.fullmatch, tensors) if found]
    if experts:
        layer, expert = min(experts)
        return f"{intro}layer {layer}, expert {expert}" + (" and others" if len(set(experts)) > 1 else "")
    layers = [int(found[2]) for found in map(STACKED.fullmatch, tensors) if found]
    return f"{intro}layer {min(layers)}" if layers else ""


def _cut_from(problem: CutShort) -> str:
    single, stacked = SINGLE.fullmatch(problem.tensor), STACKED.fullmatch(problem.tensor)
    if single:
        return f": cut within layer {single[2]}, expert {single[3]} ({problem.tensor})"
    if stacked and len(problem.shape) > 1 and problem.shape[0]:
        each = problem.size_bytes // problem.shape[0]
        expert = (problem.size_bytes - problem.missing) // max(each, 1)
        return f": cut within layer {stacked[2]}, expert {expert} ({problem.tensor})"
    return f": cut within {problem.tensor}"
