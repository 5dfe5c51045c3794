"""`mlxpool service`: the server as a service of the user's session, under launchd or systemd."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import Failure, json_option, print_json, read_settings, settings_options
from mlxpool.parent.cli.up import serve_flags, serve_options
from mlxpool.parent.run_folder import read_address
from mlxpool.parent.service import setup
from mlxpool.parent.service.manager import Manager, Status
from mlxpool.parent.service.spec import Installed, ServiceError, Spec, make_spec, program
from mlxpool.shared.config import Settings

F = TypeVar("F", bound=Callable[..., Any])

# The server is up within a second; an interpreter read from a cold disk takes several.
_UP_TIMEOUT_S = 20.0
_POLL_S = 0.1
_TOLD_LINES = 5


class ServiceFailure(click.UsageError):
    """What the user asked for can't be written into a service file: exit code 2."""


def manager_options(command: F) -> F:
    """--launchd and --systemd: whose service; else this system's own."""
    command = click.option("--systemd", "kind", flag_value="systemd", help="A systemd user unit.")(command)
    return click.option("--launchd", "kind", flag_value="launchd", help="A LaunchAgent (macOS).")(command)


@click.group("service")
def service_command() -> None:
    """Run the server as a service: started at login, restarted when it fails.

    One service a user: a LaunchAgent on macOS, a systemd user unit on Linux.
    """


@service_command.command("install")
@settings_options
@serve_options
@manager_options
@click.option("--no-wait", is_flag=True, help="Return at once; the server goes on starting.")
def install_command(kind: setup.Kind | None, no_wait: bool, **options: Any) -> int:
    """Install the service with these options of `mlxpool up`, and start it; again: replace it."""
    settings, spec = _spec(options)
    service = setup.manager(kind, os.environ)
    before = service.status()
    _refuse_second_server(settings, before)
    try:
        setup.install(service, spec)
    except ServiceError as problem:
        raise Failure(str(problem)) from None
    click.echo(f"installed {service.file}")
    if not no_wait:
        url = _wait_until_up(settings, service, spec, before.pid)
        click.echo(f"mlxpool serves on {url}; what it prints is in {spec.log}")
    _tell_about_linger(service)
    return 0


@service_command.command("uninstall")
@manager_options
def uninstall_command(kind: setup.Kind | None) -> int:
    """Stop the service once its requests have ended, and remove it. Models and settings stay."""
    service = setup.manager(kind, os.environ)
    try:
        was_there = setup.uninstall(service)
    except ServiceError as problem:
        raise Failure(str(problem)) from None
    click.echo(f"removed {service.file}" if was_there else f"no service is installed ({service.file})")
    return 0


@service_command.command("restart")
@manager_options
@click.option("--no-wait", is_flag=True, help="Return at once; the server goes on starting.")
def restart_command(kind: setup.Kind | None, no_wait: bool) -> int:
    """Stop the service once its requests have ended, and start it again."""
    service = setup.manager(kind, os.environ)
    found = _installed(service)
    before = service.status()
    try:
        # A server that would refuse its settings is better left running.
        settings = read_settings(found.config, {"home": found.home})
        service.restart(found.stop_timeout_s)
        if not no_wait:
            click.echo(f"mlxpool serves on {_wait_until_up(settings, service, found, before.pid)}")
    except ServiceError as problem:
        raise Failure(str(problem)) from None
    return 0


@service_command.command("status")
@manager_options
@json_option
def status_command(kind: setup.Kind | None, as_json: bool) -> int:
    """Say whether the service is installed and runs. Exit code 1 when it does not run."""
    service = setup.manager(kind, os.environ)
    status = service.status()
    try:
        found = setup.installed(service)
        log, home = (found.log, found.home) if found is not None else (None, None)
    except ServiceError as problem:
        raise Failure(str(problem)) from None
    if as_json:
        print_json(
            {
                "manager": service.name,
                "state": status.state,
                "pid": status.pid,
                "exit_code": status.exit_code,
                "detail": status.detail,
                "file": service.file,
                "home": home,
                "log": log,
            }
        )
    elif found is None:
        click.echo(f"no service is installed ({service.file})")
    else:
        click.echo(f"service  {told(status)}")
        click.echo(f"manager  {service.name}, {service.file}")
        click.echo(f"home     {home}")
        click.echo(f"log      {log}")
        if status.state != "running" and log is not None:
            for line in setup.log_tail(log, _TOLD_LINES):
                click.echo(f"         {line}")
    return 0 if status.state == "running" else 1


