"""`mlxpool run`: one question, or a conversation, through the running server's own API."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from pathlib import Path

import click
import msgspec

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import Failure, Number, read_settings, settings_options
from mlxpool.parent.cli.completion import complete_model


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class _Message(msgspec.Struct):
    role: str
    content: str


class _Request(msgspec.Struct, omit_defaults=True):
    model: str
    messages: list[_Message]
    stream: bool
    temperature: float | None = None
    max_tokens: int | None = None


@click.command("run")
@click.argument("model", shell_complete=complete_model)
@click.argument("prompt", required=False)
@click.option("--temperature", type=Number(0, 2), help="0 always takes the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of one answer.")
@click.option("--system", help="A system message to begin with.")
@settings_options
def run_command(
    model: str,
    prompt: str | None,
    temperature: float | None,
    max_tokens: int | None,
    system: str | None,
    config_file: Path | None,
    home: Path | None,
) -> int:
    """Ask MODEL one question, or talk with it.

    Without PROMPT the question is read from standard input; on a terminal that is a conversation, ended
    with Ctrl-D. Ctrl-C cuts an answer short. What a model reasons goes to standard error.
    """
    server = client.need(read_settings(config_file, {"home": home}))
    messages = [] if system is None else [_Message("system", system)]
    request = _Request(model, messages, True, temperature, max_tokens)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return _converse(server, request)
    question = _read_question() if prompt is None else prompt
    if not question.strip():
        raise click.UsageError("nothing to ask: give a PROMPT, or text on standard input")
    messages.append(_Message("user", question))
    _print_answer(server, request, [])
    return 0


def _read_question() -> str:
    """All of standard input. Raises Failure where it is no text."""
    if sys.stdin is None:
        return ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as problem:
        byte = problem.object[problem.start]
        raise Failure(f"standard input is not valid {problem.encoding} text: byte {byte:#04x}") from None
    except OSError as problem:
        raise Failure(f"standard input can't be read: {problem.strerror or problem}") from None


def _converse(server: client.Client, request: _Request) -> int:
    """Turns until end of input; each answer becomes part of the next question's conversation."""
    import readline  # noqa: F401  # gives input() a history and editing

    while True:
        try:
            question = input("> ")
            question.encode()
        except EOFError:
            click.echo()
            return 0
        except KeyboardInterrupt:
            click.echo()
            continue
        except UnicodeError:
            click.echo("mlxpool: not asked: what was typed is not valid UTF-8", err=True)
            continue
        if not question.strip():
            continue
        request.messages.append(_Message("user", question))
        said: list[str] = []
        try:
            _print_answer(server, request, said)
        except KeyboardInterrupt:
            pass  # what was said by then is the answer
        except Failure as problem:
            # The question is taken back: the conversation stays one the template accepts.
            request.messages.pop()
            click.echo(f"mlxpool: {problem.format_message()}", err=True)
            continue
        request.messages.append(_Message("assistant", "".join(said)))


def _print_answer(server: client.Client, request: _Request, said: list[str]) -> None:
    """Stream one answer to the terminal; what has been shown is in `said`, however it ends."""
    pieces = _pieces(server, request)
    thinking = False
    try:
        for reasoned, piece in pieces:
            if thinking and not reasoned:
                click.echo("\n", err=True)
            thinking = reasoned
            if reasoned:
                click.secho(piece, nl=False, err=True, dim=True)
                continue
            said.append(piece)
            click.echo(piece, nl=False)
            sys.stdout.flush()
    finally:
        # Closing the generator closes the connection: the server stops generating at once.
        pieces.close()
        if said:
            click.echo()
        elif thinking:
            click.echo(err=True)


def _pieces(server: client.Client, request: _Request) -> Generator[tuple[bool, str], None, None]:
    """Each piece of text, and whether it is reasoning."""
    for data in server.stream("/v1/chat/completions", request):
        failure = client.error_message(data)
        if failure is not None:
            raise Failure(failure)
        for choice in msgspec.json.decode(data, type=_Chunk).choices:
            if choice.delta.reasoning:
                yield True, choice.delta.reasoning
            if choice.delta.content:
                yield False, choice.delta.content
