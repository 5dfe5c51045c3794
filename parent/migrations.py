"""All steps of state.sqlite's layout, oldest first. A new one goes to the end, whichever table it is of."""

from __future__ import annotations

from .history import table as history
from .jobs import table as jobs

MIGRATIONS = (*history.MIGRATIONS, *jobs.MIGRATIONS)
