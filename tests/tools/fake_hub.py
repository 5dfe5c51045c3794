"""A local server that speaks as much of the Hugging Face Hub as `huggingface_hub` uses for models.

    with FakeHub() as hub:
        hub.add("org/name", folder)
        run(..., env={"HF_ENDPOINT": hub.url})

Model info with blobs, tree listings, and files: small ones are sent by the hub itself, large ones (weights)
by a redirect to a second origin, as the real one does with its CDN, which must not see anyone's token.
Faults are asked for by file: a connection that is cut, bytes that are wrong, a stream that is held until the
test lets it go. What was asked and how many bytes of which file were sent is kept.

As a program, `python -m tests.tools.fake_hub FOLDER…` serves each FOLDER as `fake/<its name>` until it ends.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

GOOD_TOKEN = "hf_good"
# A token that exists, of an account that has accepted no licence.
OTHER_TOKEN = "hf_other"
LARGE_BYTES = 1 << 20
CHUNK_BYTES = 64 * 1024
HOLD_TIMEOUT_S = 60.0


@dataclass
class Fault:
    """What goes wrong with a file. times: how many requests it hits.

    cut_after: the connection ends after so many bytes of the body. flip: the byte at this offset of the file
    is wrong. hold_after: the stream stops after so many bytes until `FakeHub.release`. status: is answered.
    """

    times: int = 1
    cut_after: int | None = None
    flip: int | None = None
    hold_after: int | None = None
    status: int | None = None


@dataclass
class Repository:
    """access: "public", "gated" (listed, but files need a token that has accepted) or "private".

    "portal": a network's login page is in the way. "broken": the hub fails, in several lines.

    ranges: without them a file is sent whole whatever was asked for. claimed: sizes that are listed in place
    of the true ones.
    """

    files: dict[str, bytes]
    access: str = "public"
    ranges: bool = True
    claimed: dict[str, int] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, revision: str = "main") -> str:
        """Make what `files` holds now the commit of a revision; returns it."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path in sorted(self.files):
            digest.update(path.encode() + b"\0" + self.files[path])
        self.commits[digest.hexdigest()] = dict(self.files)
        self.revisions[revision] = digest.hexdigest()
        return digest.hexdigest()


@dataclass
class Asked:
    """One request. start: of the range that was asked for."""

    method: str
    path: str
    start: int
    authorized: bool
    at_cdn: bool


