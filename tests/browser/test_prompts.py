"""The prompt cache on the Pool page: how full it is, what it saves, what is wrong, and writing it out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, Start
from tests.browser.test_look import BEYOND_THE_EDGE, PHONE, faults_of
from tests.browser.test_pool import card
from tests.tools.scripted_script import make_scripted_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

HALF = {"cache.ram": "500MB", "cache.ssd_budget": "2GB"}


def panel(page: Page) -> Locator:
    return page.get_by_role("region", name="Prompt cache")


def figure(page: Page, name: str) -> Locator:
    """One of the numbers of the panel."""
    return panel(page).locator(".figures div").filter(has=page.locator("dt", has_text=name)).locator("dd")


async def test_how_full_it_is_and_what_it_saves(tmp_path: Path, start: Start, open_page: OpenPage):
    says = {"restores": 2, "restore_ms_last": 310.0}
    folder = make_scripted_model(tmp_path / "models", "a", prompt_bytes=125_000_000, cache_says=says)
    served = await start(models=folder.parent, budget="4GB", settings=HALF)
    page = await open_page(served)
    memory = panel(page).get_by_role("meter", name="Memory of the prompt cache")
    await expect(memory).to_have_attribute("aria-valuetext", "0 B of 500 MB")
    await expect(figure(page, "hit rate")).to_have_text("–")
    await expect(page.get_by_text("reserved of 4.00 GB · 3.50 GB free")).to_be_visible()
    await expect(page.locator(".budget .legend")).to_have_text("500 MB for prompts")
    for prompt in ("one two", "one two", "three", "one two"):
        assert (await served.chat("a", prompt)).status == 200
    await expect(memory).to_have_attribute("aria-valuetext", "250 MB of 500 MB")
    await expect(memory).to_have_attribute("aria-valuenow", "50")
    await expect(panel(page).get_by_role("meter", name="Disk")).to_have_attribute(
        "aria-valuetext", re.compile(r" of 2\.00 GB$")
    )
    await expect(figure(page, "hit rate")).to_have_text("50%")
    await expect(figure(page, "tokens reused")).to_have_text("4")
    await expect(figure(page, "to be written")).to_have_text("2")
    await expect(figure(page, "last restore")).to_have_text("0.31 s")
    await expect(card(page, "a").locator(".card-foot")).to_contain_text("2 of 4 prompts cached")


async def test_a_flush_says_what_came_of_it(tmp_path: Path, start: Start, open_page: OpenPage):
    models = tmp_path / "models"
    make_scripted_model(models, "a")
    make_scripted_model(models, "full", cache_missing=1)
    served = await start(models=models)
    page = await open_page(served)
    await served.chat("a", "one")
    await served.chat("a", "two")
    await expect(figure(page, "to be written")).to_have_text("2")
    await panel(page).get_by_role("button", name="Flush").click()
    await expect(page.get_by_text("All prompts are on disk: 2 records written")).to_be_visible()
    await expect(figure(page, "to be written")).to_have_text("0")
    await served.chat("full")
    await panel(page).get_by_role("button", name="Flush").click()
    said = page.get_by_role("alert").get_by_text("Not all prompts are on disk: 1 record missing")
    await expect(said).to_be_visible()


async def test_why_nothing_is_written_and_what_a_drain_lost(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    off = "no space left on <b>device</b>"
    folder = make_scripted_model(tmp_path / "models", "a", cache_off=off, cache_missing=1)
    served = await start(models=folder.parent)
    page = await open_page(served)
    await served.chat("a")
    await expect(panel(page).get_by_role("alert")).to_have_text(f"Writing is off: {off}")
    await served.request("POST", "/api/models/a/unload")
    loss = page.get_by_role("region", name="Recent").locator(".event-loss")
    await expect(loss.locator(".event-kind")).to_have_text("not saved")
    await expect(loss).to_contain_text("missing 1 record")
    await expect(figure(page, "drains with losses")).to_have_text("1 of 1")
    await expect(panel(page).get_by_role("alert")).to_have_count(0)


async def test_what_is_off_is_said_to_be_off(start: Start, open_page: OpenPage, tmp_path: Path):
    off = {"cache.ram": "0", "cache.ssd": "false"}
    page = await open_page(await start(tmp_path / "one", settings=off))
    await expect(panel(page)).to_contain_text("Off: every prompt is read from its start.")
    await expect(panel(page).get_by_role("button")).to_have_count(0)
    await expect(page.locator(".budget .legend")).to_have_count(0)
    page = await open_page(await start(tmp_path / "two", settings={"cache.ssd": "false"}))
    await expect(panel(page)).to_contain_text("Nothing is kept on disk.")
    await expect(panel(page).get_by_role("button")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_read_by_everybody_also_on_a_phone(
    tmp_path: Path, start: Start, open_page: OpenPage, scheme: str
):
    says = {"hits": 90, "misses": 10, "cached_tokens": 123_456_789, "pending": 12_345, "restores": 1}
    folder = make_scripted_model(
        tmp_path / "models", "a", cache_off="no space left on device", cache_missing=1, cache_says=says
    )
    served = await start(models=folder.parent, budget="4GB", settings=HALF)
    await served.chat("a")
    await served.request("POST", "/api/models/a/unload")
    await served.until_state("a", "absent")
    await served.chat("a")
    page = await open_page(served, color_scheme=scheme, **PHONE)
    await expect(panel(page).get_by_role("alert")).to_be_visible()
    await expect(figure(page, "drains with losses")).to_be_visible()
    assert await faults_of(page) == []
    assert await page.evaluate(BEYOND_THE_EDGE) == []
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
