"""What the tests of pulls share: a model whose bytes tell when one is wrong, and the pull's own process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tools.fake_hub import FakeHub
from tests.tools.model_folders import write_model

MEBIBYTE = 1 << 20


def write_random_model(folder: Path, mebibytes: int = 4, seed: int = 0) -> Path:
    """A folder that checkpoint.read accepts, its weights of about that size and unlike any other seed's."""
    write_model(folder, {"embed.weight": ("F16", (mebibytes * 1024, 512))})
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header:] = random.Random(seed).randbytes(len(content) - header)
    weights.write_bytes(content)
    return folder


def environment(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    """This process's, but with that hub, that home, and no token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXPOOL_")}
    own = {"HF_ENDPOINT": hub.url, "MLXPOOL_HOME": str(home)}
    return {**kept, **own, **more}


class PullProcess:
    """`mlxpool.parent.hub.pull_process`, as a job starts it."""

    def __init__(self, hub: FakeHub, home: Path, *arguments: str, **env: str) -> None:
        tether_read, self._tether = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "mlxpool.parent.hub.pull_process",
                "--home", str(home), "--tether-fd", str(tether_read), *arguments,
            ],
            env=environment(hub, home, **env),
            pass_fds=(tether_read,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        os.close(tether_read)

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Its exit code and its lines."""
        said, _ = self.process.communicate(timeout=60)
        os.close(self._tether)
        return self.process.returncode, [json.loads(line) for line in said.splitlines()]

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self.process.kill()
        self.end()

    def cut_tether(self) -> int:
        """What a parent's death looks like to it; its exit code."""
        os.close(self._tether)
        self._tether = os.open(os.devnull, os.O_RDONLY)
        return self.process.wait(60)


def pull(hub: FakeHub, home: Path, *arguments: str, **env: str) -> dict[str, Any]:
    """The result of a pull that works."""
    code, lines = PullProcess(hub, home, *arguments, **env).end()
    assert code == 0, lines
    assert lines[-1]["type"] == "done"
    result: dict[str, Any] = lines[-1]["result"]
    return result


def refusal(hub: FakeHub, home: Path, *arguments: str, **env: str) -> str:
    """The error of a pull that does not."""
    code, lines = PullProcess(hub, home, *arguments, **env).end()
    assert code == 1
    assert lines[-1]["type"] == "failed"
    return str(lines[-1]["error"])
