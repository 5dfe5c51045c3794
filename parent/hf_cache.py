"""Models in the Hugging Face cache: what other programs have downloaded can be served from where it lies.

The cache keeps `models--org--name/snapshots/<commit>/` with links into `blobs/`, made file by file as each
download ends, and `refs/main` names the commit that `main` was. Such a snapshot is a model `org/name` once it
is whole: no link dangles, the weights that its index lists are all there, and it has a config and a
tokenizer. The cache belongs to others; nothing is ever written into it or removed from it.

`HfCache` owns its last look and is used by one thread. A cache may hold hundreds of repositories, so it is
looked at again at most once a second.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path

from mlxpool.parent.folders import Found, Times, is_settled, times
from mlxpool.shared import checkpoint
from mlxpool.shared.colibri import folder
from mlxpool.shared.config_values import is_model_name
from mlxpool.shared.files import open_regular

# A look costs a few system calls per repository; a download takes longer than this to end.
LOOK_INTERVAL_S = 1.0
_REPOSITORY_PREFIX = "models--"
# A commit's name is 40 digits.
_MAX_REFERENCE_BYTES = 1024
_NUMBERED = re.compile(r"(.*?)([0-9]+)-of-([0-9]+)\.safetensors")


def location(env: Mapping[str, str]) -> Path:
    """Where the cache is: HF_HUB_CACHE, else hub under HF_HOME, else under the user's cache folder."""
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    if home := env.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    caches = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "huggingface" / "hub"


class HfCache:
    """The whole models of one cache folder."""

    def __init__(self, root: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._now = now
        self._look_after = -1.0
        self._seen: Times | None = None
        self._found: list[Found] = []

    def models(self) -> list[Found]:
        """Every whole model; the same list object as long as nothing has changed."""
        now = self._now()
        if now < self._look_after:
            return self._found
        self._look_after = now + LOOK_INTERVAL_S
        if self._seen is not None and times(self._seen) == self._seen:
            return self._found
        found, watched = self._scan()
        seen = times(watched)
        self._seen = seen if is_settled(seen) else None
        if found != self._found:
            self._found = found
        return self._found

    def _scan(self) -> tuple[list[Found], list[Path]]:
        found: list[Found] = []
        watched = [self._root]
        try:
            entries = sorted(self._root.iterdir())
        except OSError:
            return found, watched
        for repository in entries:
            if not repository.name.startswith(_REPOSITORY_PREFIX):
                continue
            reference = repository / "refs" / "main"
            watched.append(reference)
            name = "/".join(repository.name.removeprefix(_REPOSITORY_PREFIX).split("--"))
            commit = _read_reference(reference)
            if commit is None or not is_model_name(name):
                continue
            snapshot = repository / "snapshots" / commit
            watched.append(snapshot)
            if is_whole(snapshot):
                found.append(Found(name, snapshot))
        return found, watched


def is_whole(snapshot: Path) -> bool:
    """Whether every file that a snapshot needs, and every one it names, is there."""
    try:
        with os.scandir(snapshot) as entries:
            files = {entry.name: entry.is_file() for entry in entries if not entry.is_dir()}
        shards = set(checkpoint.read_index(snapshot / checkpoint.INDEX_FILE).values())
    except (OSError, checkpoint.CheckpointError):
        return False
    weights = {name for name in files if fnmatch(name, checkpoint.WEIGHTS_PATTERN)}
    # Links of experts in a folder of their own are looked at when the model is read.
    weights = weights or {name for name in files if fnmatch(name, _streamed_weights(files))}
    return (
        all(files.values())
        and checkpoint.CONFIG_FILE in files
        and bool(weights)
        and shards <= weights
        and not _missing_of_numbered(weights)
        and any(name in files for name in checkpoint.TOKENIZER_FILES)
    )


def _streamed_weights(files: Collection[str]) -> str:
    """What the weights of a folder that can only be streamed are called."""
    return folder.RECORDS_DENSE if folder.RECORDS_INDEX in files else folder.CONTAINER_PATTERN


def _missing_of_numbered(weights: set[str]) -> bool:
    """Whether shards named `…-00001-of-00003.safetensors` are fewer than they say; an index may come last."""
    for name in weights:
        found = _NUMBERED.fullmatch(name)
        if found:
            stem, number, said = found.groups()
            count = int(said)
            # A name may say any number: no more are counted than there are.
            wanted = (f"{stem}{n:0{len(number)}}-of-{said}.safetensors" for n in range(1, count + 1))
            return count > len(weights) or not weights.issuperset(wanted)
    return False


def _read_reference(path: Path) -> str | None:
    """The commit in refs/main; what is no commit's name never becomes part of a path."""
    try:
        with open_regular(path) as file:
            commit = file.read(_MAX_REFERENCE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return commit if commit.isalnum() else None
