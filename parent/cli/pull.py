"""`mlxpool pull`: a model of the Hub, or the starter model.

Where a server of this home runs, the pull is one of its jobs, so that its page shows it; else it is a process
of this command. Either way it is the same process with the same lines, shown here as one bar.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import click
import msgspec

from mlxpool.parent.cli import client, follow
from mlxpool.parent.cli.common import Failure, json_option, print_json, read_settings, settings_options
from mlxpool.parent.jobs.kinds.pull import PullConfig, process_argv
from mlxpool.shared.config import Settings
from mlxpool.shared.job_lines import Done, Failed, Stage, read_line

# A process whose tether is closed kills itself and what it has started; it needs no more than this.
_END_S = 5.0


class _Pulled(msgspec.Struct):
    """The result of a pull."""

    model: str
    path: str
    was_there: bool


@click.command("pull")
@click.argument("name")
@click.option("--revision", metavar="R", help="A branch, tag or commit; else the repository's main branch.")
@settings_options
@json_option
def pull_command(
    name: str, revision: str | None, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Fetch a model of the Hugging Face Hub, as org/name; `mlxpool pull starter` fetches a small one.

    What is fetched is checked, and is a model only when it is whole. A pull that was interrupted goes on
    where it was when it is run again. Gated and private models need HF_TOKEN, or a login.
    """
    try:
        config = PullConfig(name, revision)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    settings = read_settings(config_file, {"home": home})
    server = client.find(settings)
    with follow.progress(quiet=as_json) as report:
        if server is not None:
            result = follow.result_of(follow.run(server, "pull", config, report))
        else:
            result = _as_own_process(config, settings, report)
    pulled = msgspec.convert(result, _Pulled)
    if as_json:
        print_json(pulled)
    elif pulled.was_there:
        click.echo(f"{pulled.model} is there already: {pulled.path}")
    else:
        click.echo(f"{pulled.model} is ready: {pulled.path}")
    return 0


def _as_own_process(config: PullConfig, settings: Settings, report: follow.Report) -> dict[str, Any]:
    """Run the job's process under a tether of ours; interrupting closes it."""
    tether_read, tether = os.pipe()
    process = subprocess.Popen(
        [*process_argv(config, settings.home), "--tether-fd", str(tether_read)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(tether_read,),
        start_new_session=True,
    )
    os.close(tether_read)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            match read_line(line):
                case Stage(name, progress, message):
                    report.stage(progress, f"{name} {message}".strip())
                case Done(result):
                    return result
                case Failed(error):
                    raise Failure(error)
        raise Failure(f"the pull ended without a result (exit code {process.wait()})")
    finally:
        os.close(tether)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
