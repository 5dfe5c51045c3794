"""`mlxpool config`: the settings in effect, and which layer each comes from."""

from __future__ import annotations

import math
from pathlib import Path

import click
import msgspec

from mlxpool.parent.cli.common import json_option, print_json, print_table, read_settings, settings_options
from mlxpool.shared.config import SECTIONS, ModelSettings, Settings, json_schema, keys_of, seconds_text
from mlxpool.shared.config_file import CONFIG_FILE
from mlxpool.shared.config_values import AUTO_SIZE, SIZE
from mlxpool.shared.units import size_text

_SIZES = frozenset(
    f"{section}.{name}"
    for section, struct in SECTIONS.items()
    for name, key in keys_of(struct).items()
    if key.kind in (SIZE, AUTO_SIZE)
)


@click.command("config")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the config file.")
@click.option("--path", "only_path", is_flag=True, help="Print where the config file is, or would be.")
@settings_options
@json_option
def config_command(
    schema: bool, only_path: bool, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Show the settings in effect and where each comes from. Keys are not shown."""
    if schema:
        print_json(json_schema())
        return 0
    settings = read_settings(config_file, {"home": home})
    if only_path:
        click.echo(settings.config_path or settings.home / CONFIG_FILE)
        return 0
    rows = _rows(settings)
    if as_json:
        print_json([{"key": key, "value": value, "from": origin} for key, value, origin in rows])
        return 0
    print_table(["KEY", "VALUE", "FROM"], [[key, _text(key, value), origin] for key, value, origin in rows])
    return 0


def _rows(settings: Settings) -> list[tuple[str, object, str]]:
    """(key, value, origin) of every setting; secrets are counted, not shown."""
    rows: list[tuple[str, object, str]] = [("home", str(settings.home), "")]
    for section in SECTIONS:
        for key, value in msgspec.structs.asdict(getattr(settings, section)).items():
            rows.append((f"{section}.{key}", value, settings.origins.get(f"{section}.{key}", "default")))
    source = str(settings.config_path)
    rows += [(f'aliases."{name}"', target, source) for name, target in settings.aliases.items()]
    unset = ModelSettings()
    for name, model in settings.models.items():
        for key, value in msgspec.structs.asdict(model).items():
            if value != getattr(unset, key):
                rows.append((f'models."{name}".{key}', value, source))
    return [(key, _shown(key, value), origin) for key, value, origin in rows]


def _shown(key: str, value: object) -> object:
    if key == "server.api_keys" and isinstance(value, tuple):
        return f"{len(value)}, not shown" if value else value
    if key.endswith(("_timeout", ".idle_ttl", ".idle_demote")) and isinstance(value, float):
        return "never" if math.isinf(value) else seconds_text(value)
    return value


def _text(key: str, value: object) -> str:
    if key in _SIZES and isinstance(value, int):
        return size_text(value)
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
