"""One file from the Hub onto the disk: resumed where it broke, checked before it counts.

The bytes go into a part that is named by the content they should have, so a part can only be gone on with
as what it is. `huggingface_hub`'s own downloader begins every file anew after a kill (each of its runs has
temporary names of its own), and files are gigabytes; so this module reads the stream itself, over the
session that `huggingface_hub` keeps. A file over 50 GB is not handed out in one piece by the Hub at all.

A part is owned by the thread that fetches it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from mlxpool.shared.staging import COPY_BYTES, PullError
from mlxpool.shared.units import format_size

from .plan import RemoteFile
from .remote import explain

# A stream that is silent for so long has broken.
SILENCE_TIMEOUT_S = 30.0
# Waits between tries that brought nothing new; a try that brought bytes begins the list again.
RETRY_WAITS_S = (0.5, 2.0, 5.0, 10.0, 20.0)
# The Hub's or a proxy's own trouble: worth another try.
_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
# How often a file may arrive with another content than the Hub listed, where the fault may be ours: a part
# that was torn by a crash.
_MAX_HEALS = 1


class Stopped(Exception):
    """Another file has failed; this one is left where it is."""


class _Broken(Exception):
    """The stream ended early, or could not be had; says why."""


def fetch(
    repository: str,
    commit: str,
    file: RemoteFile,
    part: Path,
    report: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Make `part` the whole file, its content checked and durable.

    report: called with the bytes that came, negative where some were no good. Raises PullError, Stopped,
    OSError (of the disk).
    """
    for heal in range(_MAX_HEALS + 1):
        was_resumed = _size(part) > 0
        _fill(repository, commit, file, part, report, stop)
        if _is_content_right(part, file):
            return
        report(-file.size_bytes)
        part.unlink()
        if not was_resumed or heal == _MAX_HEALS:
            break
    raise PullError(
        f"{file.path} of {repository} arrived with another content than the Hub lists"
        f" (not {file.content_id[:12]}…); nothing was published: pull again"
    )


def _fill(
    repository: str,
    commit: str,
    file: RemoteFile,
    part: Path,
    report: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Stream until the part has the file's size."""
    url = hf_hub_url(repository, file.path, revision=commit)
    part.touch()
    failures = 0
    while (have := _size(part)) < file.size_bytes:
        if stop.is_set():
            raise Stopped
        try:
            _stream(url, have, file, part, report, stop)
        except (_Broken, httpx2.TransportError) as problem:
            failures = 1 if _size(part) > have else failures + 1
            if failures > len(RETRY_WAITS_S):
                reason = str(problem) or type(problem).__name__
                raise PullError(
                    f"{file.path} of {repository} could not be fetched whole ({reason}); what came is kept:"
                    " pull again"
                ) from None
            stop.wait(RETRY_WAITS_S[failures - 1])
        except HfHubHTTPError as problem:
            raise explain(problem, repository) from None
    with part.open("rb") as file_:
        os.fsync(file_.fileno())


def _stream(
    url: str,
    have: int,
    file: RemoteFile,
    part: Path,
    report: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """One request's worth of bytes, appended to the part."""
    headers = {**build_hf_headers(library_name="mlxpool"), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    elif file.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise PullError(
            f"{file.path} has {format_size(file.size_bytes)}, more than the Hub hands out in one piece; fetch"
            " it with `hf download` into the Hugging Face cache, where mlxpool finds it"
        )
    with get_session().stream("GET", url, headers=headers, timeout=SILENCE_TIMEOUT_S) as response:
        if response.status_code in _PASSING_STATUSES:
            raise _Broken(f"the Hub answered {response.status_code}")
        if response.status_code == 416:
            # The part is longer than what is there now: it can't be of this file.
            report(-have)
            os.truncate(part, 0)
            return
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if have and not _goes_on_at(response, have):
            report(-have)
            os.truncate(part, 0)
        with part.open("ab") as target:
            for chunk in response.iter_bytes(COPY_BYTES):
                target.write(chunk)
                target.flush()
                report(len(chunk))
                if stop.is_set():
                    raise Stopped
                if target.tell() > file.size_bytes:
                    break
    size = _size(part)
    if size > file.size_bytes:
        report(-size)
        os.truncate(part, 0)
        raise _Broken(f"more than its {file.size_bytes} bytes came")
    if size < file.size_bytes:
        raise _Broken(f"the connection ended after {size} of {file.size_bytes} bytes")


def _goes_on_at(response: httpx2.Response, have: int) -> bool:
    """Whether the answer is the rest that was asked for, and not the whole file from its start."""
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
        f"bytes {have}-"
    )


def _is_content_right(part: Path, file: RemoteFile) -> bool:
    """SHA-256 of a large file, git's blob hash of another."""
    if file.sha256 is not None:
        digest, expected = hashlib.sha256(), file.sha256
    else:
        digest, expected = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False), file.git_sha1
    with part.open("rb") as source:
        while block := source.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest() == expected


def _size(part: Path) -> int:
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0
