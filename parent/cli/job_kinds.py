"""One command for each kind of job, made from the struct of its configuration: `mlxpool quantize MODEL …`.

A field is a flag of its name, or an argument where the kind says so; what its values may be and what it means
come from the same schema as the page's form. What is not given is left out, so the server's defaults hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlxpool.parent.cli import client
from mlxpool.parent.cli import follow as following
from mlxpool.parent.cli.common import Number, json_option, print_json, read_settings, settings_options
from mlxpool.parent.cli.completion import complete_model
from mlxpool.parent.jobs.kinds import KINDS
from mlxpool.parent.jobs.kinds.kind import Kind
from mlxpool.parent.jobs.shape import shape_of
from mlxpool.parent.jobs.store import Job

_SUFFIX = "_command"
# Before a field's name among a command's parameters: none is taken for `--config` or `--json`.
_PREFIX = "field_"


def __getattr__(name: str) -> click.Command:
    """`<kind>_command`, for the table of commands."""
    for kind in KINDS:
        if name == f"{kind.name}{_SUFFIX}":
            return make_command(kind)
    raise AttributeError(name)


def make_command(kind: Kind) -> click.Command:
    """The command of a kind."""
    shape = shape_of(kind.config)
    fields: dict[str, dict[str, Any]] = shape["properties"]

    @settings_options
    @click.option("--detach", is_flag=True, help="Print the job's id and leave it running.")
    @json_option
    def command(
        config_file: Path | None, home: Path | None, detach: bool, as_json: bool, **given: Any
    ) -> int:
        config = {
            name: _sent(value, fields[name])
            for name, value in ((key.removeprefix(_PREFIX), value) for key, value in given.items())
            if value is not None and value != ()
        }
        server = client.need(read_settings(config_file, {"home": home}))
        if detach:
            job = server.post("/api/jobs", {"kind": kind.name, "config": config}, Job)
        else:
            with following.progress(quiet=as_json) as report:
                job = following.run(server, kind.name, config, report)
            result = following.result_of(job)
        if as_json:
            print_json(job)
        elif detach:
            click.echo(job.id)
        else:
            for name, value in result.items():
                if value is not None:
                    click.echo(f"{name}: {value}")
        return 0

    made = click.command(kind.name, help=f"{kind.summary} {_NOTE}")(command)
    order = [*kind.positional, *(name for name in fields if name not in kind.positional)]
    made.params = [
        _argument(name, fields[name], name in shape["required"])
        if name in kind.positional
        else _option(name, fields[name], name in shape["required"])
        for name in order
    ] + made.params
    return made


_NOTE = "A job of the running server: Ctrl-C ends it, and `mlxpool jobs` shows it."


def _argument(name: str, values: dict[str, Any], required: bool) -> click.Argument:
    return click.Argument(
        [f"{_PREFIX}{name}"],
        metavar=name.upper() if required else f"[{name.upper()}]",
        type=_type(values),
        required=required,
        shell_complete=_completion(values),
    )


def _option(name: str, values: dict[str, Any], required: bool) -> click.Option:
    flag = f"--{name.replace('_', '-')}"
    default = values.get("default")
    told = f" (default {_told(default)})" if default not in (None, [], "") else ""
    is_switch = values.get("type") == "boolean"
    is_list = values.get("type") == "array"
    return click.Option(
        [f"{_PREFIX}{name}", f"{flag}/--no-{flag[2:]}" if is_switch else flag],
        help=f"{values.get('description', '')}{told}" + (" May be given more than once." if is_list else ""),
        type=None if is_switch else _type(values["items"] if is_list else values),
        multiple=is_list,
        default=None,
        required=required,
        shell_complete=_completion(values),
    )


def _told(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _type(values: dict[str, Any]) -> click.ParamType[Any]:
    if "enum" in values:
        return click.Choice([str(value) for value in values["enum"]])
    if values.get("type") == "integer":
        return click.IntRange(values.get("minimum"), values.get("maximum"))
    if values.get("type") == "number":
        low, high = (values.get(f"exclusive{end}", values.get(end.lower())) for end in ("Minimum", "Maximum"))
        is_open = [f"exclusive{end}" in values for end in ("Minimum", "Maximum")]
        return Number(low, high, min_open=is_open[0], max_open=is_open[1])
    return click.STRING


def _completion(values: dict[str, Any]) -> Callable[..., Any] | None:
    return complete_model if values.get("x-source") == "model" else None


def _sent(value: Any, values: dict[str, Any]) -> Any:
    """A flag's value as the server is to read it."""
    if isinstance(value, tuple):
        return [_sent(one, values["items"]) for one in value]
    if "enum" in values:
        return next(choice for choice in values["enum"] if str(choice) == value)
    source = values.get("x-source")
    # The server has another working folder. What is a file here is not the name of a dataset.
    if source == "file" or (source == "dataset" and (os.sep in value or os.path.isfile(value))):
        return os.path.abspath(value)
    return value
