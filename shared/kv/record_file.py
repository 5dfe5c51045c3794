"""One part of a record as a file: safetensors, with everything in its header that tells it from another.

The data are covered by a hash per tensor, and those by a hash over the header, length and padding included,
which stands at a fixed place in it and counts as zeros while it is computed. The tensors fill the file to
its last byte without a gap. So a flipped bit anywhere, a missing tail and a byte too many are all noticed,
the ones in the header before a byte of data is read. Hashes are xxh3-128: they guard against faults of disks
and of programs, not against somebody who may write to the folder.

Nothing here keeps anything; descriptors and buffers are the caller's.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from mlxpool.shared.checkpoint import DTYPE_BITS
from mlxpool.shared.kv.names import FileName, Kind, parse

# What to do about a file that can't be read: delete it, or leave it and do as if it weren't there.
Verdict = Literal["delete", "forget"]

# Faults of this process or of the moment; the file may be whole.
_NOT_THE_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ENOENT}

# Raised with every change that makes older files mean something else.
FORMAT = "mlxpool-kv-1"

# One read takes in nearly every header: 64 tensors and 256 ids come to 12 kB.
FIRST_READ_BYTES = 32 * 1024
# Far above any header that is written, far below what a flipped length could ask for.
MAX_HEADER_BYTES = 8 * 1024 * 1024
# Data begin at a page: writes that straddle pages cost a fifth more.
_ALIGN_BYTES = 4096
# macOS refuses a read of 2 GiB; this much at once also lets a hash find its bytes in the processor's cache.
READ_STEP_BYTES = 8 * 1024 * 1024
# Buffers that one call may take: the least that both systems allow.
MAX_BUFFERS = 1024

_LENGTH_BYTES = 8
_OPENING = b'{"__metadata__":{"header":"'
_BLANK = b"0" * 32
_HASH_BEGIN = _LENGTH_BYTES + len(_OPENING)
_HASH_END = _HASH_BEGIN + len(_BLANK)


class RecordError(Exception):
    """The file is not the record it is called, or not whole. One line."""


def verdict_on(problem: Exception) -> Verdict:
    """What becomes of the file that could not be read."""
    if isinstance(problem, RecordError):
        return "delete"
    if isinstance(problem, OSError) and problem.errno not in _NOT_THE_FILES:
        return "delete"
    return "forget"


class Tensor(msgspec.Struct, frozen=True):
    """dtype: as safetensors calls it, a key of checkpoint.DTYPE_BITS."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class Head(msgspec.Struct, frozen=True):
    """What a file says before its data.

    fingerprint: of the model, the folder's name. ids: the record's own tokens. tensors: in the order of their
    data. scalars: by leaf, what a state needs beside tensors. hashes: of each tensor's bytes, empty in a head
    that is yet to be written. data_start: where the first tensor's bytes begin in the file.
    """

    file: FileName
    fingerprint: str
    ids: tuple[int, ...]
    tensors: dict[str, Tensor]
    scalars: dict[str, list[int]]
    hashes: dict[str, str] = {}
    data_start: int = 0

    @property
    def data_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    def offsets(self) -> dict[str, int]:
        """Where each tensor's bytes begin in the file."""
        places, place = {}, self.data_start
        for name, tensor in self.tensors.items():
            places[name] = place
            place += tensor.bytes
        return places


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """All values are strings: safetensors allows nothing else there."""

    header: str
    format: str
    fingerprint: str
    name: str
    parent: str
    start: str
    end: str
    kind: Kind
    ids: str
    scalars: str
    hashes: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(_Metadata)
_ENTRY = msgspec.json.Decoder(_Entry)
_SCALARS = msgspec.json.Decoder(dict[str, list[int]])
_HASHES = msgspec.json.Decoder(dict[str, str])


def hash_bytes(data: bytes | memoryview) -> str:
    """The hash of a tensor's bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def header_bytes(head: Head) -> bytes:
    """The file's first bytes, up to its data: as many whatever the hashes are, and with none yet."""
    hashes = {name: head.hashes.get(name, _BLANK.decode()) for name in head.tensors}
    metadata = _Metadata(
        header=_BLANK.decode(),
        format=FORMAT,
        fingerprint=head.fingerprint,
        name=head.file.name.hex(),
        parent=head.file.parent.hex(),
        start=str(head.file.start),
        end=str(head.file.end),
        kind=head.file.kind,
        ids=" ".join(map(str, head.ids)),
        scalars=msgspec.json.encode(head.scalars).decode(),
        hashes=msgspec.json.encode(hashes).decode(),
    )
    table: dict[str, _Metadata | _Entry] = {"__metadata__": metadata}
    begin = 0
    for name, tensor in head.tensors.items():
        end = begin + tensor.bytes
        table[name] = _Entry(tensor.dtype, tensor.shape, (begin, end))
        begin = end
    text = msgspec.json.encode(table)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN_BYTES)
    blank = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    digest = xxhash.xxh3_128_hexdigest(blank).encode()
    return blank[:_HASH_BEGIN] + digest + blank[_HASH_END:]


def encode(head: Head, buffers: Mapping[str, memoryview]) -> list[bytes | memoryview]:
    """A whole file, in pieces to write one behind the other. buffers: each tensor's bytes, flat."""
    hashes = {name: hash_bytes(buffers[name]) for name in head.tensors}
    first = header_bytes(msgspec.structs.replace(head, hashes=hashes))
    return [first, *(buffers[name] for name in head.tensors)]


