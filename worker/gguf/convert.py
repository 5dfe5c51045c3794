"""One GGUF into one model folder: config, tokenizer and template, weights. The starter and every import.

Owns nothing but the files it writes into the folder; the caller stages and publishes that.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mlxpool.shared.gguf import parts
from mlxpool.shared.gguf.plan import Dtype, plan

from . import tokenizer
from .write import Progress, write


def convert(path: Path, folder: Path, dtype: Dtype, progress: Progress) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and model*.safetensors into `folder`.

    path: the file, or one of its parts. progress: bytes of weights. Raises GgufError, OSError.
    """
    header = parts.read_all(path, with_long_lists=True)
    planned = plan(header, dtype)
    made = tokenizer.build(header, planned.config["vocab_size"])
    ends = made.end_ids[0] if len(made.end_ids) == 1 else made.end_ids
    ids: dict[str, object] = {"bos_token_id": made.begin_id, "eos_token_id": ends or None}
    folder.mkdir(parents=True, exist_ok=True)
    made.tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", made.config)
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", {**planned.config, **ids})
    write(planned, folder, progress)


def _write_json(path: Path, body: dict[str, object]) -> None:
    present = {name: value for name, value in body.items() if value is not None}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(present), indent=2) + b"\n")
