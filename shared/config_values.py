"""How one setting's value is read: the kinds of value, what each accepts, and its JSON schema.

Pure. A kind's `read` takes what TOML gave and returns the value to keep; it raises ValueError, with a
message where it can say more than the kind's `allowed`. `from_text` first turns the text of an environment
variable or a flag into what TOML would have given.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mlxpool.shared import adapters
from mlxpool.shared.families import NO_FAMILY, REASONING_FAMILY_NAMES, TOOL_FAMILY_NAMES
from mlxpool.shared.text import is_unicode
from mlxpool.shared.units import parse_budget, parse_duration, parse_size

# A share needs some total to be checked against; any will do.
_SOME_TOTAL_BYTES = 1 << 40
AUTO = "auto"
_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9._:\[\]-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class ConfigError(Exception):
    """The settings can't be used. One line that names the source, the key, its value and what would work."""


class Kind(NamedTuple):
    """read: raw → value, ValueError. allowed: completes "use …". schema: of the raw value.

    secret: the value appears in no message.
    """

    read: Callable[[Any], object]
    allowed: str
    schema: dict[str, Any]
    from_text: Callable[[str], object] = str
    secret: bool = False


class Key(NamedTuple):
    """A setting's kind, and why its default is what it is."""

    kind: Kind
    why: str


def refuse(source: str, label: str, value: object, allowed: str, *, secret: bool = False) -> ConfigError:
    """A ConfigError about one value."""
    where = f"{source}: " if source else ""
    return ConfigError(f"{where}{label} = {'(hidden)' if secret else repr(value)}: {allowed}")


def known(name: str, names: Iterable[str], prefix: str = "") -> str:
    """What to say after an unknown name: the nearest one, or all of them; `prefix` goes before each."""
    candidates = list(names)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known are {', '.join(prefix + candidate for candidate in candidates)}"


def is_loopback(host: str) -> bool:
    """Whether binding to `host` keeps the server on this machine."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_model_name(name: str) -> bool:
    """A folder's name, or org/name, in Unicode: no hidden or parent folders, no control characters, no *."""
    parts = name.split("/")
    return len(parts) <= 2 and all(
        part
        and not part.startswith(".")
        and not _CONTROL.search(part)
        and is_unicode(part)
        and "*" not in part
        and "\\" not in part
        for part in parts
    )


def _checked(kind: type, test: Callable[[Any], bool]) -> Callable[[Any], object]:
    """A reader of one Python type; TOML's true is no number, its 1 no float's enemy."""

    def read(raw: Any) -> object:
        if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
            raw = float(raw)
        if type(raw) is not kind or not test(raw):
            raise ValueError
        return raw

    return read


def _whole(low: int, high: int | None, allowed: str) -> Kind:
    schema = {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})}
    in_range = _checked(int, lambda n: n >= low and (high is None or n <= high))
    return Kind(in_range, allowed, schema, _number_text(int))


def _number_text(kind: type) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            number: object = kind(text)
        except ValueError:
            raise ValueError from None
        return number

    return convert


def _one_of(names: tuple[str, ...]) -> Kind:
    known_names = (*names, NO_FAMILY)
    return Kind(
        _checked(str, lambda name: name in known_names),
        f"one of {', '.join(known_names)}",
        {"enum": list(known_names)},
    )


def _choice(*names: str) -> Kind:
    return Kind(
        _checked(str, lambda name: name in names), f"one of {', '.join(names)}", {"enum": list(names)}
    )


def _or_auto(kind: Kind) -> Kind:
    """The same kind of value, or "auto"."""

    def from_text(text: str) -> object:
        return AUTO if text.strip().lower() == AUTO else kind.from_text(text)

    return Kind(
        lambda raw: AUTO if raw == AUTO else kind.read(raw),
        f'"{AUTO}", or {kind.allowed}',
        {"anyOf": [{"const": AUTO}, kind.schema]},
        from_text,
    )