def read_head(descriptor: int, file: FileName, fingerprint: str) -> Head:
    """The head of an open file that is called `file` and lies in the folder of `fingerprint`.

    Raises RecordError where it is another record, model or format, or not whole; OSError.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise RecordError("not a regular file")
    raw = _read_header(descriptor, status.st_size)
    blank = raw[:_HASH_BEGIN] + _BLANK + raw[_HASH_END:]
    if raw[_LENGTH_BYTES:_HASH_BEGIN] != _OPENING:
        raise RecordError("no record of a prompt cache")
    if xxhash.xxh3_128_hexdigest(blank).encode() != raw[_HASH_BEGIN:_HASH_END]:
        raise RecordError("its header is not as it was written")
    try:
        head = _decode(raw, file)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, KeyError) as problem:
        raise RecordError(f"its header can't be read: {problem}") from None
    if head.fingerprint != fingerprint:
        raise RecordError("the record of another model")
    if head.data_start + head.data_bytes != status.st_size:
        raise RecordError(f"{status.st_size} bytes where {head.data_start + head.data_bytes} were written")
    return head


def _read_header(descriptor: int, file_bytes: int) -> bytes:
    raw = os.pread(descriptor, FIRST_READ_BYTES, 0)
    if len(raw) < _HASH_END:
        raise RecordError(f"cut short: {len(raw)} bytes")
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    whole = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or whole > file_bytes or whole < _HASH_END:
        raise RecordError(f"a header of {length} bytes in a file of {file_bytes}")
    while len(raw) < whole:
        more = os.pread(descriptor, whole - len(raw), len(raw))
        if not more:
            raise RecordError(f"cut short: {len(raw)} bytes")
        raw += more
    return raw[:whole]


def _decode(raw: bytes, file: FileName) -> Head:
    table = _TABLE.decode(raw[_LENGTH_BYTES:])
    metadata = _METADATA.decode(table.pop("__metadata__"))
    if metadata.format != FORMAT:
        raise RecordError(f"written in the format {metadata.format!r}")
    said = FileName(
        bytes.fromhex(metadata.name),
        bytes.fromhex(metadata.parent),
        int(metadata.start),
        int(metadata.end),
        metadata.kind,
    )
    if said != file:
        raise RecordError("its name is another record's")
    hashes = _HASHES.decode(metadata.hashes)
    tensors: dict[str, Tensor] = {}
    due = 0
    for name, entry in ((name, _ENTRY.decode(text)) for name, text in table.items()):
        tensor = Tensor(entry.dtype, entry.shape)
        if min(entry.shape, default=0) < 0 or entry.data_offsets != (due, due + tensor.bytes):
            raise RecordError(f"tensor {name!r} lies at {entry.data_offsets}, {due} was due")
        tensors[name] = tensor
        due += tensor.bytes
    if hashes.keys() != tensors.keys():
        raise RecordError("its hashes are not those of its tensors")
    ids = tuple(int(text) for text in metadata.ids.split())
    if len(ids) != file.end - file.start:
        raise RecordError(f"{len(ids)} tokens where its name says {file.end - file.start}")
    return Head(file, metadata.fingerprint, ids, tensors, _SCALARS.decode(metadata.scalars), hashes, len(raw))


def groups(head: Head) -> list[list[str]]:
    """The tensors in runs of about READ_STEP_BYTES: what one call of `read_data` takes."""
    runs: list[list[str]] = []
    filled = 0
    for name, tensor in head.tensors.items():
        if not runs or filled + tensor.bytes > READ_STEP_BYTES:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += tensor.bytes
    return runs


def read_data(
    descriptor: int, head: Head, names: Sequence[str], buffers: Mapping[str, memoryview], check: bool
) -> int:
    """Reads tensors that lie one behind the other into flat, writable bytes; returns how many bytes.

    check: whether their hashes are compared. Raises RecordError; OSError.
    """
    if not names:
        return 0
    place = head.offsets()[names[0]]
    total = _read_exactly(descriptor, [buffers[name] for name in names], place)
    for name in names if check else ():
        if hash_bytes(buffers[name]) != head.hashes[name]:
            raise RecordError(f"tensor {name!r} is not as it was written")
    return total


def _read_exactly(descriptor: int, buffers: Sequence[memoryview], place: int) -> int:
    begin = place
    for batch in _batches(buffers):
        rest = batch
        while rest:
            got = os.preadv(descriptor, rest, place)
            if got <= 0:
                raise RecordError(f"cut short at {place} bytes")
            place += got
            rest = after(rest, got)
    return place - begin


def after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers when their first `done` bytes are dealt with: a call may do less than all."""
    for count, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[count + 1 :]]
        done -= len(buffer)
    return []


def _batches(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Parts of the buffers in order, as many and as large as one call may take; empty ones left out."""
    batch: list[memoryview] = []
    size = 0
    for buffer in buffers:
        for begin in range(0, len(buffer), READ_STEP_BYTES):
            part = buffer[begin : begin + READ_STEP_BYTES]
            if batch and (len(batch) == MAX_BUFFERS or size + len(part) > READ_STEP_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += len(part)
    if batch:
        yield batch


def open_record(path: str | Path) -> int:
    """A descriptor to read from. Never follows a link, never waits for a pipe. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def verify(path: Path, fingerprint: str) -> None:
    """Reads all of a file and compares every hash. Raises RecordError; OSError."""
    file = parse(path.name)
    if file is None:
        raise RecordError("its name is no record's")
    descriptor = open_record(path)
    try:
        head = read_head(descriptor, file, fingerprint)
        for names in groups(head):
            scratch = {name: memoryview(bytearray(head.tensors[name].bytes)) for name in names}
            read_data(descriptor, head, names, scratch, check=True)
    finally:
        os.close(descriptor)
