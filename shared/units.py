"""Sizes, durations and shares as people write them in config files and on command lines.

A size is bytes, or a number with a unit: decimal (`48GB`) or binary (`32GiB`). A duration is seconds,
or a number with `ms`, `s`, `m`, `h` or `d`. A share is a percentage of something known later (`75%`).
Every parser raises ValueError with a message that says what would work.
"""

from __future__ import annotations

import math
import re

from mlxpool.shared.text import cut

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
# What a file's size can be; beyond it arithmetic in floats would fail somewhere later.
MAX_SIZE_BYTES = 2**63 - 1
_DURATION_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: str | int) -> int:
    """Bytes of a size: 1048576, "48GB", "32GiB". Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"not a size: {value!r}; use bytes or a unit, like 48GB or 32GiB")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size can't be negative: {value}")
        if value > MAX_SIZE_BYTES:
            raise _too_large(value)
        return value
    match = _NUMBER_UNIT.fullmatch(value)
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size: {value!r}; use bytes or a unit, like 48GB or 32GiB")
    size = float(match[1]) * unit
    if size > MAX_SIZE_BYTES:
        raise _too_large(value)
    return int(size)


def parse_duration(value: str | float) -> float:
    """Seconds of a duration: 90, "15m", "1.5h". Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"not a duration: {value!r}; use seconds or a unit, like 90s, 15m or 1h")
    if isinstance(value, int | float):
        if (isinstance(value, float) and not math.isfinite(value)) or value < 0:
            raise ValueError(f"a duration must be zero or more seconds: {value}")
        return _finite(value, value)
    match = _NUMBER_UNIT.fullmatch(value)
    unit = _DURATION_UNITS_S.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a duration: {value!r}; use seconds or a unit, like 90s, 15m or 1h")
    return _finite(float(match[1]) * unit, value)


def _finite(number: float, written: object) -> float:
    """As a float. Raises ValueError for what none can hold."""
    try:
        if math.isfinite(number):
            return float(number)
    except OverflowError:
        pass
    raise _too_large(written)


def _too_large(written: object) -> ValueError:
    return ValueError(f"too large a number: {cut(str(written))}")


def parse_budget(value: str | int, total_bytes: int) -> int:
    """Bytes of a budget, which may also be a share of `total_bytes`: "75%". Raises ValueError."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            percent = float(value.strip()[:-1])
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            raise ValueError(f"not a share: {value!r}; use more than 0% and at most 100%")
        return int(total_bytes * percent / 100)
    try:
        size = parse_size(value)
    except ValueError:
        raise ValueError(
            f"not a size or a share: {value!r}; use bytes, a size like 48GB or a share like 75%"
        ) from None
    if size == 0:
        raise ValueError("a budget of 0 holds no model; use a size like 48GB or a share like 75%")
    return size


def size_text(size_bytes: int) -> str:
    """A size as a config file would say it, exactly: 8GB, 32MiB, 1000001."""
    if size_bytes == 0:
        return "0"
    fitting = [(size_bytes // scale, unit) for unit, scale in _SIZE_UNITS.items() if size_bytes % scale == 0]
    number, unit = min(fitting)
    shown = {"": "", "B": "", "KB": "kB"}.get(unit, unit.replace("I", "i"))
    return f"{number}{shown}"


def format_size(size_bytes: float) -> str:
    """A size for people: 1.2 GB (decimal units, as disks and config files count)."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def size_to_ask_for(size_bytes: int) -> str:
    """The least size in format_size's digits that is no less, as settings take it: 572.1MB."""
    scale, unit = next(
        (scale, unit)
        for unit, scale in (("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
        if size_bytes < 1000 * scale or unit == "TB"
    )
    tenths = -(-size_bytes * 10 // scale)
    # The nearest float may be a byte less.
    while parse_size(asked := f"{tenths // 10}.{tenths % 10}{unit}") < size_bytes:
        tenths += 1
    return asked


def format_count(count: int, noun: str) -> str:
    """A count for people: 1 request, 2 requests, 0 crashes."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'sh', 'ch')) else 's'}"


def format_duration(seconds: float) -> str:
    """A duration for people: 0.8 s, 45 s, 12 min, 3.4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
