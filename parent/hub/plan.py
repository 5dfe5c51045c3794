"""Which files of a repository make the model, and whether there is room for them. Pure.

A repository holds a model in many forms side by side: safetensors beside PyTorch and GGUF files, variants in
other precisions, demos. What is chosen is what a worker reads, and no more: config, `model*.safetensors`,
tokenizer, templates; in their place what colibri's containers and converted experts consist of. Code is never
fetched: nothing here would run it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from mlxpool.shared.checkpoint import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILES
from mlxpool.shared.colibri.folder import RECORDS_INDEX
from mlxpool.shared.staging import PullError
from mlxpool.shared.units import format_size

# Left free beside the model: a disk filled to its last byte stops more than this server.
HEADROOM_BYTES = 256 * 2**20
# In a pull's stage: what content each of its names has.
PLAN_FILE = "pull.json"

_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
# A shard's place in its set; a variant's name ("model.fp16.safetensors") comes before it.
_SHARD = re.compile(r"model(?P<variant>\.[^/]+?)?(?P<number>-\d+-of-\d+)?\.safetensors")
_CONTAINER = re.compile(r"out-[^/]*\.safetensors")
_RECORDS = re.compile(r"dense-[^/]*\.safetensors|experts/[^/.][^/]*\.bin")
_BESIDE_WEIGHTS = re.compile(
    r"""  (?!pytorch_model|flax_model|tf_model|consolidated|params)[^/.][^/]*\.json
        | tokenizer[^/]*\.model | [^/.][^/]*\.tiktoken | vocab[^/]*\.txt | merges\.txt
        | [^/.][^/]*\.jinja | additional_chat_templates/[^/.][^/]*\.jinja
        | \d+_[A-Za-z]+/(?:config\.json|model\.safetensors)""",  # an embedding model's later layers
    re.VERBOSE,
)
# How the weights of a repository that has none for us are called, and what to say then.
_OTHER_WEIGHTS = (
    (".gguf", "only GGUF files; download one and `mlxpool import` it"),
    (".bin", "only PyTorch weights; look for a conversion of it to MLX or safetensors"),
    (".safetensors", "no model*.safetensors (an adapter, or a part of a larger model?)"),
)


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a repository. sha256: where it is stored as a large file. git_sha1: its blob id otherwise."""

    path: str
    size_bytes: int
    sha256: str | None
    git_sha1: str

    @property
    def content_id(self) -> str:
        """Equal for equal content: a hash that the download is checked against."""
        return self.sha256 or self.git_sha1


class Plan(msgspec.Struct, frozen=True):
    """What is fetched: of which commit, and which files, small ones first."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def choose(repository: str, commit: str, files: Iterable[RemoteFile]) -> Plan:
    """The files that make the model. Raises PullError where they make none."""
    every = {file.path: file for file in files}
    weights = _choose_weights(every) or _choose_experts(every)
    others = [path for path in every if _BESIDE_WEIGHTS.fullmatch(path)]
    # Without the shards an index speaks of it would only mislead.
    others = [path for path in others if not path.endswith(".index.json") or path == INDEX_FILE]
    if not any("-of-" in path for path in weights):
        others = [path for path in others if path != INDEX_FILE]
    if CONFIG_FILE not in every:
        raise PullError(f"{repository} has no {CONFIG_FILE}: it is no model that MLX can load")
    if not weights:
        has = (why for ending, why in _OTHER_WEIGHTS if any(path.endswith(ending) for path in every))
        raise PullError(f"{repository} has {next(has, 'no weights')}")
    if not set(TOKENIZER_FILES) & set(others):
        raise PullError(f"{repository} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    chosen = sorted(
        (every[path] for path in {*weights, *others}), key=lambda file: (file.size_bytes, file.path)
    )
    return Plan(repository, commit, tuple(chosen))


def check_room(plan: Plan, have_bytes: int, free_bytes: int, folder: Path) -> None:
    """Refuse before the first byte what the disk can't hold. have_bytes: staged already. Raises PullError."""
    left = plan.total_bytes - have_bytes
    if left + HEADROOM_BYTES > free_bytes:
        staged = f", {format_size(have_bytes)} of them are here already" if have_bytes else ""
        raise PullError(
            f"not enough room under {folder}: {plan.repository} has {format_size(plan.total_bytes)}{staged},"
            f" {format_size(free_bytes)} are free and {format_size(HEADROOM_BYTES)} of these stay so"
        )


def _choose_weights(every: Mapping[str, RemoteFile]) -> list[str]:
    """One set of weight files: all that match would hold every tensor twice where there are variants."""
    matching = {
        path: match for path in every if (match := _SHARD.fullmatch(path)) and _WEIGHTS.fullmatch(path)
    }
    plain = {path: match for path, match in matching.items() if match["variant"] is None}
    chosen = plain or matching
    shards = [path for path, match in chosen.items() if match["number"] is not None]
    if INDEX_FILE in every and shards:
        return shards
    whole = [path for path, match in chosen.items() if match["number"] is None]
    return whole or shards


def _choose_experts(every: Mapping[str, RemoteFile]) -> list[str]:
    """The files of a folder that can only be streamed."""
    form = _RECORDS if RECORDS_INDEX in every else _CONTAINER
    return [path for path in every if form.fullmatch(path)]
