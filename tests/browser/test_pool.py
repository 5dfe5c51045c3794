"""The Pool page against the real parent over scripted workers: what it shows, and what it can do."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, Start
from tests.tools.scripted_lease import borrow
from tests.tools.scripted_script import expected_text, make_scripted_model, read_events
from tests.tools.served import Served

pytestmark = pytest.mark.asyncio(loop_scope="session")


def card(page: Page, model: str) -> Locator:
    """The card of one model's worker."""
    return page.get_by_role("listitem", name=model, exact=True)


def figure(page: Page, model: str, name: str) -> Locator:
    """One of the numbers on a card."""
    box = card(page, model).locator(".figures div").filter(has=page.locator("dt", has_text=name))
    return box.locator("dd")


async def test_an_idle_pool_offers_what_could_be_loaded(tmp_path: Path, start: Start, open_page: OpenPage):
    for name in ("a", "b", "c", "d", "e", "f"):
        make_scripted_model(tmp_path / "models", name)
    page = await open_page(await start(models=tmp_path / "models"))
    await expect(page).to_have_title("Pool · mlxpool")
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    await expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    await expect(page.locator(".chip").first).to_contain_text("a")
    await expect(page.locator(".chip").last).to_have_text("2 more…")
    await page.locator(".chip").first.click()
    await expect(card(page, "a").locator(".badge")).to_have_text("ready")


async def test_without_models_the_page_leads_to_where_one_gets_them(start: Start, open_page: OpenPage):
    page = await open_page(await start())
    await expect(page.get_by_text("There are no models here yet")).to_be_visible()
    await page.get_by_role("button", name="Go to Models").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Models")


