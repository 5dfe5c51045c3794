"""GGUF files imported by a server: what the models then say is what the file's own numbers say."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxpool.shared import backend, checkpoint
from tests.tools.gemma_fixture import gemma_gguf
from tests.tools.served import Served, serve, until
from tests.tools.starter_fixture import FOLDER_NAME, starter_gguf

# Texts, and their ids in Gemma's vocabulary: <bos>, then the words with their spaces.
PROMPTS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Water boils at": [2, 17390, 104264, 657],
}
TOKENS = 8
TEXTS = [
    "  two  spaces, and\ttabs\n\n\nlines\r\n",
    "naïve café 漢字 العربية हिन्दी 🙂👨‍👩‍👧",
    "def f(x):\n    return x**2  # 12345, 3.14 <b>bold</b>",
]
SAME_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not outlive its test: imported models are large."""
    yield tmp_path
    shutil.rmtree(tmp_path / "home", ignore_errors=True)


async def import_file(served: Served, file: Path, **config: Any) -> dict[str, Any]:
    """The row of an import that has ended."""
    answer = await served.request(
        "POST", "/api/jobs", {"kind": "import", "config": {"file": str(file), **config}}
    )
    assert answer.status == 202, answer.body
    row: dict[str, Any] = {}

    async def ended() -> bool:
        row.update((await served.request("GET", f"/api/jobs/{answer.body['id']}")).body)
        return row["status"] not in ("queued", "running")

    await until(ended, 120, lambda: str(row))
    return row


# An independent way from the file to text: the package's own reader and dequantisation, names and norms as
# they are written down for Gemma 3, and mlx-lm's plain loop.
PLAIN = """
import json, sys
import mlx.core as mx, numpy as np
from gguf import GGUFReader, dequantize
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text
names = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
  "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
weights = {}
for tensor in GGUFReader(sys.argv[1]).tensors:
    stem = tensor.name.removesuffix(".weight")
    values = mx.array(dequantize(tensor.data, tensor.tensor_type))
    if "norm" in stem:
        values = values - 1
    if stem.startswith("blk."):
        _, layer, name = stem.split(".")
        weights[f"model.layers.{layer}.{names[name]}.weight"] = values
    else:
        weights[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[stem] + ".weight"] = values
model = gemma3_text.Model(gemma3_text.ModelArgs(model_type="gemma3_text", hidden_size=640,
  num_hidden_layers=18, intermediate_size=2048, num_attention_heads=4, head_dim=256, rms_norm_eps=1e-6,
  vocab_size=262144, num_key_value_heads=1, rope_theta=1e6, rope_local_base_freq=1e4,
  query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6))
model.load_weights(list(model.sanitize(weights).items()), strict=True)
for ids in json.loads(sys.argv[2]):
    print([int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=int(sys.argv[3]))])
"""


def plain_loop(gguf: Path) -> list[list[int]]:
    """The greedy ids after each prompt."""
    prompts = json.dumps(list(PROMPTS.values()))
    run = subprocess.run(
        [sys.executable, "-c", PLAIN, str(gguf), prompts, str(TOKENS)],
        env=backend.worker_environment(backend.detect()), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


async def test_an_imported_k_quant_says_what_its_dequantised_weights_say(place: Path) -> None:
    plain = asyncio.ensure_future(asyncio.to_thread(plain_loop, gemma_gguf()))
    async with serve(place) as served:
        row = await import_file(served, gemma_gguf(), name="gemma", dtype="float32")
        assert row["status"] == "done", row
        assert row["result"]["model"] == "gemma"
        tokens = Tokenizer.from_file(str(place / "home" / "models" / "gemma" / "tokenizer.json"))
        for text in TEXTS:
            assert tokens.decode(tokens.encode(text).ids) == text
        # Runs of white space and tags were put in by hand; digits stand alone, what has no token is bytes.
        assert tokens.encode("x\n\n  y<b>12\r", add_special_tokens=False).tokens == [
            "x", "\n\n", "  ", "y", "<b>", "1", "2", "<0x0D>",
        ]  # fmt: skip
        expected = await plain
        for (prompt, ids), said in zip(PROMPTS.items(), expected, strict=True):
            assert tokens.encode(prompt).ids == ids
            answer = await served.request(
                "POST",
                "/v1/completions",
                {"model": "gemma", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0},
            )
            assert answer.status == 200, answer.body
            assert answer.body["choices"][0]["text"] == tokens.decode(said)
            assert answer.body["usage"]["prompt_tokens"] == len(ids)


async def test_the_starters_gguf_imported_is_the_starter(place: Path, starter_folder: Path) -> None:
    dtype = "float32" if backend.detect() in ("cpu", "none") else "native"
    async with serve(place) as served:
        row = await import_file(served, starter_gguf(), name=FOLDER_NAME, dtype=dtype)
        folder = place / "home" / "models" / FOLDER_NAME
        assert row["status"] == "done", row
        assert row["result"]["path"] == str(folder)
        for name in SAME_FILES:
            assert (folder / name).read_bytes() == (starter_folder / name).read_bytes(), name
        assert checkpoint.read(folder).model_type == "llama"
        answer = await served.chat(
            FOLDER_NAME,
            "What is the capital of France? Answer in one sentence.",
            temperature=0,
            max_tokens=20,
        )
        assert answer.text == "The capital of France is Paris."


async def test_every_fault_of_an_import_is_told_before_it_runs(place: Path) -> None:
    wrong = place / "wrong.gguf"
    wrong.write_bytes(b"not a model, and long enough to hold a header")
    async with serve(place) as served:
        config = {"file": str(wrong), "name": "a/b", "dtype": "float32"}
        answer = await served.request("POST", "/api/jobs", {"kind": "import", "config": config})
        assert answer.status == 400
        message = answer.body["error"]["message"]
        assert "wrong.gguf can't be read as a GGUF: it begins with b'not ', not b'GGUF'" in message
        assert "'a/b' can't be a model's name" in message
        assert (await served.request("GET", "/api/jobs")).body["jobs"] == []
