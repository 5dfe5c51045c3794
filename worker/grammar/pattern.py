"""Which regular expressions the grammar compiler really enforces. Pure.

The compiler reads a dialect of its own: it drops lookaheads and misplaced anchors with a warning on stderr,
takes an unknown escape for the letter itself, and inside a JSON string it writes a quote that a pattern names
as it is, which ends the string. So a pattern is read here first, character by character, and only what is in
the closed table goes on. A JSON-Schema pattern may match anywhere in the string, the compiler's covers the
whole of it: `whole` says the same thing in the compiler's terms.
"""

from __future__ import annotations

import re

import msgspec

from mlxpool.shared.text import cut

# Letters that may follow a backslash: classes, and characters that a JSON string can't hold unescaped.
_CLASS_LETTERS = frozenset("dDwWsS")
_CONTROL_LETTERS = frozenset("nrtfv0")
_HEX_DIGITS = {"x": 2, "u": 4}
_UNSUPPORTED_LETTERS = {
    "b": "word boundaries (\\b)",
    "B": "word boundaries (\\B)",
    "p": "Unicode classes (\\p)",
    "P": "Unicode classes (\\P)",
    "k": "backreferences (\\k)",
    "c": "control escapes (\\c)",
}
_UNSUPPORTED_GROUPS = {
    "?=": "lookaheads",
    "?!": "lookaheads",
    "?<=": "lookbehinds",
    "?<!": "lookbehinds",
}
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")

# What a JSON string can't hold as it is.
_NOT_IN_JSON = frozenset('"\\') | frozenset(map(chr, range(32)))

# Any character that a JSON string holds as it is; the compiler's own dot leaves out the rest in a pattern.
_ANYTHING = ".*"

# A larger count makes more states than the compiler builds in its time.
_COUNT_HIGH = 10_000

# Inside a JSON string the compiler (0.2.9) loses its place in a larger one behind a repetition without an
# end: `^a*c{1,129}$` takes "aacca".
_COUNT_HIGH_BESIDE_STAR = 128


class Unsupported(msgspec.Struct, frozen=True):
    """Why a pattern can't be enforced. invalid: it is no regular expression at all."""

    what: str
    invalid: bool = False


class _Fault(Exception):
    def __init__(self, what: str, invalid: bool = False) -> None:
        super().__init__(what)
        self.fault = Unsupported(what, invalid)


