"""What somebody else's folder may do to this program: cost itself, and nothing else.

Files are checked where they are read, and what is wrong with them is told as a CheckpointError. What nobody
has thought of raises something else, from deep within Python; it must not end a start, or a listing in which
all other models stand too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxpool.shared.checkpoint import CheckpointError, called
from mlxpool.shared.text import cut

logger = logging.getLogger("mlxpool")


@contextmanager
def contained(folder: Path) -> Iterator[None]:
    """Around whatever reads `folder`, or counts with what was read of it: raises CheckpointError alone, and
    logs where another exception came from."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as problem:
        raise CheckpointError(f"{called(folder)}: can't be read: {problem.strerror or problem}") from None
    except Exception as problem:
        logger.exception("%s can't be understood", folder)
        said = " ".join(str(problem).split())
        raise CheckpointError(
            f"{called(folder)}: its files can't be understood ({type(problem).__name__}: {cut(said)}); "
            "the server's log says where that came up"
        ) from None
