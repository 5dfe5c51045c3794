"""`mlxpool pull`: a model of the Hub, or the starter model.

Where a server of this home runs, the pull is one of its jobs, so that its page shows it; else it is a process
of this command. Either way it is the same process with the same lines, shown here as one bar.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from mlxpool.parent.cli import client, follow
from mlxpool.parent.cli.common import json_option, print_json, read_settings, settings_options
from mlxpool.parent.jobs.kinds.pull import PullConfig, process_argv


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
            result = follow.own_process(process_argv(config, settings.home), report, "pull")
    pulled = msgspec.convert(result, _Pulled)
    if as_json:
        print_json(pulled)
    elif pulled.was_there:
        click.echo(f"{pulled.model} is there already: {pulled.path}")
    else:
        click.echo(f"{pulled.model} is ready: {pulled.path}")
    return 0
