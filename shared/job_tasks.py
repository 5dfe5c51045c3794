"""What a kind's parent half hands to its process: names looked up, paths made absolute, defaults filled in.

One JSON text on the command line. The process believes it: whatever a person can get wrong has been refused
before (`faults` of the kinds).
"""

from __future__ import annotations

from typing import Literal

import msgspec

# One file of weights at most: what a job that writes a model holds of its results at once.
SHARD_BYTES = 1 << 30


class Trained(msgspec.Struct, frozen=True):
    """An adapter. id: its name. folder: of its files."""

    id: str
    folder: str


class QuantizeTask(msgspec.Struct, frozen=True, kw_only=True):
    """model, folder: what is quantised, its name and its files. models: where the result is put as `name`.

    Exactly one of bits, recipe, target_bpw is set; bits for modes other than affine too. dtype: of what stays
    unquantised, None as it is stored.
    """

    model: str
    folder: str
    models: str
    name: str
    group_size: int
    mode: str
    bits: int | None = None
    recipe: str | None = None
    target_bpw: float | None = None
    dtype: str | None = None


class FinetuneTask(msgspec.Struct, frozen=True, kw_only=True):
    """data, valid: JSONL files; valid None: `valid_fraction` of the data. adapters: where the result is put
    as `name`. layers: the last so many blocks, 0 for all."""

    model: str
    folder: str
    adapters: str
    name: str
    data: str
    valid: str | None
    valid_fraction: float
    valid_batches: int
    iters: int
    batch_size: int
    learning_rate: float
    schedule: str
    warmup: int
    layers: int
    rank: int
    scale: float
    dropout: float
    keys: list[str] | None
    max_seq_length: int
    mask_prompt: bool
    grad_checkpoint: bool
    grad_accumulation: int
    steps_per_report: int
    steps_per_eval: int
    seed: int
    resume: Trained | None


class FuseTask(msgspec.Struct, frozen=True, kw_only=True):
    """The model with an adapter's weights in its own, put into `models` as `name`."""

    model: str
    folder: str
    models: str
    name: str
    adapter: Trained
    dequantize: bool


class EvaluateTask(msgspec.Struct, frozen=True, kw_only=True):
    """file: a text, or JSONL where its name ends so. context: tokens a prediction may look back at. stride:
    tokens predicted in one window. limit_tokens: predictions at most, None for all."""

    model: str
    folder: str
    file: str
    is_lines: bool
    context: int
    stride: int
    limit_tokens: int | None
    adapter: Trained | None


class ColibriConvertTask(msgspec.Struct, frozen=True, kw_only=True):
    """folder: of what is converted. target: the folder to be. bits: None where weights stay as they are.
    given: whether bits were asked for. verify: read everything again at the end."""

    folder: str
    target: str
    bits: int | None
    group_size: int
    mode: str
    given: bool
    verify: bool


class ImportTask(msgspec.Struct, frozen=True, kw_only=True):
    """file: the GGUF, or one of its parts. models: where the result is put as `name`. dtype: of
    shared/gguf/plan.py."""

    file: str
    models: str
    name: str
    dtype: Literal["float32", "bfloat16", "float16", "native"]
