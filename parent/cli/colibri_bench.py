"""`mlxpool colibri bench`: a streamed model measured by a process of this command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxpool.parent.cli.common import (
    json_option,
    print_json,
    print_table,
    read_settings,
    settings_options,
)

if TYPE_CHECKING:
    from mlxpool.shared.colibri.measured import Bench


@click.command("bench")
@click.argument("model", metavar="MODEL")
@click.option(
    "--tokens", type=click.IntRange(1, 4096), default=64, show_default=True, help="Decoded after each prompt."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(2), default=512, show_default=True, help="Of each of two prompts."
)
@settings_options
@json_option
def bench_command(
    model: str, tokens: int, prompt_tokens: int, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Measure MODEL, a name or a folder, as a server would have it: disk, prefill, decode and memory.

    No server may hold models meanwhile. The settings in effect and what `tune` has kept apply.
    """
    from mlxpool.parent.cli import colibri_model
    from mlxpool.shared.colibri.measured import MOST_WARM_TOKENS, Bench
    from mlxpool.shared.colibri.tasks import ColibriBenchTask

    found = colibri_model.to_be_loaded(model, read_settings(config_file, {"home": home}))
    planned = found.planned()
    room = planned.plan.context - MOST_WARM_TOKENS - 1
    if prompt_tokens + tokens > room:
        raise click.UsageError(
            f"--prompt-tokens {prompt_tokens} and --tokens {tokens} are more than {room}, which is what the "
            f"planned context of {planned.plan.context} has room for"
        )
    task = ColibriBenchTask(
        folder=str(found.folder),
        launch=planned.launch,
        limit_bytes=planned.plan.arrays_bytes,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
    )
    done = colibri_model.run(found, "colibri_bench", task, "measurement", Bench, quiet=as_json)
    if as_json:
        print_json(done)
    else:
        _show(done)
    return 0


def _show(done: Bench) -> None:
    from mlxpool.shared.units import format_duration, format_size

    disk, prefill, decode, memory = done.disk, done.prefill, done.decode, done.memory
    why = f" ({done.io_reason})" if done.io_reason else ""
    rows = [
        ["model", f"{done.form}, {done.slots} of {done.experts} experts per layer in memory"],
        ["read as", f"{done.io}{why}, written {done.write}"],
        [
            "disk",
            f"{format_size(disk.bytes_per_s)}/s by itself, {disk.depth} reads of {disk.read_bytes:,} bytes "
            f"at once, {disk.io}",
        ],
        ["load", format_duration(done.load_s)],
        [
            "prefill",
            f"{prefill.tok_per_s:.2f} tok/s, {format_size(prefill.read_bytes)} read of "
            f"{format_size(prefill.needed_bytes)} that were needed",
        ],
        ["decode", f"{decode.tok_per_s:.2f} tok/s over {decode.tokens} tokens"],
        ["found in memory", f"{decode.hit_rate:.1%}"],
        [
            "read",
            f"{format_size(decode.read_bytes_per_token)} a token, {decode.disk_share:.0%} of the disk's rate",
        ],
        [
            "waits",
            f"{1000 * decode.wait_s / decode.tokens:.1f} ms a token for reads, "
            f"{1000 * decode.sync_s / decode.tokens:.1f} ms for routers and what they wait for",
        ],
    ]
    if done.drafts:
        rows.append(
            [
                "drafts",
                f"{decode.accepted} of {decode.drafted} came, {decode.tokens / decode.passes:.2f} "
                "tokens a pass",
            ]
        )
    rows += [
        [
            "memory",
            f"{format_size(memory.footprint_bytes)} of {format_size(memory.planned_bytes)} planned; arrays "
            f"{format_size(memory.mlx_peak_bytes)} at most, of {format_size(memory.mlx_limit_bytes)}",
        ],
    ]
    print_table(["FIGURE", ""], rows)
