"""The `mlxpool` command.

Commands are looked up by name and imported when called: `mlxpool up` must serve within 400 ms of its
exec, and most of what the other commands need (rich, HTTP, psutil) would be paid by it. So this module
imports click and nothing else, and knows each command by its module and one line of help.

Exit codes: 0 done; 1 the command could not do it; 2 bad usage or bad settings, one line on stderr;
130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name → (module under mlxpool.parent.cli, help). The order is the order of `mlxpool --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("up", "Serve the models of this machine, in the foreground."),
    "down": ("server", "Stop the running server once its requests have ended."),
    "status": ("server", "Say whether the server runs, where, and with how much memory."),
    "ps": ("server", "List the workers of the running server."),
    "models": ("models", "List the models of this machine and whether they fit."),
    "pull": ("pull", "Fetch a model of the Hub; `mlxpool pull starter` fetches a small one."),
    "rm": ("rm", "Remove a model from the disk."),
    "load": ("models", "Load a model now."),
    "unload": ("models", "Unload a model once its requests have ended, or at once with --force."),
    "pin": ("models", "Keep a model loaded: never evicted, never idled out."),
    "unpin": ("models", "Let a pinned model be evicted again."),
    "run": ("run", "Ask a model one question, or talk with it."),
    "logs": ("logs", "Show what a model's workers have written."),
    "jobs": ("jobs", "Show, end or follow long work: list, show, cancel, logs."),
    "import": ("job_kinds", "Make a GGUF file a model."),
    "quantize": ("job_kinds", "Make a copy of a model with fewer bits per weight."),
    "finetune": ("job_kinds", "Train an adapter (LoRA) for a model on lines of text."),
    "fuse": ("job_kinds", "Make a model of a model and an adapter."),
    "evaluate": (
        "job_kinds",
        "Measure how well a model predicts a text: its loss and perplexity.",
    ),
    "dataset": ("job_kinds", "Let a model write training lines about a text."),
    "colibri": (
        "colibri",
        "Models whose experts are read from disk as they are needed: plan, convert, tune, bench.",
    ),
    "cache": ("cache", "Show, check or delete what is kept of prompts: status, verify, prune."),
    "service": ("service", "Run the server as a service: install, uninstall, status, restart, print."),
    "doctor": ("doctor", "Look at this machine, and say what to do about what it lacks."),
    "config": ("config", "Show the settings in effect and where each comes from."),
    "completion": ("completion", "Print what makes a shell complete commands and models."),
}

# Commands of the design that come later: told apart from typing errors.
LATER_COMMANDS = frozenset({"bench"})

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# What a write to a full or failing disk ends with.
_WRITE_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Commands(click.Group):
    """The group of COMMANDS; imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"mlxpool.parent.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Resilient: a shell asks what could come next, and an error is no answer.
        if not ctx.resilient_parsing and not name.startswith("-") and name not in COMMANDS:
            if name in LATER_COMMANDS:
                raise click.UsageError(f"`mlxpool {name}` is not in this version yet")
            from mlxpool.shared.config_values import known

            raise click.UsageError(f"no command {name!r}; {known(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # From the table, as --help: a key was pressed, and importing every command takes too long.
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        # From the table: --help imports no command.
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlxpool", message="mlxpool %(version)s")
def cli() -> None:
    """Many local language models behind one stable port.

    Exit codes: 0 done, 1 failed, 2 bad usage or settings, 130 interrupted.
    """


def main() -> None:
    """Entry point: runs the command and exits with its code; errors are one line on stderr."""
    sys.exit(_guarded())


def _guarded() -> int:
    """The exit code of the command, with whatever ended it said in one line."""
    if sys.stdout is None:
        # The first file that a command opens would become its standard output.
        return _say("standard output is closed; send it to a file, or to /dev/null", EXIT_FAILURE)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal of few characters shows the others as escapes rather than none of the text.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run()
        sys.stdout.flush()
    except OSError as problem:
        if problem.filename is not None or not _is_stdout_broken(problem.errno):
            raise
        # The reader of our output left, as `mlxpool ps | head` does: no news to whoever made it leave.
        if isinstance(problem, BrokenPipeError):
            return EXIT_FAILURE
        return _say(f"standard output can't be written: {problem.strerror or problem}", EXIT_FAILURE)
    return code


def _run() -> int:
    try:
        _check_arguments()
        code = cli.main(prog_name="mlxpool", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as problem:
        return _say(problem.format_message(), EXIT_USAGE, prefix="")
    except click.ClickException as problem:
        return _say(problem.format_message(), problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", EXIT_INTERRUPTED)
    return code if isinstance(code, int) else 0


def _check_arguments() -> None:
    """Raises UsageError on bytes that are no text: no name, question or path could be handed on."""
    if all(word.isascii() for word in sys.argv):
        return
    from mlxpool.shared.text import cut, is_unicode

    for word in sys.argv[1:]:
        if not is_unicode(word):
            raise click.UsageError(f"{cut(ascii(word))} is not valid UTF-8; arguments are text")


def _say(message: str, code: int, prefix: str = "mlxpool: ") -> int:
    """The line on stderr, where there is somebody to read it; without a prefix the text. Returns the code."""
    if prefix and not (message.isascii() and message.isprintable()):
        from mlxpool.shared.text import one_line

        message = one_line(message)
    with contextlib.suppress(OSError):
        click.echo(f"{prefix}{message}", err=True)
    return code


def _is_stdout_broken(fault: int | None) -> bool:
    """Whether what was not written still can't be; then the interpreter's last flush must not try again."""
    try:
        sys.stdout.flush()
        # Unbuffered, nothing is left to try with: a failed write without a file's name was this one's.
        if not getattr(sys.stdout, "write_through", False):
            if fault not in _WRITE_FAULTS:
                return False
            # What is longer than the buffer went with the fault: only another try tells whose it was.
            sys.stdout.write("\n")
            sys.stdout.flush()
            return False
    except OSError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
