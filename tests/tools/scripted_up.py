"""`mlxpool up` with every worker replaced by the scripted one.

`scripted_up.py --home DIR [--models DIR]… --port N [--memory-budget B] [--model NAME] [--config FILE]
[--set section.key=value]… [--open-after S] [--keep-alive S] [--report-margin S] [--share-timeout S]
[--lend] [--scripted-job]` reads its settings as the command does and runs the same app; only the argument
vector of a worker differs.
Everything else that a test or a benchmark sees is the real parent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    # Started as a file: `tests` is imported from the folder that holds it.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.parent.edge import preamble
from mlxpool.parent.pool import prompt_caches
from mlxpool.shared import config
from tests.tools import scripted_job

WORKER = Path(__file__).resolve().with_name("scripted_worker.py")

# As the command line's own: bad usage and a bad config.
EXIT_BAD_CONFIG = 2


def worker_argv(settings: config.Settings) -> list[str]:
    """How a scripted worker of any model of these settings is started, but for its pipes and name."""
    folders = [settings.home / "models", *settings.model_dirs]
    folders += [Path(model.path).parent for model in settings.models.values() if model.path]
    argv = [sys.executable, str(WORKER)]
    for folder in dict.fromkeys(folders):
        argv += ["--models", str(folder)]
    return argv


def parse(argv: list[str]) -> config.Settings:
    """The settings that these arguments make. Raises ConfigError; argparse exits on bad usage."""
    parser = argparse.ArgumentParser(description="mlxpool with scripted workers, for tests.")
    parser.add_argument("--home", required=True)
    parser.add_argument("--models", action="append", metavar="DIR")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--memory-budget")
    parser.add_argument("--model")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args(argv)
    flags: dict[str, object] = {
        "home": args.home,
        "models": args.models,
        "model": args.model,
        "server.host": args.host,
        "server.port": args.port,
        "pool.memory_budget": args.memory_budget,
    }
    for assignment in args.set:
        key, equals, value = assignment.partition("=")
        section = key.partition(".")[0]
        if not equals or section not in config.SECTIONS:
            allowed = ", ".join(config.SECTIONS)
            raise config.ConfigError(f"--set {assignment}: use SECTION.KEY=VALUE with a section of {allowed}")
        flags[key] = value
    return config.load(args.config, flags={k: v for k, v in flags.items() if v is not None})


def main(argv: list[str]) -> int:
    """Runs until told to stop; the exit status of the app.

    --open-after and --keep-alive: seconds until a waiting stream is opened, and between its keep-alives.
    --report-margin and --share-timeout: how long a worker that answers no drain or takes no share is waited
    for. So that a test need not wait as long as people would. --scripted-job: there is the kind of
    scripted_job.py. --lend: jobs of scripted_lease.py may ask for the GPU.
    """
    pace = argparse.ArgumentParser(add_help=False)
    pace.add_argument("--open-after", type=float, default=preamble.OPEN_AFTER_S)
    pace.add_argument("--keep-alive", type=float, default=preamble.KEEP_ALIVE_S)
    pace.add_argument("--report-margin", type=float, default=prompt_caches.REPORT_MARGIN_S)
    pace.add_argument("--share-timeout", type=float, default=prompt_caches.SHARE_TIMEOUT_S)
    pace.add_argument("--lend", action="store_true")
    pace.add_argument("--scripted-job", action="store_true")
    paced, rest = pace.parse_known_args(argv)
    if paced.scripted_job:
        scripted_job.register()
    preamble.OPEN_AFTER_S, preamble.KEEP_ALIVE_S = paced.open_after, paced.keep_alive
    prompt_caches.REPORT_MARGIN_S = paced.report_margin
    prompt_caches.SHARE_TIMEOUT_S = paced.share_timeout
    try:
        settings = parse(rest)
    except config.ConfigError as err:
        print(f"scripted_up: {err}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    from mlxpool.parent import app

    if paced.lend:
        from mlxpool.parent import serve
        from tests.tools.scripted_lease import LendingPool

        serve.PoolService = LendingPool
    return app.run(settings, read_again=lambda: parse(rest), worker_argv=worker_argv(settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