async def test_a_load_shows_its_progress_and_can_be_cancelled(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(
        tmp_path / "models", "slow", weights_bytes=1_000_000_000, load_s=20, load_lines=100
    )
    served = await start(models=folder.parent, budget="4GB")
    page = await open_page(served)
    await page.get_by_role("button", name="Load a model").click()
    await expect(page.get_by_role("combobox", name="Search models")).to_be_focused()
    await expect(page.get_by_role("option", name="slow")).to_be_visible()
    await page.keyboard.press("Enter")
    bar = card(page, "slow").get_by_role("progressbar", name="Loading slow")
    await expect(bar).to_have_attribute("aria-valuenow", re.compile(r"^[1-9]\d?$"))
    await expect(card(page, "slow")).to_contain_text(re.compile(r"\d+(\.\d+)? MB of 1\.00 GB"))
    await expect(page.get_by_text("reserved of 4.00 GB")).to_be_visible()
    await card(page, "slow").get_by_role("button", name="Cancel").click()
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    assert (await served.pool())["reserved_bytes"] == 0


async def test_switching_under_load_ends_every_answer_in_full_before_the_other_model_serves(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    """Two do not fit at once: the running streams end untouched, then the other one loads."""
    models = tmp_path / "models"
    for name in ("first", "second"):
        make_scripted_model(models, name, weights_bytes=300_000_000, tokens=150, tokens_per_s=30)
    served = await start(models=models, budget="1200MB")
    page = await open_page(served)
    streams = [asyncio.create_task(served.stream("first", f"question {n}")) for n in range(3)]
    await expect(figure(page, "first", "running")).to_have_text("3")
    await expect(figure(page, "first", "tokens/s")).to_have_text(re.compile(r"^[1-9]"))
    await card(page, "first").get_by_role("button", name="Switch…").click()
    await expect(page.get_by_role("dialog", name="Switch from first to")).to_be_visible()
    await page.get_by_role("option", name="second").click()
    await expect(card(page, "first").locator(".badge")).to_have_text("finishing")
    await expect(page.get_by_text("Switching from first to second")).to_be_visible()
    for n, answer in enumerate(await asyncio.gather(*streams)):
        assert answer.text == expected_text("first", f"question {n}", 150)
        assert answer.finish == "stop"
    await expect(card(page, "second").locator(".badge")).to_have_text("ready")
    await expect(card(page, "first")).to_have_count(0)
    assert (await served.chat("second", "hello", max_tokens=9)).text == expected_text("second", "hello", 9)
    assert [e["event"] for e in read_events(models / "first")].count("drain") == 1


async def test_a_pin_protects_and_shows(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a")
    served = await start(models=folder.parent)
    page = await open_page(served)
    await page.locator(".chip").click()
    await card(page, "a").get_by_role("button", name="Pin").click()
    await expect(card(page, "a").get_by_role("button", name="Unpin")).to_have_attribute(
        "aria-pressed", "true"
    )
    await expect(page.get_by_text("a is pinned: it is never evicted")).to_be_visible()
    assert (await served.worker("a"))["pinned"] is True
    await card(page, "a").get_by_role("button", name="Unpin").click()
    await expect(card(page, "a").get_by_role("button", name="Pin", exact=True)).to_be_visible()
    assert (await served.worker("a"))["pinned"] is False


async def test_an_unload_waits_for_answers_and_is_forced_only_when_asked_twice(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a", tokens=2000, tokens_per_s=50)
    served = await start(models=folder.parent)
    page = await open_page(served)
    stream = asyncio.create_task(served.stream_bytes("a"))
    await expect(figure(page, "a", "running")).to_have_text("1")
    await card(page, "a").get_by_role("button", name="Unload").click()
    await expect(card(page, "a").locator(".badge")).to_have_text("finishing")
    await card(page, "a").get_by_role("button", name="End now").click()
    asked = page.get_by_role("alertdialog", name="End a now?")
    await asked.get_by_role("button", name="Cancel").click()
    await expect(card(page, "a").locator(".badge")).to_have_text("finishing")
    await card(page, "a").get_by_role("button", name="End now").click()
    await asked.get_by_role("button", name="End now").click()
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    assert b'"error"' in await stream


async def test_who_waits_and_for_what(tmp_path: Path, start: Start, open_page: OpenPage):
    models = tmp_path / "models"
    make_scripted_model(models, "busy", weights_bytes=300_000_000, tokens=400, tokens_per_s=100)
    make_scripted_model(models, "next", weights_bytes=300_000_000)
    served = await start(models=models, budget="1200MB")
    page = await open_page(served)
    first = asyncio.create_task(served.chat("busy"))
    await expect(figure(page, "busy", "running")).to_have_text("1")
    second = asyncio.create_task(served.chat("next"))
    queue = page.get_by_role("region", name="Waiting")
    await expect(queue.locator(".row-main")).to_have_text("next")
    await expect(queue.locator(".row-side")).to_have_text(re.compile(r"^[1-4] s$"))
    assert (await first).status == 200
    assert (await second).status == 200
    await expect(queue.get_by_text("No request waits.")).to_be_visible()
    recent = page.get_by_role("region", name="Recent")
    await expect(recent.locator(".event-evict strong")).to_have_text("busy")
    await expect(recent).to_contain_text("2 loads · 1 eviction · 0 crashes")


async def test_a_failed_load_says_why_and_html_in_it_stays_text(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    reason = "no memory <img src=x onerror=window.hit=1> left"
    folder = make_scripted_model(tmp_path / "models", "bad", fail_load=reason)
    page = await open_page(await start(models=folder.parent))
    await page.locator(".chip").click()
    await expect(card(page, "bad").locator(".badge")).to_have_text("failed")
    await expect(card(page, "bad").get_by_role("group", name="Why")).to_contain_text(reason)
    recent = page.get_by_role("region", name="Recent")
    await expect(recent.locator(".event-failed")).to_contain_text(reason)
    await expect(recent.locator(".event-gone")).to_have_count(0)
    assert await page.evaluate("[window.hit, document.images.length]") == [None, 0]
    await expect(card(page, "bad").get_by_role("button", name="Try again")).to_be_enabled()


async def test_a_hostile_model_name_is_a_name_like_any_other(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    name = "<img src=x onerror=window.hit=1> #1?&%41"
    folder = make_scripted_model(tmp_path / "models", name, tokens=2)
    page = await open_page(await start(models=folder.parent))
    await page.locator(".chip").click()
    await expect(card(page, name).locator(".badge")).to_have_text("ready")
    await card(page, name).get_by_role("button", name="Pin").click()
    await expect(page.get_by_text(f"{name} is pinned")).to_be_visible()
    await card(page, name).get_by_role("link", name="Logs").click()
    await expect(page.get_by_role("combobox", name="Model")).to_have_value(name)
    await expect(page.locator(".log-text").first).to_contain_text(name)
    await page.go_back()
    await card(page, name).get_by_role("link", name="Chat").click()
    await page.get_by_role("textbox", name="Message", exact=True).fill("hello")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message-who")).to_have_text(name)
    await expect(page.locator(".message .markdown")).to_contain_text(":hello:1")
    await page.get_by_role("link", name="Models", exact=True).click()
    await page.get_by_role("button", name=f"Unload {name}").click()
    await expect(page.get_by_role("listitem", name=name, exact=True).locator(".badge")).to_have_text(
        "not loaded"
    )
    assert await page.evaluate("[window.hit, document.images.length]") == [None, 0]


async def test_a_crash_is_counted_and_its_signal_named(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a", crash_at="decode", fault_on="die")
    served = await start(models=folder.parent)
    page = await open_page(served)
    assert (await served.chat("a", "die")).code == "worker_crashed"
    recent = page.get_by_role("region", name="Recent")
    await expect(recent.locator(".event-crash")).to_contain_text("SIGABRT")
    await expect(recent).to_contain_text("1 crash")
    await expect(recent).not_to_contain_text("1 crashes")


async def test_a_lost_server_is_said_and_found_again(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a")
    served: Served = await start(models=folder.parent)
    page = await open_page(served)
    await page.locator(".chip").click()
    await expect(card(page, "a").locator(".badge")).to_have_text("ready")
    # Cut and refused by the browser, as by a network that is gone.
    await page.context.set_offline(True)
    await page.evaluate("import('./static/js/core/live.js').then((m) => m.logsWanted.value = 'a')")
    await expect(page.get_by_role("alert").filter(has_text="Disconnected.")).to_be_visible()
    await expect(page.locator(".connection")).to_have_text("Disconnected")
    # What was known stays in sight.
    await expect(card(page, "a")).to_be_visible()
    await page.context.set_offline(False)
    await page.get_by_role("button", name="Try now").click()
    await expect(page.locator(".connection")).to_have_text("Live")
    await expect(page.get_by_text("Disconnected.")).to_have_count(0)


async def test_an_open_page_does_not_hold_up_the_servers_end(start: Start, open_page: OpenPage):
    served = await start()
    page = await open_page(served)
    await expect(page.locator(".connection")).to_have_text("Live")
    begun = time.monotonic()
    assert await served.down() == 0
    # It was 10 s while streams of events were waited for.
    assert time.monotonic() - begun < 4
    await expect(page.locator(".connection")).to_have_text("Disconnected")


async def test_a_tab_that_nobody_looks_at_lets_its_connection_go(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a")
    served = await start(models=folder.parent)
    page = await open_page(served, clock=True)
    await expect(page.locator(".connection")).to_have_text("Live")
    look_away = """(away) => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => away });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await page.evaluate(look_away, True)
    await page.clock.fast_forward(9_000)
    await expect(page.locator(".connection")).to_have_text("Live")
    await page.clock.fast_forward(2_000)
    await expect(page.locator(".connection")).to_have_text("Paused")
    assert (await served.chat("a")).status == 200
    await page.evaluate(look_away, False)
    await expect(card(page, "a").locator(".badge")).to_have_text("ready")
    await expect(page.locator(".connection")).to_have_text("Live")


async def test_a_page_older_than_its_server_says_so(start: Start, open_page: OpenPage):
    page = await open_page(await start())
    await expect(page.locator(".connection")).to_have_text("Live")
    hello = 'event: hello\ndata: {"version": "999"}\n\n'
    await page.route(
        "**/api/events*", lambda route: route.fulfill(content_type="text/event-stream", body=hello)
    )
    await page.evaluate("import('./static/js/core/api.js').then((m) => m.useKey('any'))")
    await expect(page.get_by_text("The server has been updated.")).to_be_visible()
    await page.unroute("**/api/events*")
    await page.get_by_role("button", name="Reload the page").click()
    await expect(page.locator(".connection")).to_have_text("Live")
    await expect(page.get_by_text("The server has been updated.")).to_have_count(0)


async def test_nothing_is_polled(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a", tokens=400, tokens_per_s=100)
    served = await start(models=folder.parent)
    page = await open_page(served)
    await page.locator(".chip").click()
    await expect(card(page, "a").locator(".badge")).to_have_text("ready")
    # Every page has been seen, so all modules are here.
    for name in ("Models", "Chat", "Logs", "Pool"):
        await page.get_by_role("link", name=name, exact=True).click()
        await expect(page).to_have_title(f"{name} · mlxpool")
        await expect(page.locator(".main > .page, .main > .chat")).to_be_visible()
    await expect(page.locator(".plot canvas")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    assert (await served.chat("a")).status == 200
    await expect(card(page, "a").locator(".card-foot")).to_contain_text("last used")
    assert asked == []


async def test_a_job_that_wants_the_gpu_is_named_and_so_is_what_each_request_waits_for(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    make_scripted_model(tmp_path / "models", "a", tokens=100_000, tokens_per_s=20)
    served = await start(models=tmp_path / "models", flags=["--lend"])
    page = await open_page(served)
    runs = asyncio.create_task(served.stream("a"))
    await expect(card(page, "a").locator(".badge")).to_have_text("ready")
    await expect(figure(page, "a", "running")).to_have_text("1")
    waiting = page.get_by_role("region", name="Waiting")
    async with borrow(served.home, "quantize smollm") as job:
        await expect(waiting).to_contain_text("GPU: quantize smollm waits for 1 request")
        behind = asyncio.create_task(served.chat("a", max_tokens=1))
        await expect(waiting.get_by_role("listitem")).to_contain_text("for the GPU")
        runs.cancel()
        await job.told()
        await expect(waiting).to_contain_text("GPU: held by quantize smollm")
        await expect(page.locator(".events li").first).to_contain_text("quantize smollm has the GPU")
    assert (await behind).status == 200
    await expect(waiting).not_to_contain_text("GPU")
