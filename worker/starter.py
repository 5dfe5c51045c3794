"""Convert the starter model's GGUF into a model folder: `python -m mlxpool.worker.starter GGUF OUT_DIR`.

The idea: a GGUF holds everything a model folder holds (weights, geometry, vocabulary, merges, chat
template) in one file, so the folder is rebuilt from that file alone, by name, and nothing is guessed.
Two edges shaped it. Llama-architecture GGUFs store the query and key rows permuted for interleaved
rotary embedding; instead of un-permuting them the config says `rope_traditional`. And quantised kernels
of MLX's CPU backend are scalar, so there the weights are written as float32, dequantised exactly from
float32 scales; on Metal and CUDA they stay in the file's own quantisation.

Owns nothing but the files it writes into OUT_DIR; the caller stages and publishes that folder. Progress
goes to stdout as JSON lines `{"done": bytes, "total": bytes}`, failures to stderr with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Dtype = Literal["float32", "native"]

# GGUF's token_type for tokens that never stand for text ("control").
_CONTROL_TOKEN = 3

# The one group size of the GGUF formats that MLX reads directly (Q4_0, Q4_1, Q8_0).
_GROUP_SIZE = 32

_TENSORS_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class ConversionError(ValueError):
    """The GGUF holds something this converter does not know; the message names it."""


def model_module(gguf_tensor: str) -> str:
    """The mlx-lm module path of a GGUF tensor name without its `.weight`; ConversionError if unknown."""
    if gguf_tensor in _OTHER_TENSORS:
        return _OTHER_TENSORS[gguf_tensor]
    parts = gguf_tensor.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _TENSORS_OF_A_LAYER:
        return f"model.layers.{parts[1]}.{_TENSORS_OF_A_LAYER[parts[2]]}"
    raise ConversionError(f"the GGUF has a tensor this converter does not know: {gguf_tensor}")


class _Gguf:
    """Metadata of a GGUF with plain Python values, by name, and its tensors."""

    def __init__(self, path: Path) -> None:
        try:
            loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
        except (RuntimeError, ValueError) as err:
            raise ConversionError(f"{path.name} can't be read as a GGUF: {err}") from err
        self.tensors: dict[str, mx.array] = loaded[0]
        self._metadata: dict[str, Any] = loaded[1]

    def get(self, key: str) -> Any:
        value = self._metadata.get(key)
        if value is None:
            raise ConversionError(f"the GGUF has no {key}")
        return value.tolist() if isinstance(value, mx.array) else value


def _config(gguf: _Gguf, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """config.json as mlx-lm's llama reads it."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": gguf.get("llama.embedding_length"),
        "intermediate_size": gguf.get("llama.feed_forward_length"),
        "num_hidden_layers": gguf.get("llama.block_count"),
        "num_attention_heads": gguf.get("llama.attention.head_count"),
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv"),
        "head_dim": gguf.get("llama.rope.dimension_count"),
        "vocab_size": gguf.get("llama.vocab_size"),
        # A float32 in the file: the number that was written there is the shortest one that reads back.
        "rms_norm_eps": float(f"{gguf.get('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": gguf.get("llama.rope.freq_base"),
        "rope_traditional": True,
        "max_position_embeddings": gguf.get("llama.context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32" if quantization is None else "float16",
    }
    if quantization is not None:
        config["quantization"] = quantization
    return config


def _tokenizer(gguf: _Gguf) -> tuple[Tokenizer, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json: byte-level BPE over individual digits."""
    kind, pre = gguf.get("tokenizer.ggml.model"), gguf.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ConversionError(f"the GGUF's tokenizer is {kind}/{pre}; this converter knows gpt2/smollm")
    tokens: list[str] = gguf.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, gguf.get("tokenizer.ggml.token_type"), strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[gguf.get("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[gguf.get("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[gguf.get("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[gguf.get("tokenizer.ggml.unknown_token_id")],
        "add_bos_token": gguf.get("tokenizer.ggml.add_bos_token"),
        "add_prefix_space": gguf.get("tokenizer.ggml.add_space_prefix"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.get("llama.context_length"),
        "chat_template": gguf.get("tokenizer.chat_template"),
    }
    return tokenizer, config


def _bits(weight: mx.array, scales: mx.array) -> int:
    """Bits per weight of packed uint32 words [rows, words] with scales [rows, groups]."""
    return int(weight.shape[-1] * 32 // (scales.shape[-1] * _GROUP_SIZE))


def _float32_weights(gguf: _Gguf) -> Iterator[tuple[str, mx.array]]:
    for name in sorted(gguf.tensors):
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        weight = gguf.tensors[name]
        scales = gguf.tensors.get(f"{stem}.scales")
        if scales is not None:
            # In float32 from the start: a float16 product would round what the file says exactly.
            biases = gguf.tensors[f"{stem}.biases"].astype(mx.float32)
            bits = _bits(weight, scales)
            weight = mx.dequantize(weight, scales.astype(mx.float32), biases, _GROUP_SIZE, bits)
        yield f"{model_module(stem)}.weight", weight.astype(mx.float32)


def _native_weights(gguf: _Gguf) -> Iterator[tuple[str, mx.array]]:
    for name in sorted(gguf.tensors):
        stem, _, kind = name.rpartition(".")
        value = gguf.tensors[name]
        # Activations take the norms' type: one float32 norm would make every later layer float32.
        yield f"{model_module(stem)}.{kind}", value.astype(mx.float16) if value.dtype == mx.float32 else value


def _quantization(gguf: _Gguf) -> dict[str, Any]:
    """mlx-lm's `quantization` block: the commonest width, and each layer that differs by name."""
    bits_of = {
        model_module(name.removesuffix(".scales")): _bits(
            gguf.tensors[name.replace(".scales", ".weight")], scales
        )
        for name, scales in gguf.tensors.items()
        if name.endswith(".scales")
    }
    if not bits_of:
        raise ConversionError("the GGUF holds no quantised tensors; convert it with --dtype float32")
    widths = list(bits_of.values())
    usual = max(set(widths), key=widths.count)
    differing = {
        module: {"group_size": _GROUP_SIZE, "bits": bits}
        for module, bits in sorted(bits_of.items())
        if bits != usual
    }
    return {"group_size": _GROUP_SIZE, "bits": usual, **differing}


def convert(gguf_path: Path, out: Path, dtype: Dtype, progress: Callable[[int, int], None]) -> None:
    """Write config.json, model.safetensors, tokenizer and generation_config into `out`.

    progress(done, total): bytes of weights converted. Raises ConversionError naming what is not known.
    """
    gguf = _Gguf(gguf_path)
    architecture = gguf.get("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"the GGUF's architecture is {architecture}; this converter knows llama")
    out.mkdir(parents=True, exist_ok=True)
    config = _config(gguf, None if dtype == "float32" else _quantization(gguf))
    tokenizer, tokenizer_config = _tokenizer(gguf)

    pending = dict(_float32_weights(gguf) if dtype == "float32" else _native_weights(gguf))
    total, done = sum(value.nbytes for value in pending.values()), 0
    progress(0, total)
    for value in pending.values():
        mx.eval(value)
        done += value.nbytes
        progress(done, total)
    mx.save_safetensors(str(out / "model.safetensors"), pending, metadata={"format": "mlx"})

    tokenizer.save(str(out / "tokenizer.json"))
    generation_config = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    for name, body in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (out / name).write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")


def backend_dtype() -> Dtype:
    """What this machine's MLX backend serves fast: float32 on the CPU, the file's own type on a GPU."""
    return "float32" if mx.default_device() == mx.cpu else "native"


def _print_progress(done: int, total: int) -> None:
    sys.stdout.write(msgspec.json.encode({"done": done, "total": total}).decode() + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """The command line: 0 when the folder is written, 1 with a reason on stderr when it can't be."""
    parser = argparse.ArgumentParser(prog="mlxpool.worker.starter", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "native"), default=None)
    options = parser.parse_args(argv)
    try:
        convert(options.gguf, options.out, options.dtype or backend_dtype(), _print_progress)
    except (ConversionError, OSError) as err:
        sys.stderr.write(f"the starter model could not be converted: {err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
