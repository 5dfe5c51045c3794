"""`mlxpool colibri tune`: settings of a streamed model tried on this machine, and what pays kept.

A process of this command tries, the command keeps: one that is interrupted has kept nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxpool.parent.cli.common import (
    Failure,
    Number,
    json_option,
    print_json,
    print_table,
    read_settings,
    settings_options,
)
from mlxpool.shared.config_values import AUTO

if TYPE_CHECKING:
    from mlxpool.parent.cli.colibri_model import Model, Planned
    from mlxpool.shared.colibri.measured import Name, TuneResult
    from mlxpool.shared.colibri.tasks import StreamVariant
    from mlxpool.shared.config import ModelSettings


@click.command("tune")
@click.argument("model", metavar="MODEL")
@click.option(
    "--seconds",
    type=Number(0.1, 600),
    default=10.0,
    show_default=True,
    help="Of one decoding; each change takes up to four, with what fills the slots before.",
)
@settings_options
@json_option
def tune_command(
    model: str, seconds: float, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Try what makes MODEL, a name or a folder, faster on this machine, and keep what does by 3%.

    One setting is changed at a time; answers have to stay the same. What is set by hand is left alone. No
    server may hold models meanwhile; afterwards every server of this home uses what was kept.
    """
    from mlxpool.parent.cli import colibri_model
    from mlxpool.shared.colibri import tuned
    from mlxpool.shared.colibri.measured import TuneResult
    from mlxpool.shared.colibri.tasks import ColibriTuneTask

    found = colibri_model.to_be_loaded(model, read_settings(config_file, {"home": home}))
    start = found.planned(tuned.Tuned())
    others = variants(found, start)
    task = ColibriTuneTask(
        folder=str(found.folder),
        variants=others,
        names=tuple(open_names(found.own)),
        limit_bytes=start.plan.arrays_bytes,
        seconds=seconds,
    )
    done = colibri_model.run(found, "colibri_tune", task, "tuning", TuneResult, quiet=as_json)
    kept_in = found.settings.home
    try:
        tuned.keep(kept_in, found.streamed.fingerprint, found.backend, done.found)
    except OSError as problem:
        raise Failure(f"{tuned.path(kept_in)} can't be written: {problem.strerror}") from None
    if as_json:
        print_json(done)
    else:
        _show(done)
        click.echo(f"kept in {tuned.path(kept_in)}")
    return 0


def open_names(own: ModelSettings) -> list[Name]:
    """The settings that nobody has chosen."""
    chosen: dict[Name, object] = {
        "slots": own.slots,
        "io": own.io,
        "queue_depth": own.queue_depth,
        "prefetch": own.prefetch,
        "overlap": own.overlap,
        "mtp": own.mtp,
    }
    return [name for name, value in chosen.items() if value in (None, AUTO)]


def variants(found: Model, start: Planned) -> tuple[StreamVariant, ...]:
    """What plans with fewer slots come to, and with the draft layer where the folder has one: the first is
    the start. A plan that doesn't fit is left out."""
    from mlxpool.shared.colibri.tasks import StreamVariant
    from mlxpool.shared.colibri.tuned import Tuned

    slots, mtp = start.plan.slots, start.plan.drafts > 0
    counts = sorted({slots, max(1, math.ceil(slots * 3 / 4)), max(1, slots // 2)}, reverse=True)
    made = [StreamVariant(slots, mtp, start.launch)]
    for drafts in (mtp, True) if found.streamed.artifact.mtp is not None and not mtp else (mtp,):
        for count in counts:
            if (count, drafts) == (slots, mtp):
                continue
            try:
                launch = found.planned(Tuned(slots=count, mtp=drafts)).launch
            except Failure:
                continue
            made.append(StreamVariant(count, drafts, launch))
    return tuple(made)


def _show(done: TuneResult) -> None:
    from mlxpool.shared.units import format_size

    disk = done.disk
    click.echo(
        f"disk: {format_size(disk.bytes_per_s)}/s, {disk.depth} reads of {disk.read_bytes:,} bytes at once, "
        f"{disk.io}"
    )
    click.echo(f"without tuning: {done.start_rate:.2f} tok/s")
    rows = []
    for trial in done.trials:
        value = trial.value
        if isinstance(value, bool):
            value = "on" if value else "off"
        rates = ["", "", ""]
        if trial.best_rate:
            change = trial.rate / trial.best_rate - 1
            rates = [f"{trial.best_rate:.2f}", f"{trial.rate:.2f}", f"{change:+.1%}"]
        rows.append([trial.name, str(value), *rates, f"{trial.verdict} {trial.reason}".rstrip()])
    if rows:
        print_table(["SETTING", "TRIED", "TOK/S BEFORE", "WITH IT", "", "VERDICT"], rows)
    if done.left:
        click.echo(f"not tried: {', '.join(done.left)} (set by hand, or with nothing to choose from)")
    if done.found.tok_per_s is not None:
        click.echo(f"now: {done.found.tok_per_s:.2f} tok/s")
