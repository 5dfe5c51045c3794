"""Runs every benchmark, one after the other, and keeps their documents in one.

`make bench` calls it. The document goes to bench-results/ under its time and commit and to standard output;
a benchmark that fails leaves its error there, and the exit status says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import common

# Each takes one to three minutes on two cores.
BENCH_TIMEOUT_S = 900


def main() -> int:
    """Runs, stores, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, help="default: the one that `mlxpool pull starter` fetched")
    parser.add_argument(
        "--only",
        action="append",
        choices=(
            "startup",
            "text",
            "relay",
            "count_tokens",
            "viewers",
            "page",
            "swap",
            "leases",
            "serving",
            "engine",
            "grammar",
            "cache_lookup",
            "kv_disk",
            "prompt_cache",
            "history",
            "adapters",
        ),
    )
    parser.add_argument("--out", type=Path, default=common.REPO / "bench-results")
    args = parser.parse_args()
    home = Path(os.environ.get("MLXPOOL_HOME") or Path.home() / ".mlxpool")
    starter = args.starter or home / "models" / "smollm2-135m"
    own_starter = ["--starter", str(starter)]
    benches = {
        "startup": [], "text": [], "relay": [], "count_tokens": own_starter, "viewers": [], "page": [],
        "swap": own_starter, "leases": own_starter, "serving": own_starter, "engine": own_starter,
        "grammar": own_starter, "cache_lookup": [], "kv_disk": [], "prompt_cache": own_starter,
        "history": [], "adapters": [],
    }  # fmt: skip
    documents: dict[str, Any] = {}
    failed = False
    for name in args.only or benches:
        print(f"bench: {name} …", file=sys.stderr, flush=True)
        documents[name], status = run(name, benches[name])
        failed = failed or status != 0
    text = msgspec.json.format(msgspec.json.encode(documents), indent=1)
    args.out.mkdir(parents=True, exist_ok=True)
    head = common.report("all").commit[:10]
    path = args.out / f"{time.strftime('%Y%m%dT%H%M%S')}-{head}.json"
    path.write_bytes(text + b"\n")
    sys.stdout.buffer.write(text + b"\n")
    print(f"bench: {summary(documents)}\nbench: kept in {path}", file=sys.stderr)
    return int(failed)


def run(name: str, arguments: list[str]) -> tuple[Any, int]:
    """One benchmark's document and exit status; what is no document is kept as its error."""
    argv = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments]
    try:
        done = subprocess.run(
            argv, cwd=common.REPO, capture_output=True, timeout=BENCH_TIMEOUT_S, check=False
        )
        return msgspec.json.decode(done.stdout), done.returncode
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {BENCH_TIMEOUT_S} s"}, 1
    except msgspec.DecodeError:
        said = (done.stdout + done.stderr)[-4000:].decode(errors="replace")
        return {"error": f"exit status {done.returncode}: {said}"}, done.returncode or 1


def summary(documents: dict[str, Any]) -> str:
    """Every target in one line each."""
    lines = []
    for name, document in documents.items():
        if "error" in document:
            lines.append(f"{name}: {document['error'].splitlines()[-1]}")
        for target in document.get("targets", []):
            value = "none" if target["value"] is None else f"{target['value']:.4g}"
            sign = "at most" if target["at_most"] else "at least"
            met = "met" if target["met"] else "MISSED"
            limit = f"{target['limit']:g} {target['unit']}"
            lines.append(f"{name}: {target['name']}: {value} ({sign} {limit}): {met}")
    return "\nbench: ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
