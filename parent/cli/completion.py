"""`mlxpool completion`: the shell's script, and the names it completes to.

The script is click's own; it asks `mlxpool` itself at each press of the key. So an answer must be quick:
commands come from the table without importing one, models from the folders without reading a file in them.
"""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MLXPOOL_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> int:
    """Print what makes SHELL complete commands, options and the names of models.

    bash: mlxpool completion bash > ~/.local/share/bash-completion/completions/mlxpool;
    zsh: mlxpool completion zsh > FOLDER_OF_FPATH/_mlxpool;
    fish: mlxpool completion fish > ~/.config/fish/completions/mlxpool.fish.
    """
    from mlxpool.parent.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None  # click knows its own three
    click.echo(kind(cli, {}, "mlxpool", VARIABLE).source())
    return 0


def complete_model(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of this machine's models and aliases; none where the settings can't be read."""
    from mlxpool.parent.library import Library
    from mlxpool.shared.config import ConfigError, load

    try:
        settings = load(ctx.params.get("config_file"), None, {"home": ctx.params.get("home")})
    except ConfigError:
        return []
    names = [*Library(settings).names(), *(alias for alias in settings.aliases if "*" not in alias)]
    return [CompletionItem(name) for name in sorted(set(names)) if name.startswith(incomplete)]
