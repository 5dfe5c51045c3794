"""Text of others, where it is quoted in a message or handed on as UTF-8. Pure.

What a client or a shell sent may be megabytes long, and may hold what no UTF-8 can: Python reads bytes that
are none as lone surrogates, and JSON can spell them. Messages quote the beginning; what goes on is checked.
"""

from __future__ import annotations

# Enough to recognise a value, too little to flood a log or a terminal.
QUOTED_CHARS = 80


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cut(text: str, chars: int = QUOTED_CHARS) -> str:
    """Its first characters, with a mark where that is not all."""
    return text if len(text) <= chars else text[:chars] + "…"


def one_line(text: str) -> str:
    """A message as a terminal may have it: its lines in one, and what can't be seen, a terminal's commands
    among it, as escapes."""
    lines = (line.strip() for line in text.splitlines())
    return "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1]
        for letter in " ".join(line for line in lines if line)
    )
