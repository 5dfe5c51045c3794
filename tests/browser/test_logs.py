"""The Logs page: lines as they are written, held, filtered, joined over a reconnect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.browser.conftest import OpenPage, Start
from tests.tools.scripted_script import make_scripted_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


def write_log(home: Path, model: str, *lines: str) -> None:
    """Lines as an earlier worker of the model left them."""
    (home / "logs").mkdir(parents=True, exist_ok=True)
    with (home / "logs" / f"{model}.log").open("a") as log:
        log.writelines(f"{line}\n" for line in lines)


async def texts(page: Page) -> list[str]:
    return await page.locator(".log-text").all_inner_texts()


async def test_lines_come_live_and_html_in_them_stays_text(tmp_path: Path, start: Start, open_page: OpenPage):
    said = ("reading <b>weights</b>", "\u001b[32mgreen\u001b[0m")
    folder = make_scripted_model(tmp_path / "models", "a", stderr=said)
    served = await start(models=folder.parent, settings={"pool.spare_worker": "false"})
    page = await open_page(served, "#/logs/a")
    await expect(page.get_by_text("a writes here once it is loaded.")).to_be_visible()
    await served.chat("a")
    await expect(page.locator(".log-text", has_text="reading <b>weights</b>")).to_be_visible()
    await expect(page.locator(".log-text", has_text=re.compile("^green$"))).to_be_visible()
    assert await page.locator(".log b").count() == 0


async def test_a_pause_holds_the_view_and_says_how_much_is_new(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a", stderr=("fresh one", "fresh two"))
    write_log(tmp_path / "home", "a", *(f"old {n}" for n in range(5)))
    served = await start(models=folder.parent, settings={"pool.spare_worker": "false"})
    page = await open_page(served, "#/logs/a")
    await expect(page.locator(".log-text")).to_have_text([f"old {n}" for n in range(5)])
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_text("5 lines · paused")).to_be_visible()
    await served.chat("a")
    resume = page.get_by_role("button", name=re.compile(r"^Resume \(\d+ new\)$"))
    await expect(resume).to_be_visible()
    await expect(page.locator(".log-text")).to_have_text([f"old {n}" for n in range(5)])
    await resume.click()
    await expect(page.locator(".log-text", has_text="fresh two")).to_be_visible()
    shown = await texts(page)
    assert shown[:5] == [f"old {n}" for n in range(5)]
    assert len(shown) == len(set(shown))


async def test_a_filter_shows_matching_lines_alone(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a")
    write_log(tmp_path / "home", "a", *(f"line {n} {'ODD' if n % 2 else 'even'}" for n in range(150)))
    page = await open_page(await start(models=folder.parent), "#/logs/a")
    await expect(page.locator(".log-text")).to_have_count(150)
    await page.get_by_role("searchbox", name="Filter the lines").fill("odd")
    await expect(page.locator(".log-text")).to_have_count(75)
    await expect(page.get_by_text("75 of 150 lines")).to_be_visible()
    await page.get_by_role("searchbox", name="Filter the lines").fill("nowhere")
    await expect(page.get_by_text("150 lines are hidden by the filter.")).to_be_visible()
    await page.get_by_role("searchbox", name="Filter the lines").fill("")
    assert await texts(page) == [f"line {n} {'ODD' if n % 2 else 'even'}" for n in range(150)]
    # The end is in sight: that is where a log is read.
    await expect(page.locator(".log-text").last).to_be_in_viewport()


async def test_all_logs_together_name_the_model_of_each_line(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "models", name)
        write_log(tmp_path / "home", name, f"said by {name}")
    page = await open_page(await start(models=tmp_path / "models"), "#/logs")
    await expect(page.locator(".log-line")).to_have_text(["asaid by a", "bsaid by b"])
    await page.get_by_role("combobox", name="Model").select_option("b")
    await expect(page.locator(".log-line")).to_have_text(["said by b"])
    await expect(page).to_have_url(re.compile(r"#/logs/b$"))


async def test_a_reconnect_shows_each_line_once(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a")
    write_log(tmp_path / "home", "a", "one", "two", "two")
    page = await open_page(await start(models=folder.parent), "#/logs/a")
    await expect(page.locator(".log-text")).to_have_text(["one", "two", "two"])
    write_log(tmp_path / "home", "a", "three")
    # Another key is a new connection, as after a break.
    await page.evaluate("import('./static/js/core/api.js').then((m) => m.useKey('any'))")
    await expect(page.locator(".log-text")).to_have_text(["one", "two", "two", "three"])
