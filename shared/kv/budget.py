"""One number of bytes for all models and processes, kept at every instant.

Whatever changes the files under the root does so while it holds the lock on the ledger, a file with one
number in it: what everything there takes. A file that is to be written exists, under a name that says its
final size, and counts in full, before its first byte; it gets its own name, and any file is deleted, under
the lock too. So the number and the folder agree whenever nobody holds the lock, and a process that is killed
between the two changes leaves the number too high, never too low. The folder is counted anew when the number
says that there is no room, which also takes away what dead writers left: a budget that is full for a wrong
reason mends itself before anything is evicted.

What is evicted goes a few percent of the budget at a time, because choosing means listing every file.

Somebody may delete the ledger, as any file of a cache. A lock on one that has lost its name is none: who
waited for it takes the lock on the new one, who held it gives up the file that it has made, and counts anew.

A lock ends with its process. One whose holder is stopped is waited for and then given up with an OSError:
the caller stops writing for a while, which is right for every other fault of the disk as well.

Used by any thread; nothing is kept but the two arguments.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mlxpool.shared.kv.eviction import victims
from mlxpool.shared.kv.listing import Listing, Stored, has_writer, ledger_path, list_root
from mlxpool.shared.kv.names import blocks, temp_name

# What is made free beyond the need: one listing then serves hundreds of writes.
_SLACK_SHARE = 32

# A holder lists and deletes for a fraction of a second; one that takes longer is stopped.
LOCK_PATIENCE_S = 5.0
# Who only deletes need not wait.
REMOVE_PATIENCE_S = 0.2
_LOCK_POLL_S = 0.002
# A ledger that is another one each time is no accident; some file systems number a file anew at every look.
_MAX_REOPENS = 5

_DIGITS = 20
# Only the user's own: a cache holds what was said.
FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class Temp(msgspec.Struct):
    """A file that is being written. descriptor: open for writing, locked; its owner closes it. bytes: what it
    counts for."""

    path: str
    descriptor: int
    bytes: int


class Room(msgspec.Struct):
    """The answer of `create`. temp: None where there is no room. evicted: what went to make some."""

    temp: Temp | None
    evicted: list[Stored]


class Budget:
    """max_bytes: in whole blocks, descriptions of folders, unfinished files and the ledger included."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes

    def create(self, folder: str, size_bytes: int, behind: Sequence[bytes] = ()) -> Room:
        """An empty file of this process in a model's folder, with room reserved for all that it will hold.

        behind: names of records that it needs, which are not evicted for it, nor is what they need. Raises
        OSError.
        """
        need = blocks(size_bytes)
        with self.locked() as ledger:
            evicted: list[Stored] = []
            if ledger.used + need > self.max_bytes:
                evicted = self._make_room(ledger, need, folder, behind)
                if ledger.used + need > self.max_bytes:
                    return Room(None, evicted)
            ledger.put(ledger.used + need)
            try:
                return Room(self._open(ledger, folder, need), evicted)
            except OSError:
                with contextlib.suppress(OSError):
                    ledger.put(ledger.used - need)
                raise

    def _open(self, ledger: Ledger, folder: str, need: int) -> Temp:
        (self.root / folder).mkdir(mode=FOLDER_MODE, exist_ok=True)
        if (self.root / folder).is_symlink():
            raise OSError(errno.ELOOP, "the folder is a link", folder)
        path = str(self.root / folder / temp_name(os.getpid(), need, secrets.token_hex(8)))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not ledger.counts():
                raise OSError(errno.ESTALE, "the prompt cache's ledger was deleted")
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return Temp(path, descriptor, need)

    def publish(self, temp: Temp, name: str, *, replace: bool = False) -> bool:
        """Gives a written file its name, unless one that is not to be replaced has it; then this one goes.

        What has the name and is no file is removed, but for a folder that is not empty. False where that is
        so, and where somebody has deleted the folder meanwhile, or the file. Raises OSError.
        """
        target = os.path.join(os.path.dirname(temp.path), name)
        with self.locked() as ledger:
            before = _status(target)
            if before is not None and not stat.S_ISREG(before.st_mode):
                try:
                    os.rmdir(target) if stat.S_ISDIR(before.st_mode) else os.unlink(target)
                except OSError:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(temp.path)
                        ledger.put(ledger.used - temp.bytes)
                    return False
                before = None
            if before is not None and not replace:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp.path)
                    ledger.put(ledger.used - temp.bytes)
                return True
            try:
                os.rename(temp.path, target)
            except FileNotFoundError:
                # It may have been counted anew since then or not: the number stays, too high at worst.
                return False
            if before is not None and stat.S_ISREG(before.st_mode):
                ledger.put(ledger.used - blocks(before.st_size))
            return True

    def discard(self, temp: Temp) -> None:
        """Deletes an unfinished file and gives back what it had reserved. Raises no OSError."""
        self._unlink(temp.path, temp.bytes)

    def remove(self, path: str | Path) -> bool:
        """Deletes a record's file; whether it was there. Raises no OSError."""
        return self._unlink(str(path), None)

    def _unlink(self, path: str, counted: int | None) -> bool:
        gone = False
        # Without the ledger the number stays too high, which mends itself.
        with contextlib.suppress(OSError), self.locked(REMOVE_PATIENCE_S) as ledger:
            size = blocks(os.lstat(path).st_size) if counted is None else counted
            os.unlink(path)
            gone = True
            ledger.put(ledger.used - size)
        if not gone:
            with contextlib.suppress(OSError):
                os.unlink(path)
                gone = True
        return gone

    def used(self) -> int:
        """What the ledger says. Raises OSError."""
        with self.locked() as ledger:
            return ledger.used

    def _make_room(self, ledger: Ledger, need: int, folder: str, behind: Sequence[bytes]) -> list[Stored]:
        listing = reconcile(ledger, self.root)
        over = ledger.used + need - self.max_bytes
        if over <= 0:
            return []
        chosen = victims(listing.records, over + self.max_bytes // _SLACK_SHARE, folder, behind)
        if sum(stored.bytes for stored in chosen) < over:
            return []
        return evict(ledger, chosen)

    @contextlib.contextmanager
    def locked(self, patience_s: float = LOCK_PATIENCE_S) -> Iterator[Ledger]:
        """The ledger, for as long as nobody else has it. Raises OSError."""
        self.root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = _open_locked(ledger_path(self.root), patience_s)
        try:
            ledger = Ledger(descriptor, self.root)
            yield ledger
            counted = ledger.counts()
        finally:
            # A process that was forked meanwhile holds the file open too: closing alone would not do.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        if not counted:
            with self.locked(patience_s) as anew:
                reconcile(anew, self.root)


class Ledger:
    """The number, while the lock is held. Raises OSError where it is lost and can't be counted."""

    def __init__(self, descriptor: int, root: Path) -> None:
        self._descriptor = descriptor
        self._path = ledger_path(root)
        text = os.pread(descriptor, _DIGITS + 1, 0)
        if len(text) == _DIGITS and text.isdigit():
            self.used = int(text)
            return
        listing = _count(root)
        if listing.unread:
            raise listing.unread[0]
        self.put(listing.bytes)

    def counts(self) -> bool:
        """Whether it is still the one that everybody looks at. Raises OSError."""
        return _is_at(self._descriptor, self._path)

    def put(self, used: int) -> None:
        """Writes it down. Raises OSError; the number is then as before."""
        used = max(used, 0)
        os.pwrite(self._descriptor, b"%0*d" % (_DIGITS, used), 0)
        self.used = used


def reconcile(ledger: Ledger, root: Path) -> Listing:
    """Counts the files anew, without what dead writers have left, which is deleted. Raises OSError.

    What can't be listed still takes its room: the number is then lowered by what was deleted only.
    """
    listing = _count(root)
    used = listing.bytes
    if listing.unread:
        used = max(used, ledger.used - sum(temp.name.bytes for temp in listing.reaped))
    ledger.put(used)
    return listing


def _count(root: Path) -> Listing:
    listing = list_root(root)
    writing = []
    for temp in listing.unfinished:
        if has_writer(temp) or not _gone(temp.path):
            writing.append(temp)
        else:
            listing.reaped.append(temp)
    listing.unfinished = writing
    return listing


def evict(ledger: Ledger, chosen: list[Stored]) -> list[Stored]:
    """Deletes records; returns those that are gone by now. Raises OSError."""
    gone = [stored for stored in chosen if _gone(stored.path)]
    ledger.put(ledger.used - sum(stored.bytes for stored in gone))
    return gone


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _gone(path: str) -> bool:
    """Deletes a file; whether none is there any more."""
    try:
        os.unlink(path)
    except OSError as problem:
        return isinstance(problem, FileNotFoundError)
    return True


def _open_locked(path: Path, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    for _ in range(_MAX_REOPENS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
        try:
            _lock(descriptor, deadline)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.ESTALE, "the prompt cache's ledger is another file each time")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as problem:
            if problem.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR):
                raise
        if time.monotonic() >= deadline:
            raise OSError(errno.EAGAIN, "another process holds the prompt cache's ledger")
        time.sleep(_LOCK_POLL_S)
