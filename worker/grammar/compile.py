"""The process that compiles grammars: `python -m mlxpool.worker.grammar.compile --tether-fd N`.

Compiling can't be stopped from inside a process (a schema of 400 levels takes ten seconds, some take
minutes), so it happens in one that can be killed. The worker speaks first: the vocabulary, then jobs, each
answered on its own when it is done. A job has a thread of its own, because the compiler releases the GIL and
a slow grammar shouldn't make the others wait. It ends when its standard input does or its worker is gone.

A grammar can take all of a machine's memory: this process has a limit of its own, where the system knows
one, and dies of it. The worker then tries what compiled here once more, one by one. What compiled is begun
once, as a row would begin it, since that can be the dear part.

What libraries print goes to standard error, which is the worker's log; the answers have a descriptor that
nobody else writes to, and `_Answers` owns it.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import threading
import time
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import psutil

from mlxpool.shared import tether

# The compiler recurses as deep as a schema nests, and threads after the first get as little as 512 KiB.
_STACK_BYTES = 64 * 1024 * 1024

# A reason is for a person; the compiler quotes whole grammars.
_REASON_CHARS = 2000

# A first grammar is waited for, and the model computes on the same cores: half of them, and few.
_THREADS_PER_GRAMMAR = max(1, min(4, (os.cpu_count() or 1) // 2))


# Addresses that grammars may take above what the imports have: eight at once have 64 MiB of stack each and as
# much for each thread's allocator, and the largest that is taken in the end has 64 MiB and was made of more.
_ADDRESSES_BYTES = 4 * 1024**3

# Not one that a shell or a signal uses.
_NO_MEMORY_EXIT_CODE = 71


class _Compiler(NamedTuple):
    """xgrammar's, and the width of the logits."""

    compiler: Any
    width: int


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
    parser.add_argument(
        "--addresses-bytes", type=int, default=_ADDRESSES_BYTES, help="what grammars may take here"
    )
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
            _limit_memory(options.addresses_bytes)
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


def _compiler(vocabulary: Any) -> _Compiler:
    from mlxpool.worker.grammar import runtime

    compiler = runtime.compiler(runtime.tokenizer_info(vocabulary), _THREADS_PER_GRAMMAR)
    return _Compiler(compiler, vocabulary.width)


def _limit_memory(addresses_bytes: int) -> None:
    """macOS has no limit of this kind: there it is the worker's patience that ends it."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + addresses_bytes
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    except (OSError, ValueError):
        sys.stderr.write("the grammar compiler's process has no limit of memory here\n")


def _compile(compiler: _Compiler, job: Any, quick_s: float, answers: _Answers) -> None:
    from mlxpool.worker.grammar import messages

    try:
        answer = _answer(compiler, job, quick_s)
    except Exception as err:
        if isinstance(err, MemoryError) or "bad_alloc" in str(err):
            _out_of_memory()
        answer = messages.Failed(job.number, str(err)[:_REASON_CHARS])
    answers.send(messages.frame(answer))


def _out_of_memory() -> NoReturn:
    """Whichever grammar it was that took it all."""
    sys.stderr.write("the grammar compiler's process is out of memory\n")
    sys.stderr.flush()
    os._exit(_NO_MEMORY_EXIT_CODE)


def _answer(compiler: _Compiler, job: Any, quick_s: float) -> Any:
    from mlxpool.worker.grammar import messages, runtime, trial

    def begin() -> Any:
        matcher = runtime.xgrammar().GrammarMatcher(compiled)
        matcher.fill_next_token_bitmask(np.zeros(-(-compiler.width // 32), np.int32))
        return matcher

    began_s = time.monotonic()
    compiled = compiler.compiler.compile_structural_tag(job.text)
    took_s = time.monotonic() - began_s
    size, limit = compiled.memory_size_bytes, messages.GRAMMAR_LIMIT_BYTES
    if size <= limit and (reason := trial.too_much(begin)) is not None:
        return messages.Failed(job.number, reason, False)
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
