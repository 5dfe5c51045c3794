"""What the kind hands over to its process. A module of its own: commands load no HTTP client."""

from __future__ import annotations

import msgspec

from .templates import Template

# Where the key of the server's own API is handed over: never on a command line, which everyone can read.
KEY_VARIABLE = "MLXPOOL_JOB_KEY"


class DatasetTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the kind hands over: names looked up, defaults filled in. target: the dataset's file."""

    url: str
    model: str
    input: str
    target: str
    template: Template
    count: int | None
    concurrency: int
    max_tokens: int
    temperature: float
    system: str | None
    seed: int | None
    adapter: str | None
