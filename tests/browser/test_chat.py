"""The Chat page: ask, stop, edit, retry, switch; what is written stays text; what was said is kept."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from tests.browser.conftest import OpenPage
from tests.tools.scripted_script import expected_text, make_scripted_model, read_events
from tests.tools.served import Served, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Shop:
    """The server of these tests and the models in it: each test makes its own."""

    def __init__(self, served: Served, models: Path) -> None:
        self.served = served
        self._models = models
        self._made = 0

    def make(self, prefix: str = "m", **script: Any) -> str:
        """A scripted model's name. The running server sees it at once."""
        self._made += 1
        name = f"{prefix}{self._made}"
        make_scripted_model(self._models, name, **script)
        return name

    def events(self, name: str) -> list[dict[str, Any]]:
        """What its workers wrote down."""
        return read_events(self._models / name)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shop]:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "models").mkdir()
    async with serve(folder, models=folder / "models", scripted=True, budget="8GB") as served:
        yield Shop(served, folder / "models")


def message_field(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant:not(.running)")


async def say(page: Page, text: str) -> None:
    """Write a message and send it."""
    await message_field(page).fill(text)
    await page.keyboard.press("Enter")


async def test_an_answer_with_its_figures(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=120, tokens_per_s=80)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await expect(page.get_by_text(f"Ask {name}")).to_be_visible()
    await say(page, "hello there")
    await expect(page.locator(".bubble")).to_have_text("hello there")
    await expect(answers(page).locator(".markdown")).to_have_text(
        expected_text(name, "hello there", 120).strip()
    )
    foot = answers(page).locator(".figures-line")
    await expect(foot.locator(".figure-tokens")).to_have_text("120 tokens")
    await expect(foot.locator(".figure-cached")).to_have_text("0 of 2 prompt tokens cached")
    await expect(foot.locator(".figure-first")).to_have_text(re.compile(r"^first token after \d"))
    said = await foot.locator(".figure-rate").inner_text()
    assert 40 < float(said.removesuffix(" tokens/s")) < 90
    await expect(page.get_by_role("heading", level=1)).to_have_text("hello there")
    await expect(message_field(page)).to_be_focused()


async def test_html_in_questions_answers_and_titles_stays_text(shop: Shop, open_page: OpenPage):
    attack = "<img src=x onerror=window.hit=1><script>window.hit=2</script>"
    name = shop.make(tokens=1, text=(f"{attack} **bold**",))
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, attack)
    await expect(answers(page)).to_contain_text(attack)
    await expect(page.locator(".bubble")).to_have_text(attack)
    await expect(page.get_by_role("heading", level=1)).to_have_text(attack[:60] + "…")
    assert await page.evaluate("[window.hit, document.images.length]") == [None, 0]


async def test_the_browser_itself_refuses_text_as_markup(browser: Browser, shop: Shop):
    """Whoever should try: the page's headers hold even where its code is wrong."""
    page = await browser.new_page()
    await page.goto(shop.served.url)
    tried = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.message; } }"
    assert "TrustedHTML" in await page.evaluate(tried)
    inline = """() => new Promise((resolve) => {
        addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
        const script = document.createElement("style");
        script.textContent = "body { display: none }";
        document.head.append(script);
    })"""
    assert await page.evaluate(inline) == "style-src-elem"
    await page.close()


async def test_a_stop_keeps_what_came_and_ends_the_work(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=2000, tokens_per_s=50)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "long")
    await expect(page.locator(".running .markdown")).to_contain_text(f"{name}:long:5")
    await page.get_by_role("button", name="Stop").click()
    await expect(answers(page)).to_contain_text(f"{name}:long:5")
    await expect(answers(page).locator(".figure-end")).to_have_text("stopped")
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await expect(message_field(page)).to_be_focused()
    events = [event["event"] for event in shop.events(name)]
    assert "cancelled" in events
    assert "done" not in events


async def test_escape_stops_too(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=2000, tokens_per_s=50)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "long")
    await expect(page.locator(".running .markdown")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(answers(page).locator(".figure-end")).to_have_text("stopped")


async def test_a_message_can_be_edited_and_an_answer_retried(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=3)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "one")
    await expect(answers(page)).to_have_count(1)
    await say(page, "two")
    await expect(answers(page)).to_have_count(2)
    await page.get_by_role("button", name="Retry").click()
    await expect(message_field(page)).to_be_focused()
    await expect(answers(page)).to_have_count(2)
    await page.get_by_role("button", name="Edit message").first.click()
    editor = page.get_by_role("textbox", name="Edit message")
    await expect(editor).to_be_focused()
    await editor.fill("three")
    await page.keyboard.press("Enter")
    # What came after the edited message is gone.
    await expect(page.locator(".bubble")).to_have_text(["three"])
    await expect(answers(page).locator(".markdown")).to_have_text([expected_text(name, "three", 3).strip()])
    asked = [event["prompt"] for event in shop.events(name) if event["event"] == "request"]
    assert asked == ["one", "two", "two", "three"]


