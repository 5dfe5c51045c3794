"""`mlxpool jobs`: long work of the running server, listed, looked at, ended."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import json_option, print_json, print_table, read_settings, settings_options
from mlxpool.parent.cli.follow import Event
from mlxpool.parent.jobs.store import Job
from mlxpool.shared.text import cut
from mlxpool.shared.units import format_duration

_POLL_S = 0.1
# A process gets 3 s to end before it is killed; its group and its lease go after it.
_END_LIMIT_S = 30.0
_WHAT_CHARS = 40
_MESSAGE_CHARS = 60


class _Rows(msgspec.Struct):
    jobs: list[Job]


@click.group("jobs")
def jobs_command() -> None:
    """Long work of the running server: list, show, cancel, logs."""


@jobs_command.command("list")
@settings_options
@json_option
def list_command(config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """List the jobs, the newest first."""
    rows = client.need(read_settings(config_file, {"home": home})).get("/api/jobs", _Rows).jobs
    if as_json:
        print_json(rows)
    elif not rows:
        click.echo("no jobs yet")
    else:
        columns = ["ID", "KIND", "WHAT", "STATUS", "PROGRESS", "TOOK", "MESSAGE"]
        print_table(columns, [_cells(row) for row in rows])
    return 0


@jobs_command.command("show")
@click.argument("job_id", metavar="ID")
@settings_options
@json_option
def show_command(job_id: str, config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Show one job: what was asked, how far it is, what it has made."""
    row = client.need(read_settings(config_file, {"home": home})).get(_path(job_id), Job)
    if as_json:
        print_json(row)
        return 0
    lines = [("id", row.id), ("kind", row.kind), ("status", row.status), ("progress", f"{row.progress:.0%}")]
    lines += [(name, _shown(value)) for name, value in row.config.items()]
    lines += [("took", _took(row)), ("message", row.message)]
    lines += [("error", row.error)] if row.error else []
    lines += [(name, _shown(value)) for name, value in (row.result or {}).items()]
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        click.echo(f"{name:{width}}  {text}")
    return 0


@jobs_command.command("cancel")
@click.argument("job_id", metavar="ID")
@settings_options
@json_option
def cancel_command(job_id: str, config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """End a job and wait until its process is gone. One that has ended stays as it is."""
    server = client.need(read_settings(config_file, {"home": home}))
    row = server.post(f"{_path(job_id)}/cancel", {}, Job)
    deadline = time.monotonic() + _END_LIMIT_S
    while row.active and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        row = server.get(_path(job_id), Job)
    if as_json:
        print_json(row)
    else:
        click.echo(f"{row.id}: {row.status}")
    return 0


@jobs_command.command("logs")
@click.argument("job_id", metavar="ID")
@click.option("-f", "--follow", is_flag=True, help="Go on until it has ended.")
@settings_options
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
def logs_command(
    job_id: str, follow: bool, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Show what happened in a job: stages, figures, and what its process has written."""
    server = client.need(read_settings(config_file, {"home": home}))
    for event in server.events(f"{_path(job_id)}/events?follow={str(follow).lower()}"):
        if as_json:
            click.echo(event.data)
        else:
            read = msgspec.json.decode(event.data, type=Event)
            click.echo(f"{time.strftime('%H:%M:%S', time.localtime(read.time))} {read.told()}")
    return 0


def _path(job_id: str) -> str:
    return f"/api/jobs/{quote(job_id, safe='')}"


def _cells(row: Job) -> list[str]:
    what = next((str(value) for value in row.config.values()), "")
    said = row.error or row.message
    progress = f"{row.progress:.0%}"
    texts = [row.id, row.kind, cut(what, _WHAT_CHARS), row.status, progress, _took(row)]
    return [*texts, cut(said, _MESSAGE_CHARS)]


def _took(row: Job) -> str:
    if row.started is None:
        return "-"
    return format_duration(max(0.0, (row.ended or time.time()) - row.started))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
