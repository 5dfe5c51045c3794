"""A server with something of everything in it, and each page of the dashboard as a person meets it there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from playwright.async_api import Page, expect

from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served, serve

ANSWER = (
    "## Why the sky is blue\n\n",
    "Sunlight is scattered by the air. ",
    "**Short waves** are scattered *more*, ",
    "by `1 / λ⁴`:\n\n",
    "1. red, 700 nm\n2. blue, 450 nm\n\n",
    "```python\nratio = (700 / 450) ** 4  # 5.9\n```\n\n",
    "| colour | nm | share |\n| --- | ---: | ---: |\n| red | 700 | 1.0 |\n| blue | 450 | 5.9 |\n\n",
    "> See [Rayleigh](https://example.org/rayleigh).\n\n",
    "And <b>this</b> is text.",
)
MB = 1_000_000


def make_models(folder: Path) -> None:
    """Models for every state: two that serve, one that loads for long, one that fails, one too large."""
    make_scripted_model(folder, "qwen3-8b-4bit", weights_bytes=620 * MB, tokens=9, text=ANSWER)
    make_scripted_model(folder, "smollm2-135m", weights_bytes=240 * MB, tokens=4000, tokens_per_s=40)
    make_scripted_model(
        folder, "gemma-3-270m-it", weights_bytes=400 * MB, load_s=600, load_lines=6000, tokens=20
    )
    make_scripted_model(
        folder, "mistral-broken", fail_load="the file ends in the middle of layers.3.mlp.up_proj"
    )
    make_scripted_model(folder, "llama-3.3-70b-instruct-4bit", weights_bytes=40_000 * MB)


@contextlib.asynccontextmanager
async def busy_server(folder: Path) -> AsyncIterator[Served]:
    """One model streams, one is idle and pinned, one loads while a request waits for it, one failed."""
    make_models(folder / "models")
    async with serve(folder, models=folder / "models", scripted=True, budget="3GB") as served:
        await served.chat("qwen3-8b-4bit")
        await served.request("POST", "/api/models/qwen3-8b-4bit/pin")
        await served.chat("mistral-broken")
        waiting = [
            asyncio.create_task(served.stream_bytes("smollm2-135m")),
            asyncio.create_task(served.stream_bytes("smollm2-135m", "another")),
            asyncio.create_task(served.stream_bytes("gemma-3-270m-it")),
        ]
        await served.until_state("smollm2-135m", "ready")
        await served.until_state("gemma-3-270m-it", "loading")
        try:
            yield served
        finally:
            for task in waiting:
                task.cancel()
            for name in ("smollm2-135m", "gemma-3-270m-it"):
                await served.request("POST", f"/api/models/{name}/unload", {"force": True})


async def pool(page: Page) -> None:
    await page.evaluate("location.hash = '#/pool'")
    await expect(page.get_by_role("progressbar", name="Loading gemma-3-270m-it")).to_be_visible()
    await expect(page.locator(".plot canvas")).to_be_visible()


async def models(page: Page) -> None:
    await page.evaluate("location.hash = '#/models'")
    await expect(page.locator(".library-row")).to_have_count(5)


async def chat(page: Page) -> None:
    await page.evaluate("location.hash = '#/chat?model=qwen3-8b-4bit'")
    field = page.get_by_role("textbox", name="Message", exact=True)
    await field.fill("Why is the sky blue?\nIn a few lines, please.")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message.assistant .figures-line")).to_be_visible()


async def empty_chat(page: Page) -> None:
    await page.evaluate("location.hash = '#/chat'")
    await expect(page.locator(".thread .empty-title")).to_be_visible()


async def logs(page: Page) -> None:
    await page.evaluate("location.hash = '#/logs'")
    await expect(page.locator(".log-line").first).to_be_visible()


async def picker(page: Page) -> None:
    await pool(page)
    await page.get_by_role("button", name="Load a model").click()
    await expect(page.get_by_role("option").first).to_be_visible()


async def fit(page: Page) -> None:
    await models(page)
    await page.get_by_role("button", name="Memory of llama-3.3-70b-instruct-4bit").click()
    await expect(page.get_by_role("dialog")).to_be_visible()


async def question(page: Page) -> None:
    await chat(page)
    await page.get_by_role("button", name="Edit message").click()
    await expect(page.get_by_role("textbox", name="Edit message")).to_be_focused()


# Name → how to get there. Each begins from any page.
VIEWS: dict[str, Callable[[Page], Awaitable[None]]] = {
    "pool": pool,
    "models": models,
    "chat": chat,
    "chat-empty": empty_chat,
    "chat-edit": question,
    "logs": logs,
    "picker": picker,
    "fit": fit,
}
