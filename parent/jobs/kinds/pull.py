"""Fetching a model: a repository of the Hub, or the starter model."""

from __future__ import annotations

import sys

import msgspec

from mlxpool.parent.hub.names import STARTER, check_repository, check_revision
from mlxpool.shared.config import Settings


class PullConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """name: org/name, or "starter". revision: a branch, tag or commit; the default branch where absent."""

    name: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.name != STARTER:
            check_repository(self.name)
            if self.revision is not None:
                check_revision(self.revision)
        elif self.revision is not None:
            raise ValueError("the starter has no revisions; leave `revision` out")


class Pull:
    """Kind "pull"."""

    config = PullConfig

    def argv(self, config: PullConfig, settings: Settings) -> list[str]:
        """A process of its own, so that the Hub's client is never loaded into the parent."""
        argv = [sys.executable, "-m", "mlxpool.parent.hub.pull_process", "--home", str(settings.home)]
        if config.revision is not None:
            argv += ["--revision", config.revision]
        return [*argv, config.name]
