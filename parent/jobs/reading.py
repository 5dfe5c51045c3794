"""Reading a kind's configuration: every fault of it at once, in words for whoever wrote it. Pure.

What a person sent is read field by field, for one wrong field says nothing of the next. Only a configuration
whose fields are all right is put together, which is when the struct's own `__post_init__` looks at them
together; what the machine has to say to it (`Kind.faults`) comes after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mlxpool.shared.api.read import quoted
from mlxpool.shared.config_values import known
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

from .kinds.kind import Fault
from .shape import describe, shape_of

# Who wrote more wrong fields than this sent something else than a configuration.
MAX_FAULTS = 20
# A file's path is the longest text that a configuration is for; a prompt of pages still has room.
MAX_CONFIG_BYTES = 64 * 1024
# What a kind says of its configuration holds advice; what a client sent in it may be as long as a body.
MAX_PROBLEM_CHARS = 1000


def read_config(config: type[msgspec.Struct], raw: Mapping[str, Any]) -> msgspec.Struct | list[Fault]:
    """The configuration, or everything that is wrong with it."""
    properties = shape_of(config)["properties"]
    faults: list[Fault] = []
    for name in raw:
        if name not in properties:
            # Nearness takes time, and more of them are not shown.
            near = known(cut(name), properties) if len(faults) < MAX_FAULTS else ""
            faults.append(Fault(cut(name), f"unknown, {near}"))
    for field in msgspec.structs.fields(config):
        if field.encode_name in raw:
            value = raw[field.encode_name]
            message = _wrong(value, field.type, properties[field.encode_name])
            if message is not None:
                faults.append(Fault(field.encode_name, message))
        elif field.required:
            faults.append(Fault(field.encode_name, "missing"))
    if faults:
        return faults
    try:
        read = msgspec.convert(raw, config)
    except msgspec.ValidationError as problem:
        return [_of_all(str(problem), properties)]
    if len(msgspec.json.encode(read)) > MAX_CONFIG_BYTES:
        return [Fault("", f"it has more than {MAX_CONFIG_BYTES} bytes; long texts belong in a file")]
    return read


def refusal(faults: Sequence[Fault]) -> ApiError:
    """400 that names them all."""
    told = [f"{_place(fault)}: {cut(fault.message, MAX_PROBLEM_CHARS)}" for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        told.append(f"and {len(faults) - MAX_FAULTS} more")
    return error("invalid_request", "; ".join(told), param=_place(faults[0]))


def _wrong(value: object, type_: Any, values: Mapping[str, Any]) -> str | None:
    """What is wrong with one field's value, and what would work."""
    try:
        read = msgspec.convert(value, type_)
    except msgspec.ValidationError as problem:
        inside = f" ({problem})" if isinstance(value, list | dict) else ""
        return f"{quoted(value)} is not {describe(values)}{inside}"
    except RecursionError:
        return "it is nested too deeply"
    if isinstance(read, str) and "\0" in read:
        return "it holds a character of code 0, which no file's name and no command line can"
    return None


def _of_all(problem: str, properties: Mapping[str, Any]) -> Fault:
    """What `__post_init__` says; where it begins with a field's name and a colon, it is that field's."""
    field, colon, rest = problem.partition(": ")
    return Fault(field, rest) if colon and field in properties else Fault("", problem)


def _place(fault: Fault) -> str:
    return f"config.{fault.field}" if fault.field else "config"