@service_command.command("print")
@settings_options
@serve_options
@manager_options
def print_command(kind: setup.Kind | None, **options: Any) -> int:
    """Print the service file that `install` would write, and write nothing."""
    _, spec = _spec(options)
    try:
        content = setup.manager(kind, os.environ).render(spec)
    except ServiceError as problem:
        raise ServiceFailure(str(problem)) from None
    click.echo(content, nl=False)
    return 0


def told(status: Status) -> str:
    """The status for a person."""
    parts: list[str] = [status.state]
    if status.pid is not None:
        parts.append(f"pid {status.pid}")
    if status.exit_code is not None and status.state != "running":
        parts.append(f"exit code {status.exit_code}")
    return ", ".join([*parts, *filter(None, [status.detail])])


def _spec(options: dict[str, Any]) -> tuple[Settings, Spec]:
    """The settings and the service that options of `up` make; bad ones are refused here, not at login."""
    settings = read_settings(options["config_file"], serve_flags(**options))
    if settings.server.port == 0:
        raise ServiceFailure("port 0 would give the service another port at each start; name one with --port")
    try:
        spec = make_spec(
            program(sys.executable, setup.find_script()),
            _options_of_up(settings, options),
            home=settings.home,
            environment=os.environ,
            drain_timeout_s=settings.pool.drain_timeout,
        )
    except ServiceError as problem:
        raise ServiceFailure(str(problem)) from None
    return settings, spec


def _options_of_up(settings: Settings, options: dict[str, Any]) -> Iterator[str]:
    """The command line again, with every path absolute."""
    if options["config_file"] is not None:
        yield from ("--config", str(options["config_file"].expanduser().absolute()))
    for name in ("host", "port", "memory_budget", "model"):
        if options[name] is not None:
            yield from (f"--{name.replace('_', '-')}", options[name])
    for folder in settings.model_dirs:
        yield from ("--models", str(folder))


def _installed(service: Manager) -> Installed:
    try:
        found = setup.installed(service)
    except ServiceError as problem:
        raise Failure(str(problem)) from None
    if found is None:
        raise Failure(f"no service is installed ({service.file}); `mlxpool service install` installs one")
    return found


def _refuse_second_server(settings: Settings, status: Status) -> None:
    """A server in the foreground holds the home: the service would fail at each start."""
    address = read_address(settings.home)
    if address is None or not client.is_running(address) or address.pid == status.pid:
        return
    raise Failure(
        f"a server that is not the service runs for {settings.home} (pid {address.pid}); "
        "`mlxpool down` stops it"
    )


def _wait_until_up(settings: Settings, service: Manager, about: Spec | Installed, old_pid: int | None) -> str:
    """Where the new server serves. Raises Failure with its last words where it does not."""
    deadline = time.monotonic() + _UP_TIMEOUT_S
    while time.monotonic() < deadline:
        server = client.find(settings)
        if server is not None and server.address.pid != old_pid:
            return server.url
        status = service.status()
        if status.state == "failed":
            last = setup.log_tail(about.log, 1)
            said = f": {last[0]}" if last else ""
            raise Failure(f"the service is installed and fails ({told(status)}){said}")
        time.sleep(_POLL_S)
    raise Failure(
        f"the service is installed and does not answer after {_UP_TIMEOUT_S:.0f} s; "
        f"`mlxpool service status` and {about.log} say more"
    )


def _tell_about_linger(service: Manager) -> None:
    """A user's systemd ends with the last session, unless it is told to linger."""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid())
    if service.name == "systemd" and not Path("/var/lib/systemd/linger", user).exists():
        click.echo("It runs while you are logged in; `loginctl enable-linger` keeps it running after that.")
