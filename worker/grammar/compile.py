"""The process that compiles grammars: `python -m mlxpool.worker.grammar.compile --tether-fd N`.

Compiling can't be stopped from inside a process (a schema of 400 levels takes ten seconds, some take
minutes), so it happens in one that can be killed. The worker speaks first: the vocabulary, then jobs, each
answered on its own when it is done. A job has a thread of its own, because the compiler releases the GIL and
a slow grammar shouldn't make the others wait. It ends when its standard input does or its worker is gone.

What libraries print goes to standard error, which is the worker's log; the answers have a descriptor that
nobody else writes to, and `_Answers` owns it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from mlxpool.shared import tether

# The compiler recurses as deep as a schema nests, and threads after the first get as little as 512 KiB.
_STACK_BYTES = 64 * 1024 * 1024

# A reason is for a person; the compiler quotes whole grammars.
_REASON_CHARS = 2000

# A first grammar is waited for, and the model computes on the same cores: half of them, and few.
_THREADS_PER_GRAMMAR = max(1, min(4, (os.cpu_count() or 1) // 2))


class _Answers:
    """The worker's end: whole frames, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """A worker that no longer reads is the tether's business."""
        view = memoryview(data)
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                pass


def main(argv: list[str] | None = None) -> int:
    """The process. Returns its exit code: 0 when its input ended."""
    parser = argparse.ArgumentParser(prog="mlxpool.worker.grammar.compile", description="Compiles grammars.")
    parser.add_argument("--tether-fd", type=int, required=True)
    parser.add_argument("--quick-s", type=float, help="what is compiled again by the worker, in seconds")
    options = parser.parse_args(argv)
    tether.watch(options.tether_fd)
    # A person's Ctrl-C reaches the whole foreground; the worker decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = _Answers(os.dup(1))
    os.dup2(2, 1)
    threading.stack_size(_STACK_BYTES)

    from mlxpool.worker.grammar import messages

    quick_s = messages.QUICK_S if options.quick_s is None else options.quick_s
    compiler: Any = None
    for message in _messages(sys.stdin.buffer):
        if isinstance(message, messages.Vocabulary):
            compiler = _compiler(message)
            answers.send(messages.frame(messages.Ready()))
        else:
            job = (compiler, message, quick_s, answers)
            threading.Thread(target=_compile, args=job, daemon=True).start()
    # What still compiles is for nobody.
    os._exit(0)


def _messages(stream: BinaryIO) -> Any:
    import msgspec

    from mlxpool.worker.grammar import messages

    decoder = msgspec.msgpack.Decoder(messages.ToCompiler)
    while len(length := stream.read(messages.LENGTH_BYTES)) == messages.LENGTH_BYTES:
        yield decoder.decode(stream.read(int.from_bytes(length, "big")))


def _compiler(vocabulary: Any) -> Any:
    from mlxpool.worker.grammar import runtime

    return runtime.compiler(runtime.tokenizer_info(vocabulary), _THREADS_PER_GRAMMAR)


def _compile(compiler: Any, job: Any, quick_s: float, answers: _Answers) -> None:
    from mlxpool.worker.grammar import messages

    try:
        answer = _answer(compiler, job, quick_s)
    except Exception as err:
        answer = messages.Failed(job.number, str(err)[:_REASON_CHARS])
    answers.send(messages.frame(answer))


def _answer(compiler: Any, job: Any, quick_s: float) -> Any:
    from mlxpool.worker.grammar import messages

    began_s = time.monotonic()
    compiled = compiler.compile_structural_tag(job.text)
    took_s = time.monotonic() - began_s
    size, limit = compiled.memory_size_bytes, messages.GRAMMAR_LIMIT_BYTES
    if size <= limit and took_s < quick_s:
        return messages.Done(job.number, None)
    if size <= limit:
        text = compiled.serialize_json()
        # What is around it takes a few bytes.
        size, limit = len(text), messages.FRAME_LIMIT_BYTES - 1024
        if size <= limit:
            return messages.Done(job.number, text)
    return messages.Failed(job.number, f"it takes {size} bytes compiled, and {limit} are allowed", False)


if __name__ == "__main__":
    sys.exit(main())
