"""Demand reads of experts against the disk: our reader over a plain one, at the same size and depth.

The experts are GLM-5.2's in each form that they lie on disk: a record (one range of 21.2 MB), stacked tensors
(nine), colibri's container (two). The plain reader has as many threads, each of which reads one range after
another of the same files, into memory of the same kind. Both pass the page cache. In turn, one process. All
experts are asked for at once, then one or two at a time of the usual eight threads.

`address` of the report: what the driver wants of one, 512 in virtual machines, where slots have to lie as the
files do for reads to go straight into them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared.colibri import artifact, layout, records
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.slab import Slab
from mlxpool.worker.colibri.sources import open_source
from tests import tiny_glm
from tests.bench import common
from tests.bench.plain_reader import SLOTS, PlainReader

OF_PLAIN = 0.9
DEPTHS = (1, 2, 4, 8, 16)
# Experts asked for at a time: as many as there are, and few at the usual depth.
FEW = (1, 2)
USUAL_DEPTH = 8
HIDDEN, INNER = 6144, 2048
LIMIT_S = 600.0
PARTS = (("weight", "U32", 8, 4), ("scales", "BF16", 64, 2), ("biases", "BF16", 64, 2))
# In flight at once nothing but the depth bounds.
UNBOUNDED = 2**40


def main() -> int:
    """Measures and prints."""
    common.as_a_worker()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS)
    parser.add_argument("--forms", nargs="+", choices=sorted(WRITERS), default=sorted(WRITERS))
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    args = parser.parse_args()
    report = common.report("expert_reads", rounds=args.rounds, experts=args.experts)
    for form in args.forms:
        with tempfile.TemporaryDirectory(prefix="mlxpool-bench-", dir=args.folder) as scratch:
            folder = Path(scratch)
            WRITERS[form](folder, args.experts)
            measure(report, form, folder, args.rounds, args.depths)
    report.targets = [
        common.Target(name, value, OF_PLAIN, "", at_most=False)
        for name, value in report.figures.items()
        if "over plain" in name
    ]
    return report.emit()


def measure(report: Any, form: str, folder: Path, rounds: int, depths: Sequence[int]) -> None:
    """Ours and the plain reader in turn, at every depth."""
    held = artifact.read(folder)
    expert = held.layers[0]
    draw = np.random.default_rng(0)
    cases = [(depth, expert.experts, f"{form}, depth {depth}") for depth in depths]
    cases += [(USUAL_DEPTH, few, f"{form}, {few} at a time") for few in FEW]
    for depth, at_once, name in cases:
        ours, plain = report.row(name, "GB/s"), report.row(f"plain, {name}", "GB/s")
        source = open_source(held, "cpu", "direct")
        if source.io != "direct" and sys.platform == "linux":
            raise RuntimeError(source.io_reason)
        slab = Slab(source.layout(0), SLOTS, "direct")
        slots = [slab.rows(place) for place in range(SLOTS)]
        report.figures["address"] = source.unit.address
        reader = Reader(source, depth, UNBOUNDED)
        bare = PlainReader(folder, [expert], depth, direct=True)
        for turn in range(rounds):
            order = draw.permutation(expert.experts).tolist()
            for is_ours in (True, False) if turn % 2 else (False, True):
                begun = time.perf_counter()
                for first in range(0, len(order), at_once):
                    asked = order[first : first + at_once]
                    if is_ours:
                        read_ours(reader, expert, slots, asked)
                    else:
                        bare.read(expert.layer, asked)
                took = time.perf_counter() - begun
                (ours if is_ours else plain).samples.append(len(order) * expert.record_bytes / took / 1e9)
        reader.close()
        bare.close()
        pairs = zip(ours.samples, plain.samples, strict=True)
        report.figures[f"over plain: {name}"] = statistics.median(a / b for a, b in pairs)


def read_ours(reader: Reader, expert: layout.ExpertLayout, slots: list[Any], order: list[int]) -> None:
    asked = [reader.submit(expert.layer, one, slots[place % len(slots)]) for place, one in enumerate(order)]
    wait(asked, LIMIT_S)
    for one in asked:
        one.result()


def shapes() -> Iterator[tuple[layout.Projection, int, int]]:
    for projection in layout.PROJECTIONS:
        yield projection, *((HIDDEN, INNER) if projection == "down_proj" else (INNER, HIDDEN))


def write_config(folder: Path, experts: int) -> None:
    said = tiny_glm.config(
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_nextn_predict_layers=0,
        indexer_types=["full"],
        n_routed_experts=experts,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        quantization={"group_size": 64, "bits": 4},
    )
    (folder / "config.json").write_text(json.dumps(said))


def write_noise(path: Path, size: int, head: bytes = b"") -> None:
    """A file of noise after its head, on the disk."""
    noise = np.random.default_rng(1).integers(0, 256, 2**24, np.uint8)
    with path.open("wb") as file:
        file.write(head)
        while size:
            part = noise[: min(size, noise.size)]
            file.write(part.data)
            size -= part.size
        file.flush()
        os.fsync(file.fileno())


def header(tensors: dict[str, tuple[str, list[int], int]]) -> tuple[bytes, int]:
    """A safetensors file's head, and how many bytes of data follow. tensors: type, shape, bytes."""
    end = 0
    said = {}
    for name, (dtype, shape, size) in tensors.items():
        said[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(said).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, end


def write_records(folder: Path, experts: int) -> None:
    write_config(folder, experts)
    fields: list[records.Field] = []
    end = 0
    for projection, out, into in shapes():
        for part, dtype, per, width in PARTS:
            size = out * into // per * width
            fields.append(records.Field(projection, part, dtype, (out, into // per), end, size))
            end += size
    stride = records.record_stride(end)
    (folder / records.EXPERTS_FOLDER).mkdir()
    write_noise(folder / "experts/000.bin", stride * experts)
    head, size = header({"model.norm.weight": ("F32", [1], 4)})
    write_noise(folder / "dense-00000.safetensors", size, head)
    packing = dict.fromkeys(layout.PROJECTIONS, layout.Quantised("affine", 4, 64))
    module = "model.layers.0.mlp.switch_mlp"
    none = ("0" * 16,) * experts
    layer = records.RecordLayer(
        0, module, "experts/000.bin", experts, end, stride, tuple(fields), packing, none
    )
    dense = records.WrittenFile("dense-00000.safetensors", len(head) + size, "0" * 16)
    recipe = records.Recipe(4, 64, "affine")
    index = records.RecordIndex(
        records.FORMAT, records.VERSION, "glm_moe_dsa", (layer,), (dense,), (), recipe
    )
    (folder / records.INDEX_FILE).write_bytes(records.encode(index))


def write_stacked(folder: Path, experts: int) -> None:
    write_config(folder, experts)
    tensors = {
        f"model.layers.0.mlp.switch_mlp.{projection}.{part}": (
            dtype,
            [experts, out, into // per],
            experts * out * into // per * width,
        )
        for projection, out, into in shapes()
        for part, dtype, per, width in PARTS
    }
    head, size = header(tensors)
    write_noise(folder / "model.safetensors", size, head)


def write_container(folder: Path, experts: int) -> None:
    write_config(folder, experts)
    name = "model.layers.0.mlp.experts.{}.{}.weight"
    each = [(expert, *shape) for expert in range(experts) for shape in shapes()]
    scales = {name.format(e, p) + ".qs": ("F32", [out], 4 * out) for e, p, out, _ in each}
    data = {name.format(e, p): ("U8", [out * into // 2], out * into // 2) for e, p, out, into in each}
    head, size = header(scales | data)
    write_noise(folder / "out-00000.safetensors", size, head)


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "container": write_container,
    "records": write_records,
    "stacked": write_stacked,
}

if __name__ == "__main__":
    sys.exit(main())
