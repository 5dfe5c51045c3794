"""A model of the Hub into home/models: listed, checked for room, fetched, checked, published whole.

The stage (staging.py) holds `parts/`, what is still to come or to be checked, and `model/`, which only gets
files that are whole and right. `pull.json` says what content each of its names has, so a pull that
was killed goes on, and one that finds the repository changed keeps what has not: at the end `model/` is
renamed to home/models/org/name, which is what makes it a model.

This module owns the stage while it holds its lock; up to FILES_AT_ONCE threads fill parts.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from mlxpool.parent import streaming
from mlxpool.parent.library import MODELS_FOLDER
from mlxpool.shared import checkpoint, staging
from mlxpool.shared.staging import Manifest, ManifestFile, PullError

from . import plan as plans
from . import remote, transfer
from .plan import PLAN_FILE, Plan

# One connection seldom fills a fast line; more than a few only wait for each other.
FILES_AT_ONCE = 4

# Called with the stage, bytes done and bytes in all, from any thread.
Report = Callable[[str, int, int], None]


class Pulled(msgspec.Struct, frozen=True):
    """Where the model is now, and whether it was before."""

    path: Path
    was_there: bool


def pull(home: Path, name: str, revision: str | None, report: Report, waiting: Callable[[], None]) -> Pulled:
    """Fetch `name` ("org/name") into home/models. Raises PullError.

    revision: None = the default branch. waiting: called where another pull of the model is waited for.
    """
    models = home / MODELS_FOLDER
    target = models / name
    stage = staging.stage_folder(models, name)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with staging.locked(models, name, waiting):
            if was_there := target.exists():
                _check_published(target, name, revision)
            else:
                _pull(models, stage, target, name, revision, report)
            shutil.rmtree(stage, ignore_errors=True)
            return Pulled(target, was_there)
    except OSError as problem:
        raise PullError(
            f"can't write {name} under {models}: {problem}; what has been fetched is kept"
        ) from problem


def _check_published(target: Path, name: str, revision: str | None) -> None:
    """Raises PullError where what is there is broken, or is not what is asked for."""
    try:
        streaming.check_loadable(target)
    except checkpoint.CheckpointError as problem:
        raise PullError(
            f"{target} is there but broken ({problem}); `mlxpool rm {name}` removes it, then pull again"
        ) from None
    manifest = staging.read_manifest(target)
    commit = manifest.commit if manifest is not None and manifest.commit is not None else ""
    known = manifest is not None and revision == manifest.revision
    if revision is not None and not known and not commit.startswith(revision):
        has = f"commit {commit[:12]}" if commit else "not from the Hub"
        raise PullError(
            f"{name} is here already ({has}), not revision {revision!r}; `mlxpool rm {name}` removes it, then"
            " pull again"
        )


def _pull(models: Path, stage: Path, target: Path, name: str, revision: str | None, report: Report) -> None:
    if (target.parent / checkpoint.CONFIG_FILE).exists():
        raise PullError(f"{target.parent} is a model itself, so {name} can't be put into it; rename that one")
    plan = plans.choose(name, *remote.list_files(name, revision))
    parts, model = stage / "parts", stage / "model"
    for folder in (stage, parts, model):
        folder.mkdir(exist_ok=True)
    have = _keep_what_is_wanted(stage, plan)
    plans.check_room(plan, have, shutil.disk_usage(models).free, models)
    _fetch(plan, parts, model, have, report)
    try:
        streaming.check_loadable(model)
    except checkpoint.CheckpointError as problem:
        raise PullError(
            f"{name} is here whole, but can't be loaded ({problem}), so it was not published;"
            f" `mlxpool rm {name}` removes what was fetched"
        ) from None
    files = {
        file.path: ManifestFile(file.size_bytes, file.sha256 or staging.sha256_of(model / file.path))
        for file in plan.files
    }
    manifest = Manifest(name, name, files, revision=revision or "main", commit=plan.commit)
    report("publish", plan.total_bytes, plan.total_bytes)
    staging.publish(model, target, manifest)


def _keep_what_is_wanted(stage: Path, plan: Plan) -> int:
    """Drop from the stage what the plan has no use for, record the plan; returns the bytes that stay."""
    parts, model = stage / "parts", stage / "model"
    wanted = {file.path: file for file in plan.files}
    known = _read_contents(stage / PLAN_FILE)
    have = 0
    for path in sorted(model.rglob("*")):
        name = path.relative_to(model).as_posix()
        file = wanted.get(name)
        if path.is_dir():
            continue
        if file is not None and known.get(name) == file.content_id and path.stat().st_size == file.size_bytes:
            have += file.size_bytes
            del wanted[name]
        else:
            path.unlink()
    sizes = {_part_name(file): file.size_bytes for file in wanted.values()}
    for part in parts.iterdir():
        size = part.stat().st_size
        if part.name in sizes and size <= sizes[part.name]:
            have += size
        else:
            part.unlink()
    contents = {file.path: file.content_id for file in plan.files}
    fresh = stage / f".{PLAN_FILE}"
    fresh.write_bytes(msgspec.json.encode(contents))
    os.replace(fresh, stage / PLAN_FILE)
    return have


def _read_contents(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _fetch(plan: Plan, parts: Path, model: Path, have: int, report: Report) -> None:
    """Make every file of the plan lie in `model`. The first failure stops the others and is raised."""
    done = have
    lock, stop = threading.Lock(), threading.Event()

    def count(came: int) -> None:
        nonlocal done
        with lock:
            done += came
            report("download", done, plan.total_bytes)

    def fetch(file: plans.RemoteFile) -> None:
        part = parts / _part_name(file)
        transfer.fetch(plan.repository, plan.commit, file, part, count, stop)
        (model / file.path).parent.mkdir(exist_ok=True)
        os.replace(part, model / file.path)

    report("download", done, plan.total_bytes)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        running = [pool.submit(fetch, file) for file in plan.files if not (model / file.path).exists()]
        wait(running, return_when=FIRST_EXCEPTION)
        stop.set()
        for future in running:
            future.cancel()
    failures = [future.exception() for future in running if not future.cancelled()]
    stopped = (transfer.Stopped, type(None))
    for failure in failures:
        if not isinstance(failure, stopped):
            raise failure


def _part_name(file: plans.RemoteFile) -> str:
    """By content first: a part of a file that has changed since is never gone on with."""
    return f"{file.content_id}-{staging.key_of(file.path)}"
