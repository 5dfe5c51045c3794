"""The worker's handle on its compiling process: started, spoken to, killed. The event loop's alone.

A helper lives through any number of jobs and is given up whole: there is no stopping one job. It has a tether
to this process, so that a killed worker leaves none behind.

It is not started through the event loop, because uvloop does that with fork(), and fork() runs the handlers
that libraries leave for it: OpenBLAS ends its threads there, in the process that forks, and a product that
the engine is in the middle of waits for ever for its other half. `subprocess` starts with vfork() on Linux,
which runs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from mlxpool.worker.grammar import messages

# A process whose tether is cut ends within milliseconds, unless somebody has stopped it.
_END_S = 2.0

COMMAND = (sys.executable, "-m", "mlxpool.worker.grammar.compile")

# One that was killed is forgotten by who killed it, and asyncio remembers tasks and readers weakly only.
_LIVES: set[asyncio.Task[None]] = set()


class _Spawned(NamedTuple):
    """A process, this end of what it reads and writes, and of its tether."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    tether: int


class Helper:
    """One process. `answered` is called for each of its messages, `gone` once when it ends by itself; after
    `kill` neither is."""

    def __init__(
        self,
        answered: Callable[[Helper, messages.FromCompiler], None],
        gone: Callable[[Helper], None],
    ) -> None:
        self.is_ready = False
        self._answered = answered
        self._gone = gone
        self._killed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._life: asyncio.Task[None] | None = None

    def start(self, vocabulary: Callable[[], messages.Vocabulary], command: Sequence[str] = COMMAND) -> None:
        """Start the process and hand it the vocabulary, which a thread makes; returns at once."""
        self._life = asyncio.get_running_loop().create_task(self._live(vocabulary, command))
        _LIVES.add(self._life)
        self._life.add_done_callback(_LIVES.discard)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, job: messages.Job) -> None:
        """Hand in a job; only when it is ready."""
        assert self._writer is not None
        self._writer.write(messages.frame(job))

    def kill(self) -> None:
        """End it now, whatever it is doing."""
        if not self._killed:
            self._killed = True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def ended(self) -> None:
        """Wait until the process is gone."""
        if self._life is not None:
            await asyncio.wait({self._life})

    async def _live(self, vocabulary: Callable[[], messages.Vocabulary], command: Sequence[str]) -> None:
        spawned: _Spawned | None = None
        try:
            spawned = await asyncio.to_thread(_spawn, command)
            self._process = spawned.process
            if self._killed:
                self._kill()
            else:
                await self._converse(spawned.channel, vocabulary)
        except (OSError, EOFError, msgspec.MsgspecError) as err:
            if not self._killed:
                sys.stderr.write(f"the grammar compiler's process is gone: {type(err).__name__}: {err}\n")
        finally:
            unexpected = not self._killed
            if spawned is not None:
                # Without its tether it ends, if it hasn't.
                os.close(spawned.tether)
                await self._wait(spawned.process)
                if self._writer is None:
                    spawned.channel.close()
                else:
                    self._writer.close()
            self._killed = True
            if unexpected:
                self._gone(self)

    async def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            await asyncio.to_thread(process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            await asyncio.to_thread(process.wait)

    async def _converse(self, channel: socket.socket, vocabulary: Callable[[], messages.Vocabulary]) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=channel)
        # A socket holds less than this: written on while the process imports.
        self._writer.write(await asyncio.to_thread(lambda: messages.frame(vocabulary())))
        decoder = msgspec.msgpack.Decoder(messages.FromCompiler)
        while True:
            try:
                length = int.from_bytes(await reader.readexactly(messages.LENGTH_BYTES), "big")
                if length > messages.FRAME_LIMIT_BYTES:
                    raise EOFError(f"a message of {length} bytes")
                message = decoder.decode(await reader.readexactly(length))
            except asyncio.IncompleteReadError as err:
                raise EOFError("it ended") from err
            if self._killed:
                return
            if isinstance(message, messages.Ready):
                self.is_ready = True
            self._answered(self, message)


def _spawn(command: Sequence[str]) -> _Spawned:
    """Start it; takes until it runs. Raises OSError."""
    channel, its_end = socket.socketpair()
    with its_end, contextlib.ExitStack() as undo:
        undo.enter_context(channel)
        tether_read, tether = os.pipe()
        undo.callback(os.close, tether)
        try:
            process = subprocess.Popen(
                [*command, "--tether-fd", str(tether_read)],
                stdin=its_end.fileno(),
                stdout=its_end.fileno(),
                pass_fds=(tether_read,),
            )
        finally:
            os.close(tether_read)
        undo.pop_all()
    return _Spawned(process, channel, tether)
