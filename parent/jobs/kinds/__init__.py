"""The kinds of job there are. A new one is a module here and a line in `KINDS`."""

from __future__ import annotations

from .kind import Kind
from .pull import Pull

# The order is that of forms and documents.
KINDS: tuple[Kind, ...] = (
    Pull(),
)  # fmt: skip
