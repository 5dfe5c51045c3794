"""Fetching a model: a repository of the Hub, or the starter model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from mlxpool.parent.hub.names import STARTER, check_repository, check_revision

if TYPE_CHECKING:
    from .kind import Fault, Here, Needs


class PullConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is fetched."""

    name: Annotated[str, Meta(description=f'A model of the Hub, as org/name; or "{STARTER}", a small one.')]
    revision: Annotated[
        str | None, Meta(description="A branch, a tag or a commit; else the repository's main branch.")
    ] = None

    def __post_init__(self) -> None:
        if self.name != STARTER:
            check_repository(self.name)
            if self.revision is not None:
                check_revision(self.revision)
        elif self.revision is not None:
            raise ValueError("the starter has no revisions; leave `revision` out")


class Pull:
    """Kind "pull"."""

    name = "pull"
    summary = "Fetch a model of the Hub, or the starter model."
    gpu = False
    positional = ("name",)
    config = PullConfig

    def faults(self, _config: PullConfig, _here: Here) -> list[Fault]:
        """What the Hub says of a name, and how much room there is, is for the process to find."""
        return []

    def needs(self, _config: PullConfig, _here: Here) -> Needs:
        from .kind import Needs

        return Needs(network=True)

    def argv(self, config: PullConfig, here: Here) -> list[str]:
        return process_argv(config, here.home)

    def env(self, _config: PullConfig, _here: Here) -> Mapping[str, str]:
        return {}


def process_argv(config: PullConfig, home: Path) -> list[str]:
    """A process of its own, so that the Hub's client is never loaded into the parent."""
    argv = [sys.executable, "-m", "mlxpool.parent.hub.pull_process", "--home", str(home)]
    if config.revision is not None:
        argv += ["--revision", config.revision]
    return [*argv, config.name]