class _Reader:
    """One pass over a pattern. `alternatives` are the top level's, each without the anchors at its ends, with
    whether it had them."""

    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._place = 0
        self._depth = 0
        self._largest_count = 0
        self._starred = False
        self.alternatives: list[tuple[str, bool, bool]] = []

    def read(self) -> None:
        pattern = self._pattern
        begin, opened, closed = 0, False, False
        repeatable = False
        while self._place < len(pattern):
            letter = pattern[self._place]
            if closed and not (letter == "|" and self._depth == 0):
                raise _Fault("an anchor ($) before the end")
            if letter == "^":
                if self._depth or self._place != begin:
                    raise _Fault("an anchor (^) after the beginning")
                opened = True
                self._place += 1
                begin = self._place
                repeatable = False
            elif letter == "$":
                if self._depth:
                    raise _Fault("an anchor ($) inside a group")
                closed = True
                self._place += 1
            elif letter == "|":
                if self._depth == 0:
                    self._alternative(begin, opened, closed)
                    begin, opened, closed = self._place + 1, False, False
                self._place += 1
                repeatable = False
            elif letter == "(":
                self._group()
                repeatable = False
            elif letter == ")":
                if self._depth == 0:
                    raise _Fault("a ) without its (", invalid=True)
                self._depth -= 1
                self._place += 1
                repeatable = True
            elif letter in "*+?{":
                if not repeatable:
                    raise _Fault(f"a {letter} with nothing to repeat", invalid=True)
                self._quantifier(letter)
                repeatable = False
            elif letter == "[":
                self._character_class()
                repeatable = True
            elif letter == "\\":
                self._escape(literal=True)
                repeatable = True
            else:
                self._literal(letter)
                self._place += 1
                repeatable = True
        if self._depth:
            raise _Fault("a ( without its )", invalid=True)
        self._alternative(begin, opened, closed)
        # What stands around an unanchored match repeats without an end too.
        starred = self._starred or not all(opened for _, opened, _ in self.alternatives)
        if self._in_json and starred and self._largest_count > _COUNT_HIGH_BESIDE_STAR:
            raise _Fault(f"a count above {_COUNT_HIGH_BESIDE_STAR} beside a repetition without an end")

    def _alternative(self, begin: int, opened: bool, closed: bool) -> None:
        body = self._pattern[begin : self._place - 1 if closed else self._place]
        self.alternatives.append((body, opened, closed))

    def _literal(self, letter: str) -> None:
        if self._in_json and letter in _NOT_IN_JSON:
            raise _Fault(f"a character that JSON escapes ({letter!r})")
        if 0xD800 <= ord(letter) <= 0xDFFF:
            raise _Fault("half a surrogate pair", invalid=True)

    def _group(self) -> None:
        rest = self._pattern[self._place + 1 : self._place + 4]
        for opener, name in _UNSUPPORTED_GROUPS.items():
            if rest.startswith(opener):
                raise _Fault(name)
        self._place += 1
        if rest.startswith("?:"):
            self._place += 2
        elif rest.startswith("?"):
            name_match = _GROUP_NAME.match(self._pattern, self._place)
            if name_match is None:
                raise _Fault("flags and comments in groups")
            self._place = name_match.end()
        self._depth += 1

    def _quantifier(self, letter: str) -> None:
        if letter == "{":
            count = _COUNT.match(self._pattern, self._place)
            if count is None:
                raise _Fault("a { that begins no count (write \\{ for the character)")
            low = _number(count[1])
            high = _number(count[3]) if count[3] else low
            if high < low:
                raise _Fault(f"a count that goes down ({cut(count[0])})", invalid=True)
            if high > _COUNT_HIGH:
                raise _Fault(f"a count above {_COUNT_HIGH} ({cut(count[0])})")
            self._place = count.end()
            self._largest_count = max(self._largest_count, low if count[2] and not count[3] else high)
            self._starred = self._starred or bool(count[2] and not count[3])
        else:
            self._starred = self._starred or letter != "?"
            self._place += 1
        # Lazy: the same strings match.
        if self._pattern.startswith("?", self._place):
            self._place += 1
        elif self._pattern.startswith("+", self._place):
            raise _Fault("possessive quantifiers")

    def _escape(self, literal: bool) -> None:
        """One escape at the current place; literal: it stands for itself, not for what a class leaves out."""
        if self._place + 1 >= len(self._pattern):
            raise _Fault("a backslash at the end", invalid=True)
        letter = self._pattern[self._place + 1]
        length = 2
        if letter in _CLASS_LETTERS:
            pass
        elif letter in _UNSUPPORTED_LETTERS:
            raise _Fault(_UNSUPPORTED_LETTERS[letter])
        elif letter in _HEX_DIGITS:
            digits = self._pattern[self._place + 2 : self._place + 2 + _HEX_DIGITS[letter]]
            if len(digits) < _HEX_DIGITS[letter] or not re.fullmatch("[0-9A-Fa-f]+", digits):
                raise _Fault(f"an escape \\{letter} without its hexadecimal digits")
            length += len(digits)
            if literal:
                self._literal(chr(int(digits, 16)))
        elif letter in _CONTROL_LETTERS:
            if literal and self._in_json:
                raise _Fault(f"a character that JSON escapes (\\{letter})")
        elif letter.isdigit():
            raise _Fault("backreferences")
        elif letter.isalpha():
            raise _Fault(f"the escape \\{letter}")
        elif literal:
            self._literal(letter)
        self._place += length

    def _character_class(self) -> None:
        """A class [...]. A negated one may name what JSON escapes: it leaves it out."""
        self._place += 1
        negated = self._pattern.startswith("^", self._place)
        if negated:
            self._place += 1
        begin = self._place
        while True:
            if self._place >= len(self._pattern):
                raise _Fault("a [ without its ]", invalid=True)
            letter = self._pattern[self._place]
            if letter == "]":
                if self._place == begin:
                    raise _Fault("an empty class")
                self._place += 1
                return
            if letter == "[":
                raise _Fault("a [ inside a class (write \\[ for the character)")
            if letter == "\\":
                self._escape(literal=not negated)
            else:
                if not negated:
                    self._literal(letter)
                self._place += 1


def _number(digits: str) -> int:
    """A count, no larger than one that is too large; int() reads no more than some thousand digits."""
    significant = digits.lstrip("0")
    return int(significant or "0") if len(significant) < 10 else 10**9


def _read(pattern: str, in_json: bool) -> _Reader | Unsupported:
    reader = _Reader(pattern, in_json)
    try:
        reader.read()
    except _Fault as fault:
        return fault.fault
    return reader


def unsupported(pattern: str, *, in_json: bool = False) -> Unsupported | None:
    """What of `pattern` the compiler would not enforce, None where it enforces all of it.

    in_json: the text it describes stands inside a JSON string.
    """
    read = _read(pattern, in_json)
    return read if isinstance(read, Unsupported) else None


def whole(pattern: str) -> str:
    """A JSON-Schema pattern as the compiler takes one: with what may stand around a match made explicit.

    Only for patterns without an `unsupported` part.
    """
    read = _read(pattern, in_json=True)
    assert isinstance(read, _Reader), pattern
    parts = [
        f"{'' if opened else _ANYTHING}{f'({body})' if body else ''}{'' if closed else _ANYTHING}"
        for body, opened, closed in read.alternatives
    ]
    return f"^{parts[0] if len(parts) == 1 else '|'.join(f'({part})' for part in parts)}$"
