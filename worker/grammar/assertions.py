"""Assertions about texts and numbers in the compiler's terms, and which of them it would ignore. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mlxpool.shared.api.read import quoted
from mlxpool.worker.grammar import keywords, pattern
from mlxpool.worker.grammar.place import Place

# Told of a keyword that would not be enforced, and why.
Report = Callable[[str, str], None]


class InvalidSchema(ValueError):
    """It is no JSON schema; the message says where and what would be."""


def string(given: dict[str, Any], place: Place, report: Report) -> dict[str, Any]:
    """The assertions about texts, as the compiler takes them. Raises InvalidSchema for what is no pattern."""
    out: dict[str, Any] = {}
    lengths = [word for word in ("minLength", "maxLength") if word in given]
    if "pattern" in given:
        fault = pattern.unsupported(given["pattern"], in_json=True)
        if fault is not None and fault.invalid:
            raise InvalidSchema(
                f"pattern{place.at} is no regular expression: {fault.what} in {quoted(given['pattern'])}"
            )
        if fault is None:
            out["pattern"] = pattern.whole(given["pattern"])
        else:
            report("pattern", fault.what)
    for word in lengths:
        if "pattern" in out:
            report(word, "beside pattern")
        else:
            out[word] = int(given[word])
    if given.get("format") in keywords.FORMATS:
        if out:
            report("format", f"beside {', '.join(out)}")
        else:
            out["format"] = given["format"]
    return out


def number(given: dict[str, Any], report: Report, *, is_integer: bool) -> dict[str, Any]:
    """The assertions about numbers, as the compiler takes them; is_integer: other numbers are ruled out."""
    out: dict[str, Any] = {}
    high = keywords.INTEGER_HIGH if is_integer else keywords.NUMBER_HIGH
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if word not in given:
            continue
        bound = given[word]
        if abs(bound) >= high:
            report(word, "a bound larger than its numbers")
            continue
        if is_integer and bound != int(bound):
            # The next whole number inside is allowed, whether the bound itself was or not.
            if word.endswith("inimum"):
                out["minimum"] = max(math.ceil(bound), out.get("minimum", -high))
            else:
                out["maximum"] = min(math.floor(bound), out.get("maximum", high))
        else:
            out[word] = int(bound) if is_integer else bound
    if "multipleOf" in given:
        step = given["multipleOf"]
        if not is_integer or step != int(step) or step > keywords.MULTIPLE_HIGH:
            report(
                "multipleOf",
                f"of anything but whole numbers up to {keywords.MULTIPLE_HIGH} on integers",
            )
        elif out:
            report("multipleOf", f"beside {', '.join(out)}")
        else:
            out["multipleOf"] = int(step)
    return out