class FakeHub:
    """A hub on a port of its own, and its CDN on another. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, Fault] = {}
        self.asked: list[Asked] = []
        self.sent: Counter[str] = Counter()
        self.holding = threading.Event()
        self.released = threading.Event()
        self._servers = [self._serve(at_cdn=False), self._serve(at_cdn=True)]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; the address refuses connections from now on."""
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, name: str, folder: Path, access: str = "public") -> Repository:
        """A repository of a folder's files, committed as main."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.repositories[name] = Repository(files, access)
        self.repositories[name].commit()
        return self.repositories[name]

    def release(self) -> None:
        """Let streams that are held go on, and hold no more."""
        self.released.set()

    def gets(self, file: str) -> list[int]:
        """The starts of the ranges in which a file's bytes were asked for."""
        return [
            asked.start
            for asked in self.asked
            if asked.method == "GET" and asked.path.endswith(f"/{file}") and asked.at_cdn
        ]

    def _serve(self, *, at_cdn: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub, Handler.at_cdn = hub, at_cdn
        server = _Server(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed is what these tests are about; anything else is told."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    at_cdn: bool
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Tests read what a hub was asked from `asked`."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        match = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        authorization = self.headers.get("Authorization", "")
        start = int(match[1]) if match else 0
        self.hub.asked.append(Asked(self.command, path, start, bool(authorization), self.at_cdn))
        token = authorization.removeprefix("Bearer ")
        if token and not self.at_cdn and token not in (GOOD_TOKEN, OTHER_TOKEN):
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name = api[1] if api else file[1] if file else ""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.access == "private" and token != GOOD_TOKEN and not self.at_cdn):
            # The real one doesn't tell a stranger what is missing and what is private.
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return
        revision = (api[3] if api else file[2] if file else None) or "main"
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if repository.access == "portal":
            self._send(200, b"<html>Welcome</html>", {"Content-Type": "text/html"})
        elif repository.access == "broken":
            self._refuse(500, "", "Internal\nerror")
        elif api:
            body = (
                self._tree(repository, commit) if api[2] == "tree" else self._info(name, repository, commit)
            )
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif file:
            self._file(repository, commit, file[3], start, token)

    def _info(self, name: str, repository: Repository, commit: str) -> dict[str, Any]:
        siblings = []
        for entry in self._tree(repository, commit):
            sibling = {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
            if lfs := entry.get("lfs"):
                sibling["lfs"] = {
                    "sha256": lfs["oid"],
                    "size": lfs["size"],
                    "pointerSize": lfs["pointerSize"],
                }
            siblings.append(sibling)
        return {
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": repository.access == "private",
            "gated": "auto" if repository.access == "gated" else False,
            "siblings": siblings,
        }

    def _tree(self, repository: Repository, commit: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for path, content in sorted(repository.commits[commit].items()):
            size = repository.claimed.get(path, len(content))
            entry: dict[str, Any] = {
                "type": "file",
                "path": path,
                "size": size,
                "oid": _git_sha1(content),
            }
            if _is_large(path, content):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
            entries.append(entry)
        return entries

    def _file(self, repository: Repository, commit: str, path: str, start: int, token: str) -> None:
        content = repository.commits[commit].get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if repository.access == "gated" and token != GOOD_TOKEN and not self.at_cdn:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model is restricted: {path}")
            return
        large = _is_large(path, content)
        tag = hashlib.sha256(content).hexdigest() if large else _git_sha1(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        if large and not self.at_cdn:
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{tag}"'}
            self._send(302, b"", {**headers, "Location": self.hub.cdn_url + self.path})
            return
        self._content(path, content, start if repository.ranges else 0, headers)

    def _content(self, path: str, content: bytes, start: int, headers: dict[str, str]) -> None:
        fault = self.hub.faults.get(path) if self.command == "GET" else None
        if fault is None or fault.times <= 0:
            fault = Fault()
        fault.times -= 1
        if fault.status is not None:
            self._send(fault.status, b"", {})
            return
        if fault.flip is not None:
            content = content[: fault.flip] + bytes([content[fault.flip] ^ 1]) + content[fault.flip + 1 :]
        status, body = 200, content
        if start > 0:
            if start >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            status, body = 206, content[start:]
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(status, body, headers, path, fault)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], path: str = "", fault: Fault | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        fault = fault or Fault()
        try:
            for at in range(0, len(body), CHUNK_BYTES):
                if fault.hold_after is not None and at >= fault.hold_after and not self.hub.released.is_set():
                    self.wfile.flush()
                    self.hub.holding.set()
                    self.hub.released.wait(HOLD_TIMEOUT_S)
                chunk = body[at : at + CHUNK_BYTES]
                if fault.cut_after is not None and at + len(chunk) > fault.cut_after:
                    chunk = chunk[: fault.cut_after - at]
                    self.wfile.write(chunk)
                    self.hub.sent[path] += len(chunk)
                    self.close_connection = True
                    return
                self.wfile.write(chunk)
                self.hub.sent[path] += len(chunk)
        except OSError:
            self.close_connection = True  # the other side is gone

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message.replace("\n", " "), **({"X-Error-Code": code} if code else {})}
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {**headers, "Content-Type": "application/json"})


def _is_large(path: str, content: bytes) -> bool:
    return path.endswith(".safetensors") or len(content) >= LARGE_BYTES


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    with FakeHub() as served:
        for argument in sys.argv[1:]:
            served.add(f"fake/{Path(argument).name}", Path(argument))
        print(f"HF_ENDPOINT={served.url}", flush=True)
        threading.Event().wait()
