"""`mlxpool cache`: what is kept of prompts that were read: shown, checked, taken off the disk.

All of it works on the folder itself, also while a server runs: a record that is gone is a prompt to be read
anew, for a worker as for us.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
from click.shell_completion import CompletionItem

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import (
    Failure,
    json_option,
    print_json,
    print_table,
    read_settings,
    settings_options,
)
from mlxpool.shared.config import Settings
from mlxpool.shared.control import PromptCacheStats
from mlxpool.shared.kv import folder
from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.units import format_count, format_duration, format_size, parse_size

_UNNAMED = "(unnamed)"


class _Ram(msgspec.Struct):
    bytes: int
    max_bytes: int


class _Ssd(msgspec.Struct):
    off: str | None


class _Model(msgspec.Struct):
    model: str
    state: str
    prompt_cache: PromptCacheStats


class _Served(msgspec.Struct):
    """What only a running server knows, of /api/cache."""

    ram: _Ram
    ssd: _Ssd
    models: list[_Model]


class Bad(msgspec.Struct, frozen=True):
    """A record that is not what its name says. model: "" where its folder does not say."""

    path: str
    model: str
    fault: str
    deleted: bool


class Unread(msgspec.Struct, frozen=True):
    """A record that may be whole, but could not be read now. fault: of this process or of the moment."""

    path: str
    fault: str


class Checked(msgspec.Struct, frozen=True):
    """What `verify` found. entries, bytes: of the files that were read, good or bad."""

    entries: int
    bytes: int
    bad: list[Bad]
    unread: list[Unread]


@click.group("cache")
def cache_command() -> None:
    """Show, check or delete what is kept of prompts: `status`, `verify`, `prune`."""


@cache_command.command("status")
@settings_options
@json_option
def status_command(config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Show what is kept of prompts: on disk, and in the memory of a running server."""
    settings = read_settings(config_file, {"home": home})
    server = client.find(settings)
    served = None if server is None else server.get("/api/cache", _Served)
    uses = _scan(settings)
    on_disk = sum(use.bytes for use in uses)
    if as_json:
        cache = settings.cache
        ssd = {"enabled": cache.is_on_disk, "dir": settings.kv_folder, "bytes": on_disk}
        ssd |= {"max_bytes": cache.ssd_budget, "entries": sum(use.entries for use in uses)}
        print_json(
            {
                "running": served is not None,
                "ram": None if served is None else served.ram,
                "ssd": {**ssd, "off": None if served is None else served.ssd.off},
                "models": [] if served is None else served.models,
                "folders": [_entry(use) for use in uses],
            }
        )
        return 0
    if served is not None:
        click.echo(f"memory  {format_size(served.ram.bytes)} of {format_size(served.ram.max_bytes)}")
        for model in served.models:
            told = model.prompt_cache
            click.echo(
                f"        {model.model}: {format_size(told.bytes)}, {format_count(told.hits, 'hit')},"
                f" {format_count(told.misses, 'miss')}, {format_count(told.cached_tokens, 'token')} reused"
            )
        if served.ssd.off is not None:
            click.echo(f"nothing is written now: {served.ssd.off}")
    if not settings.cache.is_on_disk:
        click.echo("disk    off ([cache] ssd)" + (f"; {format_size(on_disk)} are left there" if uses else ""))
    else:
        limit = format_size(settings.cache.ssd_budget)
        click.echo(f"disk    {format_size(on_disk)} of {limit} in {settings.kv_folder}")
    if uses:
        now = time.time()
        print_table(["MODEL", "RECORDS", "BYTES", "USED", "FINGERPRINT"], [_row(use, now) for use in uses])
    return 0


def _entry(use: folder.FolderUse) -> dict[str, object]:
    """As /api/cache has it."""
    entry = msgspec.structs.asdict(use)
    entry["last_used"] = entry.pop("last_used_s")
    return entry


def _row(use: folder.FolderUse, now: float) -> list[str]:
    used = "-" if use.last_used_s is None else f"{format_duration(max(0.0, now - use.last_used_s))} ago"
    return [use.model or _UNNAMED, str(use.entries), format_size(use.bytes), used, use.fingerprint[:12]]


@cache_command.command("verify")
@click.option("--keep", is_flag=True, help="Leave bad records where they are.")
@settings_options
@json_option
def verify_command(config_file: Path | None, home: Path | None, keep: bool, as_json: bool) -> int:
    """Read every record on disk and compare its hashes. Exit code 1 when some are bad; those are deleted.

    A bad one would not have been used: what is read back is checked then too. One that can't be read just
    now, for want of memory say, stays, and the exit code is 1 too.
    """
    settings = read_settings(config_file, {"home": home})
    total = sum(use.entries for use in _scan(settings))
    with _progress(total, quiet=as_json) as advance:
        checked = _verify(settings, keep=keep, advance=advance)
    code = int(bool(checked.bad or checked.unread))
    if as_json:
        print_json(checked)
        return code
    for bad in checked.bad:
        what = "deleted" if bad.deleted else "kept"
        click.echo(f"{bad.path}: {bad.fault} ({what})")
    for unread in checked.unread:
        click.echo(f"{unread.path}: {unread.fault} (not read)")
    found = f"{len(checked.bad)} bad" if checked.bad else "all good"
    if checked.unread:
        found += f", {len(checked.unread)} more not read"
    click.echo(f"{format_count(checked.entries, 'record')}, {format_size(checked.bytes)}: {found}")
    return code


