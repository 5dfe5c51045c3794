"""What a prompt cache's files are called. Pure.

The files are the index: everything a start needs is in a name, so that no file is opened before it is asked
for. A record's file is `{name}.{parent}.{start}.{end}.{kind}.safetensors`, both hashes as 32 hex digits. A
file that is being written is `.writing-{pid}-{bytes}-{nonce}`: its writer, and what it will take when it is
whole, which is what the budget counts from the moment the file exists. A model's folder is called by its
fingerprint. There is one spelling of each: a name that would be written otherwise is foreign.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Kind = Literal["slice", "state"]

SUFFIX = ".safetensors"
TEMP_PREFIX = ".writing-"
ABOUT_FILE = "about.json"
LEDGER_FILE = "ledger"

# What a file system hands out at once: sizes are counted in these, so that a budget holds in `du` too.
BLOCK_BYTES = 4096

_HASH = "[0-9a-f]{32}"
# Nine digits keep every place far below what a 32-bit offset in a cache can say.
_PLACE = "0|[1-9][0-9]{0,8}"
_RECORD = re.compile(rf"({_HASH})\.({_HASH})\.({_PLACE})\.({_PLACE})\.(slice|state)\.safetensors")
_TEMP = re.compile(r"\.writing-([1-9][0-9]{0,9})-([1-9][0-9]{0,14})-[0-9a-f]{1,32}")
_FOLDER = re.compile(_HASH)


class FileName(msgspec.Struct, frozen=True):
    """What a record's file name says: positions [start, end) of the prefix that `name` stands for."""

    name: bytes
    parent: bytes
    start: int
    end: int
    kind: Kind


class TempName(msgspec.Struct, frozen=True):
    """What an unfinished file's name says. bytes: what it counts for in the budget."""

    pid: int
    bytes: int


def file_name(file: FileName) -> str:
    """The name of a record's file."""
    return f"{file.name.hex()}.{file.parent.hex()}.{file.start}.{file.end}.{file.kind}{SUFFIX}"


def parse(text: str) -> FileName | None:
    """What a file's name says, None where it is no record's."""
    matched = _RECORD.fullmatch(text)
    if matched is None:
        return None
    name, parent, start, end, kind = matched.groups()
    if int(start) >= int(end):
        return None
    return FileName(
        bytes.fromhex(name),
        bytes.fromhex(parent),
        int(start),
        int(end),
        "slice" if kind == "slice" else "state",
    )


def temp_name(pid: int, size_bytes: int, nonce: str) -> str:
    """The name of a file that this process writes and that takes `size_bytes` of the budget."""
    return f"{TEMP_PREFIX}{pid}-{size_bytes}-{nonce}"


def parse_temp(text: str) -> TempName | None:
    """What an unfinished file's name says, None where it is none."""
    matched = _TEMP.fullmatch(text)
    return None if matched is None else TempName(int(matched[1]), int(matched[2]))


def is_folder(text: str) -> bool:
    """Whether a folder of this name is a model's."""
    return _FOLDER.fullmatch(text) is not None


def blocks(size_bytes: int) -> int:
    """What a file of this size takes, in whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
