"""A grammar compiler that does as its jobs say: `python -m tests.tools.scripted_compiler --tether-fd N`.

It speaks the real protocol without xgrammar. A job's text is a word and sometimes a path: `done`, `fail`,
`hang`, `die`; `second PATH` hangs when PATH doesn't exist yet, makes it, and is done the next time; `apart`
is done in a while in a process that has had no other job by then, and hangs beside others. With `--never` as
its first argument it never gets ready; with `--log PATH` it writes each job it gets there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from mlxpool.shared import tether
from mlxpool.worker.grammar import messages

# What `apart` takes: longer than others need to come.
_WHILE_S = 0.3

_LOCK = threading.Lock()


def _send(answer: messages.FromCompiler) -> None:
    with _LOCK:
        sys.stdout.buffer.write(messages.frame(answer))
        sys.stdout.buffer.flush()


def _send_if_apart(jobs: list[int], answer: messages.Done) -> None:
    if jobs == [answer.number]:
        _send(answer)


def main() -> None:
    jobs: list[int] = []
    tether.watch(int(sys.argv[sys.argv.index("--tether-fd") + 1]))
    log = Path(sys.argv[sys.argv.index("--log") + 1]) if "--log" in sys.argv else None
    if "--never" in sys.argv:
        threading.Event().wait()
    decoder = msgspec.msgpack.Decoder(messages.ToCompiler)
    while len(length := sys.stdin.buffer.read(messages.LENGTH_BYTES)) == messages.LENGTH_BYTES:
        message = decoder.decode(sys.stdin.buffer.read(int.from_bytes(length, "big")))
        answer: messages.FromCompiler = messages.Ready()
        if isinstance(message, messages.Job):
            jobs.append(message.number)
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{os.getpid()} {message.text}\n")
            word, _, path = message.text.partition(" ")
            if word == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if word == "hang" or (word == "second" and not Path(path).exists()):
                if path:
                    Path(path).touch()
                continue
            answer = messages.Done(message.number, message.text)
            if word == "apart":
                finish = threading.Timer(_WHILE_S, _send_if_apart, (jobs, answer))
                finish.daemon = True
                finish.start()
                continue
            if word == "fail":
                answer = messages.Failed(message.number, "[18:00:00] /project/cpp/x.cc:94: it is\nno good")
        _send(answer)


if __name__ == "__main__":
    main()