def _verify(settings: Settings, *, keep: bool, advance: Callable[[], None]) -> Checked:
    """Raises Failure where the folder can't be read."""
    from mlxpool.shared.kv.record_file import RecordError, verdict_on, verify

    root = settings.kv_folder
    names = {use.fingerprint: use.model for use in _scan(settings)}
    budget = Budget(root, settings.cache.ssd_budget)
    entries = size_bytes = 0
    bad: list[Bad] = []
    unread: list[Unread] = []
    with _readable(root):
        for fingerprint, path in folder.paths(root):
            advance()
            try:
                size = path.stat().st_size
                verify(path, fingerprint)
            except FileNotFoundError:
                continue  # a server has evicted it in the meantime
            except (RecordError, OSError, MemoryError) as problem:
                fault = _fault(problem)
                if verdict_on(problem) == "forget":
                    unread.append(Unread(str(path), fault))
                    continue
                deleted = not keep and budget.remove(path)
                bad.append(Bad(str(path), names.get(fingerprint, ""), fault, deleted))
            entries, size_bytes = entries + 1, size_bytes + size
    return Checked(entries, size_bytes, bad, unread)


def _fault(problem: Exception) -> str:
    if isinstance(problem, MemoryError):
        return "not enough memory"
    # The path is said beside it.
    return str(problem.strerror if isinstance(problem, OSError) and problem.strerror else problem)


def _complete_cached(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Models that have something on disk."""
    from mlxpool.shared.config import ConfigError, load

    try:
        settings = load(ctx.params.get("config_file"), None, {"home": ctx.params.get("home")})
        names = {use.model for use in folder.scan(settings.kv_folder)}
    except (ConfigError, OSError):
        return []
    return [CompletionItem(name) for name in sorted(names) if name and name.startswith(incomplete)]


@cache_command.command("prune")
@click.option("--all", "everything", is_flag=True, help="Everything, of every model.")
@click.option("--model", metavar="NAME", shell_complete=_complete_cached, help="What this model has.")
@click.option("--to", "to_size", metavar="SIZE", help="Until so much is left, the least recently used first.")
@click.option("--models", "model_folders", multiple=True, metavar="DIR", help="As for `mlxpool up`.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings_options
@json_option
def prune_command(
    everything: bool,
    model: str | None,
    to_size: str | None,
    model_folders: tuple[str, ...],
    yes: bool,
    config_file: Path | None,
    home: Path | None,
    as_json: bool,
) -> int:
    """Delete what is kept of prompts on disk. Without an option: of models that are no longer here; it asks.

    A prompt that is asked again is then read from its start, and kept again.
    """
    if everything and (model is not None or to_size is not None):
        raise click.UsageError("--all leaves nothing for --model and --to; use one of them")
    to_bytes = _size(to_size)
    settings = read_settings(config_file, {"home": home, "models": model_folders or None})
    if everything or model is not None or to_size is not None:
        known = {use.model for use in _scan(settings)}
        if model is not None and model not in known:
            raise Failure(f"nothing is kept of {model!r}; {_some(known)}")
        pruned = _prune(settings, None if everything else model, to_bytes)
    else:
        done = _prune_garbage(settings, yes=yes)
        if done is None:
            return 1
        pruned = done
    if as_json:
        print_json(pruned)
    else:
        gone, left = format_count(pruned.entries, "record"), format_count(pruned.left_entries, "record")
        of_whom = "" if model is None else f" of {model}"
        left_size = format_size(pruned.left_bytes)
        click.echo(f"deleted {gone}, {format_size(pruned.bytes)}; {left}, {left_size} left{of_whom}")
    return 0


def _prune_garbage(settings: Settings, *, yes: bool) -> folder.Pruned | None:
    """Of models that neither this machine nor its running server has; None where the user wants it kept."""
    here = _names_here(settings)
    uses = _scan(settings)
    garbage = [use for use in uses if use.model not in here]
    if garbage and not yes:
        for use in garbage:
            click.echo(f"{use.model or _UNNAMED}: {format_size(use.bytes)}", err=True)
        if not sys.stdin.isatty():
            raise Failure("nobody is here to be asked; --yes deletes without a question")
        if not click.confirm("These models are not here any more. Delete what is kept of them?", err=True):
            click.echo("it stays")
            return None
    gone = [_prune(settings, name, None) for name in sorted({use.model for use in garbage})]
    left = [use for use in uses if use not in garbage]
    return folder.Pruned(
        sum(pruned.entries for pruned in gone),
        sum(pruned.bytes for pruned in gone),
        sum(use.entries for use in left),
        sum(use.bytes for use in left),
    )


def _names_here(settings: Settings) -> set[str]:
    from mlxpool.parent.cli.models import Served
    from mlxpool.parent.library import Library

    names = set(Library(settings).names())
    server = client.find(settings)
    if server is not None:
        # Its --models folders are known to nobody else.
        names |= {model.name for model in server.get("/api/library", Served).models}
    return names


def _prune(settings: Settings, model: str | None, to_bytes: int | None) -> folder.Pruned:
    with _readable(settings.kv_folder):
        return folder.prune(settings.kv_folder, to_bytes=to_bytes, model=model)


def _scan(settings: Settings) -> list[folder.FolderUse]:
    with _readable(settings.kv_folder):
        return folder.scan(settings.kv_folder)


@contextlib.contextmanager
def _readable(root: Path) -> Iterator[None]:
    """Turns what is wrong with the folder as a whole into one line."""
    try:
        yield
    except OSError as problem:
        raise Failure(f"{root} can't be read: {problem.strerror or problem}") from None


def _size(text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as problem:
        raise click.UsageError(f"--to: {problem}") from None


def _some(names: set[str]) -> str:
    named = sorted(filter(None, names))
    return f"there are {', '.join(named)}" if named else "nothing is kept at all"


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Counts one record with each call; a bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task("checking", total=total)
        yield lambda: bars.advance(bar)
