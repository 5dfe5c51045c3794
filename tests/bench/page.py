"""What the dashboard costs a person: how soon it can be used, and what watching a busy pool takes.

Start: the Pool page is opened in a fresh browser context, so nothing is cached; `interactive` is when its
controls are drawn and work, `states` when the first thing the server said is on the screen, both counted from
the navigation's start. Then again in the same context, as a person's second visit is.

Watching: processor time of all of the browser's processes together while four workers stream at a steady pace
and the Pool page is shown; and of an empty page in the same browser, which is the browser's own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import common, relay
from tests.tools.chromium import FLAGS, find_chromium
from tests.tools.scripted_script import make_scripted_model

INTERACTIVE_LIMIT_MS = 300
WATCHING_LIMIT_OF_ONE_CORE = 0.05
# The chart's module and the other pages' are fetched after the first paint; a watcher has them.
SETTLE_S = 3.0
NOTE_STATES = """
    new MutationObserver((_, observer) => {
        if (!document.querySelector(".budget")) return;
        performance.mark("states");
        observer.disconnect();
    }).observe(document, { subtree: true, childList: true });
"""
MARKS = """() => new Promise((resolve) => {
    const at = (name) => performance.getEntriesByName(name)[0]?.startTime;
    const look = () => (at("states") ? resolve([at("interactive"), at("states")]) : setTimeout(look, 10));
    look();
})"""


def visit(context: BrowserContext, url: str) -> tuple[float, float]:
    """Milliseconds from the navigation to `interactive` and to `states`."""
    page = context.new_page()
    page.add_init_script(NOTE_STATES)
    page.goto(url)
    interactive, states = page.evaluate(MARKS)
    page.close()
    return interactive, states


def measure_start(report: common.Report, browser: Browser, url: str, rounds: int) -> None:
    """Cold and warm visits in turn."""
    rows = [
        report.row(f"{visit}, to {mark}", "ms")
        for visit in ("cold", "warm")
        for mark in ("interactive", "states")
    ]
    for _ in range(rounds):
        context = browser.new_context()
        times = (*visit(context, url), *visit(context, url))
        context.close()
        for row, taken in zip(rows, times, strict=True):
            row.samples.append(round(taken, 1))
    report.targets.append(
        common.Target("cold visit to interactive", rows[0].settle().median, INTERACTIVE_LIMIT_MS, "ms")
    )


def browser_cpu_s() -> float:
    """Processor seconds so far of every process of the browser that this process started."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "chrom" in process.name():
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def window(seconds: float) -> float:
    """Processor seconds of the browser per second."""
    before, begun = browser_cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (browser_cpu_s() - before) / (time.monotonic() - begun)


def measure_watching(report: common.Report, page: Page, url: str, rounds: int, seconds: float) -> None:
    """Windows of an empty page and of the busy pool, in turn."""
    empty, busy = report.row("browser, empty page", "1"), report.row("browser, busy pool", "1")
    for _ in range(rounds):
        page.goto("about:blank")
        time.sleep(SETTLE_S)
        empty.samples.append(window(seconds))
        page.goto(url)
        time.sleep(SETTLE_S)
        busy.samples.append(window(seconds))
        shown = page.locator(".figure-main dd").all_inner_texts()
        assert len(shown) == relay.PACED_MODELS, shown
        assert all(float(rate) > 0 for rate in shown), shown
    report.targets.append(
        common.Target("busy pool, of one core", busy.settle().median, WATCHING_LIMIT_OF_ONE_CORE, "1")
    )


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window of watching")
    args = parser.parse_args()
    report = common.report("page", visits=args.visits, rounds=args.rounds, seconds=args.seconds)
    total_s = args.visits * 3 + args.rounds * 2 * (args.seconds + SETTLE_S + 1) + 10
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch, sync_playwright() as playwright:
        home, models = Path(scratch, "home"), Path(scratch, "models")
        home.mkdir()
        models.mkdir()
        names = [f"paced{n}" for n in range(relay.PACED_MODELS)]
        for name in names:
            tokens = int(relay.PACED_EVENTS_PER_S * total_s)
            make_scripted_model(models, name, tokens=tokens, tokens_per_s=relay.PACED_EVENTS_PER_S)
        port = common.free_port()
        with common.serving(common.scripted_pool(home, models, port), port, Path(scratch, "log")) as server:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            report.settings["browser"] = browser.version
            url = f"http://127.0.0.1:{port}/"
            measure_start(report, browser, url, args.visits)
            for name in names:
                relay.load(server, name)
            client = relay.start_client([f"{port},{name},{relay.PACED_STREAMS}" for name in names])
            assert client.stdout is not None
            client.stdout.readline()
            page = browser.new_page()
            measure_watching(report, page, url, args.rounds, args.seconds)
            client.kill()
            client.wait()
            browser.close()
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
