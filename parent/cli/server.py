"""`mlxpool down`, `status`, `ps`: the running server as a whole."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import (
    Failure,
    json_option,
    print_json,
    print_table,
    read_settings,
    settings_options,
)
from mlxpool.parent.run_folder import read_address
from mlxpool.shared.units import format_count, format_duration, format_size

# Beyond the drain time-out: what ending workers and closing takes at most.
_DOWN_GRACE_S = 10.0
_POLL_S = 0.05


@click.command("down")
@settings_options
@json_option
def down_command(config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Stop the running server once its requests have ended."""
    settings = read_settings(config_file, {"home": home})
    address = read_address(settings.home)
    if address is None or not client.is_running(address):
        raise Failure(f"no server is running for {settings.home}")
    begun = time.monotonic()
    limit_s = settings.pool.drain_timeout + _DOWN_GRACE_S
    try:
        os.kill(address.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it ended by itself just now
    except PermissionError:
        raise Failure(f"the server (pid {address.pid}) belongs to another user") from None
    while client.is_running(address):
        if time.monotonic() - begun > limit_s:
            raise Failure(
                f"the server (pid {address.pid}) is still running {format_duration(limit_s)} after SIGTERM"
            )
        time.sleep(_POLL_S)
    took_s = time.monotonic() - begun
    if as_json:
        print_json({"pid": address.pid, "stopped": True, "took_s": round(took_s, 3)})
    else:
        click.echo(f"stopped (pid {address.pid}, after {format_duration(took_s)})")
    return 0


@click.command("status")
@settings_options
@json_option
def status_command(config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Say whether the server runs, where, and with how much memory. Exit code 1 when it does not."""
    settings = read_settings(config_file, {"home": home})
    server = client.find(settings)
    if server is None:
        if not as_json:
            client.need(settings)
        print_json({"running": False, "home": settings.home})
        return 1
    pool = server.pool()
    address = server.address
    if as_json:
        where = {"home": settings.home, "pid": address.pid, "started": address.started, "url": server.url}
        print_json({"running": True, **where, "pool": pool})
        return 0
    click.echo(
        f"running at {server.url} (pid {address.pid}) for {format_duration(time.time() - address.started)}"
    )
    prompts = f", {format_size(pool.prompt_cache_bytes)} for prompts" if pool.prompt_cache_bytes else ""
    click.echo(
        f"memory   {format_size(pool.reserved_bytes)} reserved of {format_size(pool.budget_bytes)}{prompts}"
    )
    click.echo(f"workers  {len(pool.workers)}")
    click.echo(f"waiting  {format_count(len(pool.queue), 'request')}")
    if (holder := pool.leases.get("holder")) is not None:
        click.echo(f"GPU      {'held by' if pool.leases.get('exclusive') else 'goes next to'} {holder}")
    counted = (
        format_count(pool.counters.get(name, 0), noun)
        for name, noun in (("loads", "load"), ("evictions", "eviction"), ("crashes", "crash"))
    )
    click.echo(f"since start: {', '.join(counted)}")
    return 0


@click.command("ps")
@settings_options
@json_option
def ps_command(config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """List the workers of the running server."""
    pool = client.need(read_settings(config_file, {"home": home})).pool()
    if as_json:
        print_json({"workers": pool.workers})
        return 0
    if not pool.workers:
        click.echo("no workers")
        return 0
    print_table(
        ["MODEL", "STATE", "PID", "PLANNED", "HOLDS", "ACTIVE", "QUEUED", "USED"],
        [_row(worker, time.time()) for worker in pool.workers],
    )
    return 0


def _row(worker: client.WorkerView, now: float) -> list[str]:
    state = f"{worker.state}, pinned" if worker.pinned else worker.state
    return [
        worker.model,
        f"{state}: {worker.reason}" if worker.reason else state,
        _or_dash(worker.pid),
        format_size(worker.planned_bytes),
        "-" if worker.footprint_bytes is None else format_size(worker.footprint_bytes),
        str(worker.active),
        str(worker.queued),
        "-" if worker.last_used is None else f"{format_duration(max(0.0, now - worker.last_used))} ago",
    ]


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
