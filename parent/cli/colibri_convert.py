"""`mlxpool colibri convert`: a checkpoint made into records, by a process of this command.

No server is needed, and one that runs goes on meanwhile. Source and target are folders anywhere: what is
converted is often too large for the disk that models lie on.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from mlxpool.parent.cli import follow
from mlxpool.parent.cli.colibri_model import find_folder
from mlxpool.parent.cli.common import json_option, print_json, read_settings, settings_options
from mlxpool.shared.backend import detect, worker_environment
from mlxpool.shared.units import format_size


class _Converted(msgspec.Struct):
    """The result of a conversion."""

    model: str
    path: str
    experts_bytes: int
    dense_bytes: int
    kept_bytes: int
    layers: int
    draft: bool
    seconds: float


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--bits",
    type=click.Choice(["4", "8", "none"]),
    help="Bits of a weight, or none to leave weights as they are (default 4, and as they are where SRC is "
    "quantised already).",
)
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    help="Weights that share a scale (default 64 in mode affine, 32 in mxfp4).",
)
@click.option(
    "--mode", type=click.Choice(["affine", "mxfp4"]), default="affine", help="The format (default affine)."
)
@click.option("--verify/--no-verify", default=True, help="Read everything again at the end (default).")
@settings_options
@json_option
def convert_command(
    source: str,
    target: Path,
    bits: str | None,
    group_size: str | None,
    mode: str,
    verify: bool,
    config_file: Path | None,
    home: Path | None,
    as_json: bool,
) -> int:
    """Make records of a mixture of experts, so that each expert is one read.

    SRC is a model's name or its folder: a checkpoint as published (bf16, f16, f32, fp8 in blocks), or one
    that MLX has quantised, whose experts are taken as they are. DST is the folder to be; it is whole once it
    is there. A conversion that was interrupted goes on where it was when it is run again.
    """
    from mlxpool.parent.jobs.kinds import colibri_convert as kind

    try:
        config = msgspec.convert(
            {
                "model": source,
                "bits": bits,
                "group_size": None if group_size is None else int(group_size),
                "mode": mode,
                "verify": verify,
            },
            kind.ColibriConvertConfig,
        )
    except msgspec.ValidationError as problem:
        raise click.UsageError(str(problem)) from None
    for fault in kind.combination_faults(config):
        raise click.UsageError(f"--{fault.field.replace('_', '-')}: {fault.message}")
    folder, _ = find_folder(source, read_settings(config_file, {"home": home}))
    task = kind.make_task(config, str(folder), os.path.abspath(target))
    with follow.progress(quiet=as_json) as report:
        result = follow.own_process(
            kind.process_argv(task), report, "conversion", worker_environment(detect())
        )
    done = msgspec.convert(result, _Converted)
    if as_json:
        print_json(done)
        return 0
    kept = f", {format_size(done.kept_bytes)} of it by an earlier run" if done.kept_bytes else ""
    click.echo(
        f"{done.path}: {format_size(done.experts_bytes)} of experts in {done.layers} layers, "
        f"{format_size(done.dense_bytes)} of everything else{kept}"
    )
    return 0
