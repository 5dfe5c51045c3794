"""One Chromium for all tests of the dashboard, and pages that fail a test when anything goes wrong in them.

The browser lives as long as the session, so every test here runs in the session's event loop. Each test has a
context of its own: its storage is empty and its pages are closed at its end. An uncaught error, a warning in
the console or a file that did not come fails the test that saw it, whatever it looked at; that is how a
violation of the Content-Security-Policy is caught too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.tools.chromium import FLAGS, find_chromium
from tests.tools.served import Served, serve

# What is asked for in these tests and refused on purpose: the browser notes each refusal in its console.
REFUSED = re.compile(
    r"Failed to load resource: "
    r"(the server responded with a status of (400|401|404|503)"
    r"|net::ERR_(INTERNET_DISCONNECTED|CONNECTION_REFUSED))"
)

OpenPage = Callable[..., Awaitable[Page]]
Start = Callable[..., Awaitable[Served]]

# A busy machine takes its time; nothing waits this long where all is well.
expect.set_options(timeout=30_000)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The one browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(models=…)`: a parent over scripted workers, up until the pages of the test are closed."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_it(folder: Path = tmp_path, **options: Any) -> Served:
            return await stack.enter_async_context(serve(folder, scripted=True, **options))

        yield start_it


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser: Browser, start: Start) -> AsyncIterator[OpenPage]:
    """`await open_page(served, "#/chat", width=390, …)`: a page of that server in a fresh context.

    clock: the page's time can be moved with `page.clock`.
    """
    del start  # only named so that its servers outlive the pages
    contexts = []
    faults: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not REFUSED.match(message.text):
            faults.append(f"console {message.type}: {message.text}")

    async def open_it(
        served: Served,
        path: str = "",
        *,
        width: int = 1280,
        height: int = 860,
        clock: bool = False,
        **options: Any,
    ) -> Page:
        context = await browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = await context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: faults.append(f"uncaught: {error}"))
        if clock:
            await page.clock.install()
        await page.goto(f"{served.url}/{path}")
        return page

    yield open_it
    for context in contexts:
        await context.close()
    assert faults == []
