"""How the pages look and who can use them: phone width, light and dark, keyboard, screen readers.

axe-core looks for what the Web Content Accessibility Guidelines call a failure; serious and critical ones
fail the test. Screenshots of every view are kept by `make long` under build/screenshots.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from tests.browser import look
from tests.browser.conftest import OpenPage, Start
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]
AXE = next((Path(__file__).parent / "vendor").glob("axe-core-*/axe.min.js")).read_text()
SCREENSHOTS = ROOT / "build/screenshots"
PHONE = {"width": 390, "height": 844, "is_mobile": True, "has_touch": True}
# What reaches beyond the right edge, except inside boxes that scroll by themselves.
BEYOND_THE_EDGE = """() =>
    [...document.querySelectorAll("body *")]
        .filter((e) => e.checkVisibility() && !e.closest("pre, .table-box, .log, .visually-hidden, .skip"))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => `${e.tagName}.${e.className}`)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def busy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with look.busy_server(tmp_path_factory.mktemp("look")) as served:
        yield served


async def faults_of(page: Page) -> list[str]:
    """What axe-core finds serious or critical: rule, element, why."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE)
    # Colours in the middle of a change are nobody's.
    await page.evaluate("Promise.allSettled(document.getAnimations().map((a) => a.finished))")
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{rule['id']} {node['target']}: {node['failureSummary']}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


async def faults_of_views(page: Page) -> dict[str, list[str]]:
    """The faults of each view that has any."""
    found = {}
    for name, show in look.VIEWS.items():
        await show(page)
        if faults := await faults_of(page):
            found[name] = faults
        await page.keyboard.press("Escape")
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_on_any_page(busy: Served, open_page: OpenPage, scheme: str):
    page = await open_page(busy, color_scheme=scheme)
    assert await faults_of_views(page) == {}


async def test_axe_finds_nothing_serious_on_a_phone_and_at_the_login(
    busy: Served, start: Start, open_page: OpenPage
):
    phone = await open_page(busy, **PHONE)
    assert await faults_of_views(phone) == {}
    locked = await open_page(await start(config='[server]\napi_keys = ["k"]\n'))
    await expect(locked.get_by_role("heading", name="Sign in")).to_be_visible()
    assert await faults_of(locked) == []


async def test_a_phone_needs_no_horizontal_scroll(busy: Served, open_page: OpenPage):
    page = await open_page(busy, **PHONE)
    for name, show in look.VIEWS.items():
        await show(page)
        wide = await page.evaluate(BEYOND_THE_EDGE)
        assert wide == [], name
        assert await page.evaluate("document.documentElement.scrollWidth") == 390, name
        await page.keyboard.press("Escape")


async def test_the_phones_chat_has_its_conversations_in_a_drawer(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a", tokens=2)
    page = await open_page(await start(models=folder.parent), "#/chat", **PHONE)
    for text in ("one", "two"):
        await page.get_by_role("textbox", name="Message", exact=True).fill(text)
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".message.assistant .figures-line")).to_have_count(1)
        await page.get_by_role("button", name="Conversations").click()
        drawer = page.get_by_role("dialog", name="Conversations")
        await expect(drawer.get_by_role("link").first).to_have_text(text)
        if text == "one":
            await drawer.get_by_role("button", name="New chat").click()
            await expect(drawer).to_have_count(0)
    await drawer.get_by_role("link", name="one").click()
    await expect(drawer).to_have_count(0)
    await expect(page.locator(".bubble")).to_have_text("one")


async def test_dark_follows_the_system_until_a_choice_is_made_and_the_choice_is_kept(
    start: Start, open_page: OpenPage
):
    page = await open_page(await start(), color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark, light = "rgb(18, 20, 19)", "rgb(246, 246, 243)"
    assert await page.evaluate(ground) == dark
    await page.get_by_role("button", name="Theme: system").click()
    await expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert await page.evaluate(ground) == light
    await page.reload()
    await expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert await page.evaluate(ground) == light
    await page.get_by_role("button", name="Theme: light").click()
    await page.emulate_media(color_scheme="light")
    assert await page.evaluate(ground) == dark
    await page.get_by_role("button", name="Theme: dark").click()
    assert await page.evaluate(ground) == light


async def test_everything_can_be_done_by_keyboard(tmp_path: Path, start: Start, open_page: OpenPage):
    models = tmp_path / "models"
    for name in ("a", "b"):
        make_scripted_model(models, name)
    page = await open_page(await start(models=models))
    await expect(page.locator(".chip")).to_have_count(2)
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_be_focused()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Load a model")).to_be_focused()
    await page.keyboard.press("Enter")
    search = page.get_by_role("combobox", name="Search models")
    await expect(search).to_be_focused()
    await page.keyboard.press("ArrowDown")
    await expect(page.locator("[aria-selected=true] .option-name")).to_have_text("b")
    chosen = await page.locator("[aria-selected=true]").get_attribute("id")
    await expect(search).to_have_attribute("aria-activedescendant", chosen or "")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("listitem", name="b").locator(".badge")).to_have_text("ready")
    await expect(page.get_by_role("button", name="Load a model")).to_be_focused()
    # Every control has a visible focus.
    await page.get_by_role("listitem", name="b").get_by_role("button", name="Pin").focus()
    await page.keyboard.press("Shift+Tab")
    outline = "getComputedStyle(document.activeElement).outlineWidth"
    assert await page.evaluate(outline) == "2px"


async def test_reduced_motion_is_kept_to(busy: Served, open_page: OpenPage):
    page = await open_page(busy, reduced_motion="reduce")
    await look.pool(page)
    moving = "getComputedStyle(document.querySelector('.progress-fill')).transitionDuration"
    assert await page.evaluate(moving) == "0s"


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desk", "phone"])
async def test_screenshots_of_every_view(busy: Served, open_page: OpenPage, scheme: str, device: str):
    options = PHONE if device == "phone" else {"width": 1280, "height": 860}
    page = await open_page(busy, color_scheme=scheme, device_scale_factor=2, **options)
    taken = []
    for name, show in look.VIEWS.items():
        await show(page)
        path = SCREENSHOTS / f"{name}-{device}-{scheme}.png"
        await page.screenshot(path=path, animations="disabled")
        taken.append(path.stat().st_size)
        await page.keyboard.press("Escape")
    # A page that failed to draw is a few kilobytes of one colour.
    assert min(taken) > 15_000, json.dumps(taken)