def _list(item: Callable[[str], bool], allowed: str) -> Kind:
    def read(raw: Any) -> tuple[str, ...]:
        if not isinstance(raw, list) or not all(isinstance(entry, str) and item(entry) for entry in raw):
            raise ValueError
        return tuple(raw)

    def split(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
    return Kind(read, allowed, schema, split)


def _flag_text(text: str) -> object:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
    except KeyError:
        raise ValueError from None


def _budget(raw: Any) -> str | int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise ValueError
    parse_budget(raw, _SOME_TOTAL_BYTES)
    return raw


def _size(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise ValueError
    return parse_size(raw)


def _some_size(raw: Any) -> int:
    size = _size(raw)
    if size == 0:
        raise ValueError
    return size


def _timeout(raw: Any) -> float:
    seconds = _wait(raw)
    if seconds == 0:
        raise ValueError
    return seconds


def _wait(raw: Any) -> float:
    if not isinstance(raw, str | int | float):
        raise ValueError
    return parse_duration(raw)


def _ttl(raw: Any) -> float:
    # The text form too: an environment variable's -1 arrives as text.
    if raw in ("never", -1, "-1"):
        return math.inf
    return _wait(raw)


_DURATION_SCHEMA = {"type": ["number", "string"], "minimum": 0}


def _adapters(raw: Any) -> object:
    if not isinstance(raw, str):
        raise ValueError
    adapters.read_set(raw)
    return raw


HOST = Kind(
    _checked(str, lambda text: bool(_HOST_NAME.fullmatch(text))),
    "an address or a host name, like 127.0.0.1",
    {"type": "string", "minLength": 1},
)
PORT = _whole(0, 65535, "a whole number from 0 to 65535")
API_KEYS = _list(
    lambda text: bool(_VISIBLE_ASCII.fullmatch(text)), "a list of keys in visible ASCII, without spaces"
)._replace(secret=True)
HOSTS = _list(
    lambda text: bool(_HOST_NAME.fullmatch(text)), 'a list of host names without scheme, like ["box.local"]'
)
ORIGINS = _list(
    lambda text: bool(_ORIGIN.fullmatch(text)), 'a list of origins, like ["https://chat.example"]'
)
BUDGET = Kind(
    _budget,
    "bytes, a size like 48GB or a share of the machine like 75%",
    {"type": ["string", "integer"], "minimum": 1},
)
SIZE = Kind(_size, "bytes or a size like 8GB, 0 for none", {"type": ["string", "integer"], "minimum": 0})
TTL = Kind(
    _ttl,
    'seconds, a duration like "15m", 0 for as soon as idle, or "never" (or -1)',
    {"type": ["number", "string"], "minimum": -1},
)
AGE = Kind(
    _ttl,
    'seconds, a duration like "30d", 0 for none, or "never" (or -1)',
    {"type": ["number", "string"], "minimum": -1},
)
TIMEOUT = Kind(_timeout, 'more than 0 seconds, or a duration like "10m"', _DURATION_SCHEMA)
WAIT = Kind(_wait, 'seconds, or a duration like "120s"', _DURATION_SCHEMA)
COUNT = _whole(1, None, "a whole number, 1 or more")
# A row costs KV and mask memory even when idle; no machine of one user decodes this many at once.
BATCH = _whole(1, 256, "a whole number from 1 to 256")
CHUNK = _whole(1, 16384, "a whole number from 1 to 16384")
TEMPERATURE = Kind(
    _checked(float, lambda x: 0 <= x <= 2),
    "a number from 0 to 2",
    {"type": "number", "minimum": 0, "maximum": 2},
    _number_text(float),
)
TOP_P = Kind(
    _checked(float, lambda x: 0 < x <= 1),
    "a number above 0 and at most 1",
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    _number_text(float),
)
TOP_K = _whole(0, None, "a whole number, 0 (off) or more")
FLAG = Kind(_checked(bool, lambda _: True), "true or false", {"type": "boolean"}, _flag_text)
AUTO_COUNT = _or_auto(COUNT)
AUTO_SIZE = _or_auto(
    Kind(_some_size, "bytes or a size like 5GB", {"type": ["string", "integer"], "minimum": 1})
)
SWITCH = _or_auto(FLAG)
# A queue longer than this only makes reads wait in the kernel instead of here.
DEPTH = _or_auto(_whole(1, 256, "a whole number from 1 to 256"))
IO_MODE = _choice(AUTO, "direct", "uncached", "buffered")
WRITE_MODE = _choice(AUTO, "direct", "assign")
MTP_MODE = _choice(AUTO, "on", "off")
EXPERTS = _choice("stream", "resident")
# Of a layer's slots: what is needed next must find room among the others.
PINS = Kind(
    _checked(float, lambda x: 0 <= x <= 0.5),
    "a number from 0 to 0.5",
    {"type": "number", "minimum": 0, "maximum": 0.5},
    _number_text(float),
)
PROBABILITY = Kind(
    _checked(float, lambda x: 0 <= x <= 1),
    "a number from 0 to 1",
    {"type": "number", "minimum": 0, "maximum": 1},
    _number_text(float),
)
TOOL_FAMILY = _one_of(TOOL_FAMILY_NAMES)
REASONING_FAMILY = _one_of(REASONING_FAMILY_NAMES)
ADAPTERS = Kind(
    _adapters,
    'an adapter\'s id, or several joined with +, like "a+b"',
    {"type": "string", "minLength": 1},
)
PATH = Kind(_checked(str, bool), "the path of a folder", {"type": "string", "minLength": 1})
MODEL_NAME = Kind(
    _checked(str, is_model_name),
    "the name of a model: a folder's name or org/name",
    {"type": "string", "minLength": 1},
)
