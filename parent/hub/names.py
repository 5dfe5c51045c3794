"""What may be asked of the Hub, by name. Pure."""

from __future__ import annotations

import re

from mlxpool.shared.text import cut

# `mlxpool pull starter` is not of the Hub; everything else that can be pulled is.
STARTER = "starter"

# The Hub's own rules for a name. They keep it harmless as a folder's name, too.
MAX_PART_CHARS = 96
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}")


def check_repository(name: str) -> None:
    """Raises ValueError where `name` can't be a repository of the Hub."""
    parts = name.split("/")
    if len(parts) != 2 or not all(_is_part(part) for part in parts):
        raise ValueError(
            f"{cut(name)!r} is no model of the Hub; "
            f"use org/name, like mlx-community/Qwen3-8B-4bit, or {STARTER!r}"
        )


def check_revision(revision: str) -> None:
    """Raises ValueError where `revision` can't be a branch, tag or commit."""
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"{cut(revision)!r} is no revision; use a branch, a tag or a commit, like main")


def _is_part(part: str) -> bool:
    return (
        len(part) <= MAX_PART_CHARS
        and _PART.fullmatch(part) is not None
        and "--" not in part
        and ".." not in part
    )
