"""The worker's handle on its compiling process: started, spoken to, killed. The event loop's alone.

A helper lives through any number of jobs and is given up whole: there is no stopping one job. It has a tether
to this process, so that a killed worker leaves none behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from mlxpool.worker.grammar import messages

# A process whose tether is cut ends within milliseconds, unless somebody has stopped it.
_END_S = 2.0

COMMAND = (sys.executable, "-m", "mlxpool.worker.grammar.compile")


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
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None

    def start(self, vocabulary: Callable[[], messages.Vocabulary], command: Sequence[str] = COMMAND) -> None:
        """Start the process and hand it the vocabulary, which a thread makes; returns at once."""
        self._life = asyncio.get_running_loop().create_task(self._live(vocabulary, command))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, job: messages.Job) -> None:
        """Hand in a job; only when it is ready."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(messages.frame(job))

    def kill(self) -> None:
        """End it now, whatever it is doing."""
        if not self._killed:
            self._killed = True
            self._kill()

    def _kill(self) -> None:
        # Once: asyncio's own looks for the process's end first, and takes it from asyncio's watcher.
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass

    async def ended(self) -> None:
        """Wait until the process is gone."""
        if self._life is not None:
            await asyncio.wait({self._life})

    async def _live(self, vocabulary: Callable[[], messages.Vocabulary], command: Sequence[str]) -> None:
        read_end, write_end = os.pipe()
        try:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    "--tether-fd",
                    str(read_end),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    pass_fds=(read_end,),
                )
            finally:
                os.close(read_end)
            if self._killed:
                self._kill()
            else:
                await self._converse(self._process, vocabulary)
        except (OSError, EOFError, msgspec.MsgspecError) as err:
            if not self._killed:
                sys.stderr.write(f"the grammar compiler's process is gone: {type(err).__name__}: {err}\n")
        finally:
            # Its tether: it ends, if it hasn't.
            os.close(write_end)
            unexpected = not self._killed
            if self._process is not None:
                try:
                    await asyncio.wait_for(self._process.wait(), _END_S)
                except TimeoutError:
                    self._kill()
                    await self._process.wait()
            self._killed = True
            if unexpected:
                self._gone(self)

    async def _converse(
        self, process: asyncio.subprocess.Process, vocabulary: Callable[[], messages.Vocabulary]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # A pipe holds less than this: written on while the process imports.
        process.stdin.write(await asyncio.to_thread(lambda: messages.frame(vocabulary())))
        decoder = msgspec.msgpack.Decoder(messages.FromCompiler)
        while True:
            try:
                length = int.from_bytes(await process.stdout.readexactly(messages.LENGTH_BYTES), "big")
                if length > messages.FRAME_LIMIT_BYTES:
                    raise EOFError(f"a message of {length} bytes")
                message = decoder.decode(await process.stdout.readexactly(length))
            except asyncio.IncompleteReadError as err:
                raise EOFError("it ended") from err
            if self._killed:
                return
            if isinstance(message, messages.Ready):
                self.is_ready = True
            self._answered(self, message)
