"""Commands that messages tell a person to type, about the home that the message is about.

`mlxpool pull starter` typed as it stands goes to the default home; said by a server of another one it would
fetch a model that the server never sees.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from mlxpool.shared.config import default_home


def home_option(home: Path) -> str:
    """The text ` --home X` where a command without it would be about another home, else nothing."""
    return "" if home == default_home() else f" --home {shlex.quote(str(home))}"


def command(words: str, home: Path) -> str:
    """`mlxpool words` in backquotes, to be typed as it stands."""
    return f"`mlxpool {words}{home_option(home)}`"
