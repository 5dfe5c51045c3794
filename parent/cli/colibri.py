"""`mlxpool colibri`: models whose experts are read from disk as they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxpool.parent.cli import EXIT_FAILURE
from mlxpool.parent.cli.colibri_bench import bench_command
from mlxpool.parent.cli.colibri_convert import convert_command
from mlxpool.parent.cli.colibri_tune import tune_command
from mlxpool.parent.cli.common import (
    Failure,
    json_option,
    print_json,
    print_table,
    read_settings,
    settings_options,
)

if TYPE_CHECKING:
    from mlxpool.shared.colibri.forecast import Forecast
    from mlxpool.shared.colibri.plan import StreamPlan

# Where nothing was measured: a disk on a cable, a laptop's, a desktop's best.
_USUAL_RATES = (1_000_000_000, 3_000_000_000, 7_000_000_000)


@click.group("colibri")
def colibri_command() -> None:
    """Models whose experts are read from disk as they are needed."""


for command in (bench_command, convert_command, tune_command):
    colibri_command.add_command(command)


@colibri_command.command("plan")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--memory-budget", metavar="SIZE", help="The most the model may take; else what [pool] leaves.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens; else the settings', else 32,768.")
@click.option(
    "--mtp", type=click.Choice(["on", "off"]), help="With the draft layer or without; else settings."
)
@click.option("--slots", type=click.IntRange(min=1), help="Experts held per layer; else as many as fit.")
@settings_options
@json_option
def plan_command(
    folder: Path,
    memory_budget: str | None,
    context: int | None,
    mtp: str | None,
    slots: int | None,
    config_file: Path | None,
    home: Path | None,
    as_json: bool,
) -> int:
    """Show what the model in DIR would take, line by line, and how fast it might be.

    Headers alone are read, and no server is needed. Exit code 1 where it does not fit.
    """
    import msgspec

    from mlxpool.parent import streaming
    from mlxpool.parent.library import Library
    from mlxpool.shared import backend
    from mlxpool.shared.checkpoint import CheckpointError
    from mlxpool.shared.colibri import tuned
    from mlxpool.shared.colibri.folder import is_only_streamed

    if not folder.is_dir():
        raise Failure(f"{str(folder)!r} is no folder; name the folder that a model lies in")
    flags = {"home": home, "pool.memory_budget": memory_budget}
    settings = read_settings(config_file, flags)
    kind = backend.detect()
    limit = Library(settings).budget()
    own = settings.model(folder.resolve().name)
    chosen = {"experts": "stream", "mtp": mtp, "slots": slots}
    own = msgspec.structs.replace(own, **{key: value for key, value in chosen.items() if value is not None})
    try:
        # Named by its own name where it was given as "." or as nothing.
        folder = folder.absolute()
        streamed = streaming.read(folder, only=is_only_streamed(folder))
        made, _ = streaming.plan_of(
            streamed,
            own,
            settings.home,
            backend=kind,
            limit_bytes=limit.models_bytes if memory_budget is None else limit.total_bytes,
            limit_is_explicit=settings.budget_is_explicit,
            context=context,
        )
    except CheckpointError as problem:
        raise Failure(str(problem)) from None
    kept = tuned.read(settings.home)
    measured = kept.of(streamed.fingerprint, kind).disk_bytes_per_s
    rates = _USUAL_RATES if measured is None else (measured,)
    speeds = [(rate, streaming.speed(made, rate)) for rate in rates]
    if as_json:
        print_json(_document(streaming.view(made), speeds, measured is not None))
    else:
        _show(made, speeds, measured is not None)
    if kept.problem is not None:
        click.echo(f"mlxpool: {kept.problem}; it counts as if nothing had been measured", err=True)
    if made.verdict == "does_not_fit":
        if as_json:
            click.echo(f"mlxpool: {made.explanation}", err=True)
            return EXIT_FAILURE
        raise Failure(made.explanation)
    return 0


def _document(
    view: dict[str, Any], speeds: list[tuple[float, Forecast]], is_measured: bool
) -> dict[str, Any]:
    import msgspec

    forecasts = [
        {"disk_bytes_per_s": rate, "measured": is_measured, **msgspec.structs.asdict(speed)}
        for rate, speed in speeds
    ]
    return {**view, "forecasts": forecasts}


def _show(made: StreamPlan, speeds: list[tuple[float, Forecast]], is_measured: bool) -> None:
    from mlxpool.shared.units import format_size

    rows = [[item.label, f"{item.bytes:,}", format_size(item.bytes)] for item in made.items if item.bytes]
    rows.append(["planned", f"{made.planned_bytes:,}", format_size(made.planned_bytes)])
    if made.limit_bytes is not None:
        rows.append(["limit", f"{made.limit_bytes:,}", format_size(made.limit_bytes)])
    print_table(["ITEM", "BYTES", ""], rows)
    click.echo()
    facts = [
        ["context", f"{made.context} tokens, which is also the generation limit"],
        ["slots", f"{made.slots} of {made.experts} experts in each of {made.layers} layers"],
        ["working slots", f"{made.working_slots}; a step asks for {made.unique_experts} experts at most"],
        ["draft layer", f"{made.drafts} drafts, {made.mtp_slots} slots" if made.drafts else "off"],
        ["prefill chunk", f"{made.chunk} tokens"],
        ["on disk", f"{format_size(made.artifact_bytes)}, {made.record_bytes:,} bytes an expert"],
    ]
    if made.sparse_attention:
        facts.insert(
            4, ["sparse attention", "yes" if made.has_indexer else "no: the folder holds no indexers"]
        )
    if made.slots >= made.experts:
        facts.append(
            ["forecast", "every expert is in memory once it was asked for: then no disk is waited for"]
        )
    else:
        facts += _forecasts(made, speeds, is_measured)
    print_table(["FACT", ""], facts)
    if made.verdict != "does_not_fit":
        click.echo()
        click.echo(made.explanation)


def _forecasts(made: StreamPlan, speeds: list[tuple[float, Forecast]], is_measured: bool) -> list[list[str]]:
    from mlxpool.shared.units import format_duration, format_size

    facts = [["forecast hit rate", f"{made.hit_rate:.0%}"]]
    for rate, speed in speeds:
        disk = "the disk, as measured" if is_measured else "a disk"
        facts.append(
            [
                f"at {format_size(rate)}/s",
                f"{speed.tokens_per_s:.2f} tok/s at most from {disk}; a new prompt of {made.chunk} tokens"
                f" reads for {format_duration(speed.first_chunk_s)}",
            ]
        )
    return facts
