"""A lean client of many chat streams at once, in a process of its own.

It reads and counts and does nothing else, so that on two cores it is not what is measured: sockets through
one selector, big reads, chunk framing followed exactly (a count that guesses at split events would hide a
lost one). Prints `started` when every stream has its first event, then one JSON line, `Counted`.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
import time

import msgspec

# Big enough that the kernel's socket buffer is emptied in one read.
READ_BYTES = 1 << 18


class Counted(msgspec.Struct):
    """seconds: from first byte sent to last byte read. events: per stream. broken: what went wrong."""

    seconds: float
    cpu_s: float
    events: list[int]
    bytes_read: int
    broken: list[str]


class Stream:
    """One answer: its framing and its count of events."""

    def __init__(self) -> None:
        self.events = 0
        self.status = b""
        self.complete = False
        self._raw = b""
        self._last = b""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes off the socket. Raises ValueError when they are no chunked answer."""
        raw = self._raw + data if self._raw else data
        at = 0
        if not self.status:
            end = raw.find(b"\r\n\r\n")
            if end < 0:
                self._raw = raw
                return
            self.status = raw[: raw.index(b"\r\n")]
            if b" 200 " not in self.status or b"chunked" not in raw[:end].lower():
                raise ValueError(f"no stream: {raw[:500].decode('latin-1')}")
            at = end + 4
        while (line_end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:line_end], 16)
            start = line_end + 2
            if len(raw) < start + size + 2:
                break
            at = start + size + 2
            if size == 0:
                self.complete = self._tail.endswith(b"data: [DONE]\n\n")
                break
            self._count(raw[start : start + size])
        self._raw = raw[at:]

    def _count(self, payload: bytes) -> None:
        self.events += payload.count(b"\n\n")
        if self._last == b"\n" and payload.startswith(b"\n"):
            self.events += 1
        self._last = payload[-1:]
        self._tail = (self._tail + payload[-32:])[-32:]


def connect(target: str) -> socket.socket:
    """A connection to a UNIX socket's path or to a loopback port given as digits."""
    if target.isdigit():
        return socket.create_connection(("127.0.0.1", int(target)))
    client = socket.socket(socket.AF_UNIX)
    client.connect(target)
    return client


def chat_request(target: str, model: str, prompt: str, **fields: object) -> bytes:
    """The bytes of a streamed chat request."""
    chat = {"model": model, "stream": True, "messages": [{"role": "user", "content": prompt}], **fields}
    body = msgspec.json.encode(chat)
    host = f"127.0.0.1:{target}" if target.isdigit() else "worker"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def count(plan: list[tuple[str, str, int]], timeout_s: float) -> Counted:
    """Runs (target, model, streams) all at once to their ends."""
    selector = selectors.DefaultSelector()
    streams: list[Stream] = []
    broken: list[str] = []
    ready = [
        (connect(target), chat_request(target, model, f"stream {n}"))
        for target, model, n_streams in plan
        for n in range(n_streams)
    ]
    start = time.monotonic()
    bytes_read = 0
    for client, request in ready:
        streams.append(Stream())
        selector.register(client, selectors.EVENT_READ, streams[-1])
        client.sendall(request)
    started = False
    while selector.get_map():
        batch = selector.select(timeout_s)
        if not batch:
            broken.append(f"nothing to read for {timeout_s:.0f} s")
            break
        for key, _ in batch:
            reader, stream = key.fileobj, key.data
            assert isinstance(reader, socket.socket)
            data = reader.recv(READ_BYTES)
            bytes_read += len(data)
            try:
                stream.feed(data)
            except ValueError as err:
                broken.append(str(err))
                data = b""
            if not data or stream.complete:
                selector.unregister(reader)
                reader.close()
        if not started and all(stream.events for stream in streams):
            started = True
            print("started", flush=True)
    seconds = time.monotonic() - start
    broken += [f"stream {n} is incomplete" for n, stream in enumerate(streams) if not stream.complete]
    return Counted(seconds, time.process_time(), [stream.events for stream in streams], bytes_read, broken)


def main() -> int:
    """Counts what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("streams", nargs="+", metavar="TARGET,MODEL,COUNT")
    parser.add_argument("--timeout", type=float, default=60.0)
    args = parser.parse_args()
    plan = [(target, model, int(n)) for target, model, n in (entry.split(",") for entry in args.streams)]
    counted = count(plan, args.timeout)
    print(msgspec.json.encode(counted).decode(), flush=True)
    return int(bool(counted.broken))


if __name__ == "__main__":
    sys.exit(main())
