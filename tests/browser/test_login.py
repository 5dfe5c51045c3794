"""A server with API keys: the login, where the key is kept, and what happens when it is no longer taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.browser.conftest import OpenPage, Start
from tests.tools.scripted_script import expected_text, make_scripted_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEYS = '[server]\napi_keys = ["open-sesame"]\n'


async def sign_in(page: Page, key: str = "open-sesame", keep: bool = False) -> None:
    """Fill the login in and send it."""
    await page.get_by_label("API key").fill(key)
    if keep:
        await page.get_by_label("Keep it in this browser").check()
    await page.get_by_role("button", name="Sign in").click()


async def test_a_key_is_asked_for_and_goes_with_everything(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a", tokens=2)
    page = await open_page(await start(models=folder.parent, config=KEYS), "#/chat")
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    await expect(page.get_by_label("API key")).to_be_focused()
    await expect(page).to_have_title("Sign in · mlxpool")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert").filter(has_text="Enter one of the keys")).to_be_visible()
    await sign_in(page, "wrong")
    await expect(page.get_by_role("alert").filter(has_text="not one of this server's keys")).to_be_visible()
    await sign_in(page)
    await expect(page.locator(".connection")).to_have_text("Live")
    await page.get_by_role("textbox", name="Message", exact=True).fill("hello")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message.assistant .markdown")).to_have_text(
        expected_text("a", "hello", 2).strip()
    )
    assert await page.evaluate("[sessionStorage['mlxpool.key'], localStorage['mlxpool.key'] ?? null]") == [
        "open-sesame",
        None,
    ]
    await page.reload()
    await expect(page.locator(".connection")).to_have_text("Live")


async def test_a_kept_key_outlives_the_tab_and_signing_out_forgets_it(start: Start, open_page: OpenPage):
    page = await open_page(await start(config=KEYS))
    await sign_in(page, keep=True)
    await expect(page.locator(".connection")).to_have_text("Live")
    other = await page.context.new_page()
    await other.goto(page.url)
    await expect(other.locator(".connection")).to_have_text("Live")
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    stored = "[sessionStorage['mlxpool.key'] ?? null, localStorage['mlxpool.key'] ?? null]"
    assert await page.evaluate(stored) == [None, None]


async def test_a_key_that_is_no_longer_taken_leads_back_to_the_login(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a")
    page = await open_page(await start(models=folder.parent, config=KEYS))
    await sign_in(page)
    await expect(page.locator(".chip")).to_be_visible()
    await page.evaluate("import('./static/js/core/api.js').then((m) => { m.apiKey.value = 'old'; })")
    await expect(page.get_by_text("The server no longer accepts the key that was kept.")).to_be_visible()
    await sign_in(page)
    await expect(page.locator(".chip")).to_be_visible()
