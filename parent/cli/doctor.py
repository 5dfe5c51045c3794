"""`mlxpool doctor`: what this machine can do, what it lacks, and what to do about each lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import Failure, json_option, print_json, read_settings, settings_options
from mlxpool.parent.cli.up import serve_flags, serve_options
from mlxpool.parent.doctor import Running, findings
from mlxpool.parent.machine import look
from mlxpool.parent.run_folder import read_address
from mlxpool.shared.config import Settings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@settings_options
@serve_options
@json_option
def doctor_command(config_file: Path | None, as_json: bool, **options: Any) -> int:
    """Look at this machine as a server with these options of `mlxpool up` would find it.

    Takes a few seconds, a hundred megabytes of disk for a moment, and changes nothing. Exit code 1 when
    something fails; a warning is no failure.
    """
    settings = read_settings(config_file, serve_flags(**options))
    found = findings(look(settings, _running(settings)))
    fails = any(finding.status == "fail" for finding in found)
    if as_json:
        print_json({"ok": not fails, "checks": found})
        return int(fails)
    for finding in found:
        mark = click.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
        click.echo(f"{mark}  {finding.name:8}  {finding.summary}")
        if finding.advice:
            click.echo(f"{'':16}→ {finding.advice}")
    return int(fails)


def _running(settings: Settings) -> Running | None:
    """The running server of this home, also one that does not answer."""
    address = read_address(settings.home)
    if address is None or not client.is_running(address):
        return None
    server = client.Client(address, settings.client_key)
    try:
        return Running(address.pid, server.url, server.pool().reserved_bytes)
    except Failure:
        return Running(address.pid, server.url, 0, answers=client.find(settings) is not None)