async def test_the_switcher_shows_the_load_in_place_and_the_next_question_goes_to_the_other(
    shop: Shop, open_page: OpenPage
):
    small = shop.make("small", tokens=2)
    large = shop.make("large", tokens=2, weights_bytes=500_000_000, load_s=5, load_lines=40)
    page = await open_page(shop.served, f"#/chat?model={small}")
    await say(page, "hello")
    await expect(answers(page).locator(".message-who")).to_have_text(small)
    switcher = page.get_by_role("button", name="Model: ")
    await switcher.click()
    await page.keyboard.type(large)
    await page.keyboard.press("Enter")
    await expect(switcher).to_have_accessible_name(re.compile(rf"^Model: {large} loading [1-9]\d?%$"))
    await expect(switcher).to_be_focused()
    await say(page, "and you?")
    await expect(page.locator(".running")).to_contain_text(re.compile(r"Loading the model, \d+%"))
    await expect(switcher).to_have_accessible_name(f"Model: {large} ready")
    await expect(answers(page).locator(".message-who")).to_have_text([small, large])
    await expect(answers(page).last.locator(".markdown")).to_have_text(
        expected_text(large, "and you?", 2).strip()
    )


async def test_reasoning_is_folded_away(shop: Shop, open_page: OpenPage):
    text = ("<think>", "first ", "this", "</think>", "So ", "that.")
    name = shop.make(tokens=6, text=text)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "why")
    await expect(answers(page).locator(".markdown")).to_have_text("So that.")
    reasoning = answers(page).locator(".reasoning-text")
    await expect(reasoning).to_be_hidden()
    await answers(page).locator("summary").press("Enter")
    await expect(reasoning).to_have_text("first this")


async def test_an_error_is_shown_where_the_answer_would_be_and_can_be_retried(
    shop: Shop, open_page: OpenPage
):
    name = shop.make(crash_at="decode", fault_on="die", faulty_runs=1, tokens=6)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "die")
    await expect(answers(page).locator(".message-error")).to_contain_text("SIGABRT")
    await expect(answers(page).locator(".markdown")).to_contain_text(f"{name}:die:2")
    await page.get_by_role("button", name="Retry").click()
    await expect(answers(page).locator(".message-error")).to_have_count(0)
    await expect(answers(page).locator(".markdown")).to_have_text(expected_text(name, "die", 6).strip())


async def test_conversations_are_kept_in_the_browser_and_can_be_deleted(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=2)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "the first talk")
    await expect(answers(page)).to_have_count(1)
    await page.get_by_role("button", name="New chat").click()
    await expect(page.get_by_text(f"Ask {name}")).to_be_visible()
    await say(page, "the second talk")
    await expect(answers(page)).to_have_count(1)
    await page.reload()
    await expect(page.locator(".bubble")).to_have_text("the second talk")
    talks = page.get_by_role("complementary", name="Conversations").get_by_role("link")
    await expect(talks).to_have_text(["the second talk", "the first talk"])
    await talks.last.click()
    await expect(page.locator(".bubble")).to_have_text("the first talk")
    await page.get_by_role("button", name="Delete the first talk").click()
    await page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
    await expect(talks).to_have_text(["the second talk"])
    await expect(page.get_by_text(f"Ask {name}")).to_be_visible()
    stored = await page.evaluate(
        "Object.keys(localStorage).filter((k) => k.startsWith('mlxpool.chat.')).length"
    )
    assert stored == 1


async def test_full_storage_is_said_and_the_conversation_goes_on(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=2)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 200))")
    await say(page, "hello " * 100)
    await expect(page.get_by_role("alert").filter(has_text="storage is full")).to_be_visible()
    await expect(answers(page)).to_have_count(1)


async def test_settings_go_with_every_question(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=9)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await page.get_by_role("button", name="Chat settings").click()
    await page.get_by_role("textbox", name="Temperature").fill("warm")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("alert").filter(has_text="Temperature is warm")).to_be_visible()
    await page.get_by_role("textbox", name="Temperature").fill("0.2")
    await page.get_by_role("textbox", name="Longest answer").fill("4")
    await page.get_by_role("textbox", name="System prompt").fill("Be brief.")
    await page.get_by_role("button", name="Save").click()
    async with page.expect_request("**/v1/chat/completions") as asked:
        await say(page, "hello")
    body = (await asked.value).post_data_json
    assert body == {
        "model": name,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.2,
        "max_tokens": 4,
    }
    await expect(answers(page).locator(".markdown")).to_have_text(expected_text(name, "hello", 4).strip())
    await expect(answers(page).locator(".figure-end")).to_have_text("cut at the length limit")


async def test_an_answer_goes_on_while_another_page_is_looked_at(shop: Shop, open_page: OpenPage):
    name = shop.make(tokens=120, tokens_per_s=40)
    page = await open_page(shop.served, f"#/chat?model={name}")
    await say(page, "hello")
    await expect(page.locator(".running .markdown")).to_be_visible()
    await page.get_by_role("link", name="Pool", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_be_focused()
    await page.go_back()
    await expect(answers(page).locator(".markdown")).to_have_text(expected_text(name, "hello", 120).strip())


@pytest.mark.starter
async def test_a_real_model_is_loaded_asked_and_answers(
    starter_folder: Path, tmp_path: Path, open_page: OpenPage
):
    async with serve(tmp_path, models=starter_folder.parent) as served:
        page = await open_page(served, f"#/chat?model={starter_folder.name}")
        page.set_default_timeout(60_000)
        await page.get_by_role("button", name="Chat settings").click()
        await page.get_by_role("textbox", name="Temperature").fill("0")
        await page.get_by_role("button", name="Save").click()
        await say(page, "What is the capital of France? Answer in one sentence.")
        await expect(answers(page).locator(".figure-tokens")).to_have_text("8 tokens", timeout=60_000)
        await expect(answers(page).locator(".markdown")).to_have_text("The capital of France is Paris.")
        await expect(answers(page).locator(".figure-cached")).to_have_text(
            re.compile(r"^\d+ of 4\d prompt tokens cached$")
        )
        # The page is let go first: it would see its server end.
        await page.close()
