"""Writes the reference pages that are made from the code: docs/configuration.md and docs/cli.md.

`make docs` runs it; a test compares its output with the files, so a page can't fall behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from mlxpool.parent.cli import COMMANDS, cli
from mlxpool.shared.config import SECTIONS, ModelSettings, keys_of, seconds_text

DOCS = Path(__file__).parent
_MADE = "<!-- made by `make docs`; change the code it is made from -->"

_CONFIGURATION_HEAD = """# Configuration

{made}

Settings come from four places, later ones win: the defaults below, a TOML file, environment variables,
flags of `mlxpool up`. `mlxpool config` shows what is in effect and where each value comes from;
`mlxpool config --schema` prints the file's JSON schema.

- The file is `config.toml` in the home folder (`MLXPOOL_HOME`, else `~/.mlxpool`), or what `--config` names.
- A variable is named `MLXPOOL_<SECTION>_<KEY>`, like `MLXPOOL_POOL_IDLE_TTL=5m`; lists are separated by
  commas. `[aliases]` and `[models]` have none.
- A size is bytes or has a unit (`48GB`, `32GiB`). A duration is seconds or has a unit (`500ms`, `90s`,
  `15m`, `1h`, `1d`).
- An unknown section, key or variable is an error, as is one that belongs to a later version. The exit code
  is then 2, with one line that names the key, its value and what is allowed.

```toml
[server]
port = 8420

[pool]
memory_budget = "48GB"
idle_ttl = "15m"

[aliases]
"gpt-*" = "smollm2-135m"       # * stands for any text; the longest matching pattern wins

[defaults]
model = "smollm2-135m"         # serves requests without a model

[models."smollm2-135m"]
pin = true
context = 4096
```
"""

_ALIASES = """## [aliases]

Each key is a name or a pattern with `*`, each value the name of a model. A request's `model` is looked up
as a model's exact name, then as an exact alias, then as the pattern with the most literal characters.
Anything else is a 404 that names what is near. An alias never leads to another alias.
"""

_CLI_HEAD = """# Command line

{made}

Every command finds its server by the home folder: `--home`, else `MLXPOOL_HOME`, else `~/.mlxpool`.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | the command could not do it; one line on stderr says why |
| 2 | bad usage or bad settings; one line on stderr names what and what would work |
| 130 | interrupted |
"""


def configuration() -> str:
    """docs/configuration.md."""
    parts = [_CONFIGURATION_HEAD.format(made=_MADE)]
    for name, section in SECTIONS.items():
        parts.append(f"## [{name}]\n\n{_table(section, f'MLXPOOL_{name.upper()}_')}")
    parts.insert(-1, _ALIASES)
    parts.append(f'## [models."name"]\n\n{_table(ModelSettings, None)}')
    return "\n".join(parts)


def _table(section: type[msgspec.Struct], prefix: str | None) -> str:
    """One row per key: what is allowed, the default, and why the default is what it is."""
    lines = ["| key | default | allowed | why |", "| --- | --- | --- | --- |"]
    empty = section()
    for name, key in keys_of(section).items():
        default = getattr(empty, name)
        variable = f"<br>`{prefix}{name.upper()}`" if prefix else ""
        lines.append(f"| `{name}`{variable} | {_default(default)} | {key.kind.allowed} | {key.why} |")
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if value == ():
        return "`[]`"
    if isinstance(value, float):
        return f'`"{seconds_text(value)}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def command_line() -> str:
    """docs/cli.md."""
    parts = [_CLI_HEAD.format(made=_MADE)]
    context = click.Context(cli, info_name="mlxpool")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts.append("\n".join(_command(context, name, command)))
        if isinstance(command, click.Group):
            own = click.Context(command, info_name=name, parent=context)
            parts += ["\n".join(_command(own, *member)) for member in command.commands.items()]
    return "\n".join(parts)


def _command(context: click.Context, name: str, command: click.Command) -> Iterator[str]:
    own = click.Context(command, info_name=name, parent=context)
    usage = " ".join(command.collect_usage_pieces(own))
    yield f"## {own.command_path}\n\n`{own.command_path} {usage}`\n"
    yield " ".join((command.help or "").split()) + "\n"
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        yield "| option | what |\n| --- | --- |"
    for option in options:
        names = ", ".join(f"`{flag}`" for flag in option.opts)
        shown = f" (default {option.default})" if option.show_default else ""
        yield f"| {names} | {option.help}{shown} |"
    yield ""


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration(), encoding="utf-8")
    (DOCS / "cli.md").write_text(command_line(), encoding="utf-8")
