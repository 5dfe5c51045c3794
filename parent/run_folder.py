"""Where a running parent keeps what must not outlive it: its lock, its address, sockets and worker records.

One parent per home. The lock is the kernel's (flock): a killed parent holds nothing. The run folder is
short, because a UNIX socket's path may have 103 bytes on macOS, and private (0700, owned by us), because who
can reach a worker's socket can command it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

import msgspec

ADDRESS_FILE = "up.json"
LOCK_FILE = "up.lock"
RUN_FOLDER = "run"
MAX_SOCKET_PATH_BYTES = 103


class Address(msgspec.Struct, frozen=True):
    """home/up.json: which process serves this home, and where. started: seconds since the epoch."""

    pid: int
    started: float
    host: str
    port: int


class RunFolderError(Exception):
    """The server can't run here; the message says what to do."""


def acquire_lock(home: Path) -> IO[str]:
    """Make this process the home's only parent until the file is closed. Raises RunFolderError."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = (home / LOCK_FILE).open("a")
    except OSError as err:
        raise RunFolderError(f"home {home} can't be used: {err}; choose another with --home") from err
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        running = read_address(home)
        who = f" (pid {running.pid}, http://{running.host}:{running.port})" if running else ""
        raise RunFolderError(
            f"a server is running for {home} already{who}; `mlxpool down` stops it, --home takes another home"
        ) from None
    return file


def write_address(home: Path, address: Address) -> None:
    """Publish where this parent serves."""
    path = home / ADDRESS_FILE
    fresh = path.with_name(f".{ADDRESS_FILE}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(address))
    fresh.replace(path)


def read_address(home: Path) -> Address | None:
    """What the last parent of this home published; it may be gone."""
    try:
        return msgspec.json.decode((home / ADDRESS_FILE).read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return None


def remove_address(home: Path) -> None:
    """Stop publishing."""
    (home / ADDRESS_FILE).unlink(missing_ok=True)


def make_run_folder(home: Path) -> Path:
    """The private folder for this home's sockets; made again if something removed it.

    In the home itself where its path is short enough for a socket: what lies in a temporary folder is cleared
    away by others after some days. Raises RunFolderError where another user has it.
    """
    own = home / RUN_FOLDER
    if len(os.fsencode(own / "99999999.sock")) <= MAX_SOCKET_PATH_BYTES:
        _make_private(own)
        return own
    digest = hashlib.blake2b(str(home.resolve()).encode(), digest_size=6).hexdigest()
    for root in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not root or not os.access(root, os.W_OK):
            continue
        folder = Path(root) / f"mlxpool-{os.getuid()}" / digest
        if len(os.fsencode(folder / "99999999.sock")) <= MAX_SOCKET_PATH_BYTES:
            _make_private(folder.parent)
            _make_private(folder)
            return folder
    raise RunFolderError(f"no folder for sockets: {own} is too long a path for one; use a shorter --home")


def _make_private(path: Path) -> None:
    """A folder that only this user can enter. A link, or someone else's, is refused."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as err:
        raise RunFolderError(f"the run folder {path} can't be made: {err}") from err
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunFolderError(f"{path} is no folder of this user; remove it")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
