"""A GGUF's header is read as a stranger's: whatever is wrong is one error that names it."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.gguf import header, parts
from mlxpool.shared.gguf.header import GgufError, LongList
from mlxpool.shared.gguf.plan import plan
from tests.tools import gguf_files
from tests.tools.gguf_files import Model, random_weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(
        tmp_path_factory.mktemp("gguf") / "m.gguf", Model("llama", random_weights("llama"))
    )


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as caught:
        plan(parts.read_all(path, with_long_lists=True), "float32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def made(path: Path, *, tensors: int = 0, entries: int = 0, rest: bytes = b"", version: int = 3) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest)
    return path


def tensor(name: str, shape: tuple[int, ...], form: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, form, offset)


def test_metadata_and_tensors_are_read_as_they_are(whole: Path) -> None:
    read = header.read(whole, with_long_lists=True)
    assert read.metadata["general.architecture"] == "llama"
    assert len(read.metadata["tokenizer.ggml.tokens"]) == 261
    found = read.tensors["blk.1.ffn_up.weight"]
    assert (found.shape, found.format_name) == ((96, 64), "F32")
    raw = whole.read_bytes()[found.offset : found.offset + found.size_bytes]
    expected = random_weights("llama")["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(found.shape), expected)


def test_long_lists_are_left_out_where_nobody_reads_them(tmp_path: Path) -> None:
    words = [f"w{at}" for at in range(header.LONG_LIST + 1)]
    path = gguf_files.write(tmp_path / "m.gguf", Model("llama", {}, {"a.words": words, "a.few": [1.5, 2.5]}))
    read = header.read(path, with_long_lists=False)
    assert read.metadata["a.words"] == LongList(len(words))
    assert read.metadata["a.few"] == [1.5, 2.5]
    assert header.read(path, with_long_lists=True).metadata["a.words"] == words


def test_a_file_that_is_cut_short_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    begin = min(info.offset for info in header.read(whole, with_long_lists=False).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 60), *range(60, begin, 97), begin, begin + 1, len(data) - 4]:
        cut.write_bytes(data[:size])
        assert refusal(cut).startswith("cut.gguf ")


def test_a_damaged_file_gives_one_error_or_is_read(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    begin = min(info.offset for info in header.read(whole, with_long_lists=False).tensors.values())
    dice = random.Random(11)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(dice.randint(1, 6)):
            bad[dice.randrange(begin)] = dice.choice((0, 1, 9, 0x7F, 0x80, 0xFF))
        damaged.write_bytes(bad)
        try:
            plan(parts.read_all(damaged, with_long_lists=True), "float32")
        except GgufError:
            refused += 1
    assert refused > 100


CASES: list[tuple[dict[str, Any], str]] = [
    ({"version": 1}, "m.gguf has version 1; known are versions 2 and 3"),
    ({"version": 3 << 24}, "m.gguf is for big-endian machines; known are versions 2 and 3"),
    ({"tensors": 2**63}, "its number of tensors is 9223372036854775808, and 65536 is the most"),
    ({"entries": 65_537}, "its number of metadata entries is 65537, and 65536 is the most"),
    ({"entries": 1, "rest": struct.pack("<Q", 2**40)}, "its length of a metadata key is 1099511627776"),
    ({"entries": 1, "rest": text("k") + struct.pack("<I", 77)}, "k has the unknown type 77"),
    ({"entries": 1, "rest": text("k") + struct.pack("<IIQ", 9, 9, 1)}, "k is a list of the unknown type 9"),
    (
        {"entries": 1, "rest": text("k") + struct.pack("<IIQ", 9, 10, 2**21)},
        "it ends within k",
    ),
    (
        {"entries": 2, "rest": 2 * (text("k") + struct.pack("<IB", 0, 1))},
        "k is there twice",
    ),
    (
        {"entries": 1, "rest": text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"},
        r"k is no UTF-8: b'\xff\xfe'",
    ),
    ({"tensors": 1, "rest": text("t") + struct.pack("<I", 5)}, "tensor t has 5 dimensions"),
    ({"tensors": 1, "rest": tensor("t", (32,), 9, 0)}, "tensor t has format 9, which is unknown here; known"),
    ({"tensors": 1, "rest": tensor("t", (33,), 2, 0)}, "tensor t of Q4_0 can't have the shape [33]"),
    ({"tensors": 1, "rest": tensor("t", (0,), 0, 0)}, "tensor t of F32 can't have the shape [0]"),
    (
        {"tensors": 1, "rest": tensor("t", (2**62, 2**62), 0, 0)},
        "tensor t of F32 can't have the shape",
    ),
    ({"tensors": 1, "rest": tensor("t", (8,), 0, 2**60) + bytes(64)}, "t ends at byte 1152921504606847072"),
    ({"tensors": 1, "rest": tensor("t", (8,), 0, 8) + bytes(96)}, "tensor t lies at 72, off the grid of 32"),
    (
        {"tensors": 2, "rest": tensor("a", (16,), 0, 0) + tensor("b", (8,), 0, 32) + bytes(160)},
        "tensors a and b overlap",
    ),
    (
        {"tensors": 2, "rest": tensor("a", (8,), 0, 0) + tensor("a", (8,), 0, 32) + bytes(160)},
        "tensor a is there twice",
    ),
    (
        {"entries": 1, "rest": text("general.alignment") + struct.pack("<II", 4, 24)},
        "general.alignment is 24, and no power of two",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), CASES, ids=[said[:30] for _, said in CASES])
def test_what_a_header_can_not_say_is_named(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    assert said in refusal(made(tmp_path / "m.gguf", **content))


def test_a_header_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    full = text("k") + struct.pack("<IIQ", 9, 12, 2**21) + bytes(2**24)
    path = made(
        tmp_path / "m.gguf", entries=5, rest=b"".join(full.replace(b"k", b"%d" % at, 1) for at in range(5))
    )
    assert "its header is longer than 67108864 bytes" in refusal(path)


def test_pipes_folders_and_nothing_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert refusal(tmp_path / "pipe.gguf") == "pipe.gguf can't be read: not a regular file"
    assert "folder.gguf can't be read" in refusal(tmp_path / "folder.gguf")
    assert refusal(tmp_path / "gone.gguf") == "gone.gguf can't be read: No such file or directory"


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "the GGUF's architecture is 'mamba'; this import knows llama, qwen2, qwen3, gemma3"),
    ("llama", {"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre is 'odd'; of gpt2's kind this import knows"),
    (
        "llama",
        {"llama.expert_count": 8},
        "llama.expert_count is there; mixtures of experts can't be imported",
    ),
    (
        "qwen2",
        {"qwen2.rope.scaling.type": "yarn"},
        "qwen2.rope.scaling.type is 'yarn'; this import knows linear and Llama 3's",
    ),
    (
        "llama",
        {"llama.attention.head_count": [4, 2]},
        "llama.attention.head_count is [4, 2]; one whole number",
    ),
    ("llama", {"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only 16"),
    ("llama", {"llama.block_count": 3}, "the GGUF lacks 9 tensors of llama: blk.2.attn_q.weight,"),
    ("llama", {"llama.block_count": 2_000_000}, "llama.block_count is 2000000, with 20 tensors in all"),
    (
        "llama",
        {"llama.block_count": 1},
        "a tensor that llama is not known to have here: blk.1.attn_q.weight",
    ),
    ("llama", {"llama.embedding_length": 128}, "where the metadata means"),
    ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping is set"),
    ("qwen3", {"qwen3.attention.layer_norm_rms_epsilon": -1.0}, "is -1.0; a number above 0"),
    ("llama", {"llama.context_length": None}, "the GGUF has no llama.context_length"),
]


@pytest.mark.parametrize(
    ("architecture", "metadata", "said"), UNKNOWN, ids=[case[2][:40] for case in UNKNOWN]
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], said: str
) -> None:
    weights = random_weights(architecture)
    path = gguf_files.write(tmp_path / "m.gguf", Model(architecture, weights, metadata))
    assert said in refusal(path)


def test_an_unknown_tensor_and_unknown_rope_factors_are_named(tmp_path: Path) -> None:
    weights = random_weights("llama")
    extra = {"blk.0.attn_sinks": np.zeros(4, np.float32)}
    path = gguf_files.write(tmp_path / "a.gguf", Model("llama", weights, extra=extra))
    assert refusal(path) == "the GGUF has a tensor that llama is not known to have here: blk.0.attn_sinks"
    factors = {"rope_freqs.weight": np.linspace(1, 3, 8).astype(np.float32)}
    path = gguf_files.write(tmp_path / "b.gguf", Model("llama", weights, extra=factors))
    assert "rope_freqs.weight holds factors of no rope scaling that is known" in refusal(path)
    # A file with a hole says so in a few bytes, and the server would read the hole.
    factors = {"rope_freqs.weight": np.ones(5_000, np.float32)}
    path = gguf_files.write(tmp_path / "c.gguf", Model("llama", weights, extra=factors))
    assert refusal(path) == "rope_freqs.weight has 5000 factors; 4096 are the most believed"
