"""The Jobs page: a form made of a kind's schema, a job as it goes, and what is told of it later."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, Start
from tests.browser.test_look import BEYOND_THE_EDGE, PHONE, faults_of
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLAGS = ["--scripted-job"]
HOSTILE = "<img src=x onerror=window.hit=1>"


async def submit(served: Served, **config: Any) -> str:
    """A scripted job of this configuration; its id."""
    answer = await served.request("POST", "/api/jobs", {"kind": "scripted", "config": config})
    assert answer.status == 202, answer.body
    return str(answer.body["id"])


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("listitem", name=f"scripted {name}", exact=True)


def status(page: Page) -> Locator:
    """That of the job that is shown."""
    return page.locator(".page-head .badge")


def curve(page: Page, name: str) -> Locator:
    return page.get_by_role("list", name="Curves").get_by_role("listitem").filter(has_text=name)


async def said(page: Page) -> list[str]:
    return await page.locator(".job-log .log-text").all_inner_texts()


def numbered(*numbers: int) -> list[str]:
    return [f"said {n}" for n in numbers]


async def test_a_job_is_begun_in_its_form_and_followed_to_its_end(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    make_scripted_model(tmp_path / "models", "small")
    gate = tmp_path / "gate"
    served = await start(models=tmp_path / "models", flags=FLAGS)
    page = await open_page(served, "#/jobs")
    await expect(page.get_by_text("There are no jobs yet")).to_be_visible()
    await page.get_by_role("link", name="New job").click()
    await page.get_by_role("link", name="scripted").click()
    form = page.get_by_role("form", name="New job: scripted")
    await form.get_by_label("name", exact=True).fill("first")
    await form.get_by_label("steps", exact=True).fill("12")
    await form.get_by_role("button", name="Choose: model").click()
    await page.get_by_role("option", name="small").click()
    await expect(form.get_by_label("model", exact=True)).to_have_value("small")
    await form.get_by_label("mode", exact=True).select_option("quick")
    await form.get_by_label("careful", exact=True).check()
    await form.get_by_text("More settings").click()
    await form.get_by_label("gate", exact=True).fill(str(gate))
    await form.get_by_label("rate", exact=True).fill("2.5e-1")
    await form.get_by_label("words", exact=True).fill("one, two")
    await form.get_by_label("hold at", exact=True).fill("9")
    await form.get_by_role("button", name="Start").click()

    await expect(page.get_by_role("heading", name="scripted small")).to_be_visible()
    await expect(status(page)).to_have_text("running")
    bar = page.get_by_role("progressbar", name="Progress")
    await expect(bar).to_have_attribute("aria-valuetext", "66%")
    await expect(page.locator(".job-message")).to_have_text("work step 8 of 12")
    stages = page.get_by_role("list", name="Stages").get_by_role("listitem")
    await expect(stages).to_have_count(2)
    await expect(stages.last).to_contain_text("step 8 of 12")
    # As many points as figures were told: the train loss with each step, the other with every fifth.
    await expect(curve(page, "train loss")).to_contain_text("8 points, last 0.375 at step 8")
    await expect(curve(page, "val loss")).to_contain_text("2 points, last 0.66667 at step 6")
    drawn = page.get_by_role("img", name="loss by step: train loss, 8 points, from 3 to 0.375; val loss")
    await expect(drawn.locator("canvas")).to_be_visible()
    assert await said(page) == numbered(*range(1, 9))
    config = (await served.request("GET", "/api/jobs")).body["jobs"][0]["config"]
    assert config == {
        "name": "first", "steps": 12, "model": "small", "mode": "quick", "careful": True,
        "gate": str(gate), "rate": 0.25, "words": ["one", "two"], "hold_at": 9,
    }  # fmt: skip

    gate.touch()
    await expect(status(page)).to_have_text("done")
    await expect(curve(page, "train loss")).to_contain_text("12 points, last 0.25 at step 12")
    await page.get_by_role("combobox", name="Chart").select_option("speed")
    await expect(
        page.get_by_role("img", name="speed by step: speed, 12 points, from 101 to 112")
    ).to_be_visible()
    assert await said(page) == numbered(*range(1, 13))
    await expect(page.get_by_role("region", name="Result")).to_contain_text("12")
    await expect(bar).to_have_count(0)
    await expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


async def test_faults_stand_at_their_fields_and_all_together(start: Start, open_page: OpenPage):
    page = await open_page(await start(flags=FLAGS), "#/jobs/new/scripted")
    form = page.get_by_role("form", name="New job: scripted")
    summary = form.get_by_role("alert")
    await form.get_by_label("steps", exact=True).fill("many")
    await form.get_by_text("More settings").click()
    await form.get_by_label("rate", exact=True).fill("7")
    await form.get_by_text("More settings").click()
    await form.get_by_role("button", name="Start").click()
    await expect(summary.get_by_text("3 settings are not right:")).to_be_visible()
    await expect(summary.get_by_role("listitem")).to_have_count(3)
    await expect(form.get_by_label("name", exact=True)).to_be_focused()
    for field, fault in (
        ("name", "missing"),
        ("steps", '"many" is not a whole number'),
        ("rate", "7 is not a number"),
    ):
        box = form.get_by_label(field, exact=True)
        await expect(box).to_have_attribute("aria-invalid", "true")
        # Also where the field was folded away.
        await expect(box).to_be_visible()
        described = await box.get_attribute("aria-describedby") or ""
        assert fault in await page.locator(f"[id='{described.split()[-1]}']").inner_text()
    assert await form.get_by_label("steps", exact=True).input_value() == "many"

    # What the machine has to say, once each field is right by itself.
    await form.get_by_label("name", exact=True).fill("taken")
    await form.get_by_label("model", exact=True).fill("missing")
    await form.get_by_label("steps", exact=True).fill("3")
    await form.get_by_label("rate", exact=True).fill("")
    await form.get_by_role("button", name="Start").click()
    await expect(summary.get_by_text("2 settings are not right:")).to_be_visible()
    await expect(summary).to_contain_text("name: 'taken' is taken; choose another")
    await expect(form.locator("[aria-invalid=true]")).to_have_count(2)


async def test_a_reload_and_a_broken_connection_lose_and_repeat_nothing(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    gate = tmp_path / "gate"
    served = await start(flags=FLAGS)
    job = await submit(served, name="long", steps=40, hold_at=21, gate=str(gate), lines=3)
    page = await open_page(served, f"#/jobs/{job}")
    await expect(page.locator(".job-log .log-text")).to_have_count(60)
    await page.reload()
    await expect(page.locator(".job-log .log-text")).to_have_count(60)
    await page.context.set_offline(True)
    # Another key is another connection, which has to be tried again until the network is back.
    await page.evaluate("import('./static/js/core/api.js').then((m) => m.useKey('any'))")
    await expect(page.get_by_role("alert").filter(has_text="Its events don't come")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    gate.touch()
    await page.context.set_offline(False)
    await expect(curve(page, "train loss")).to_contain_text("40 points")
    await expect(status(page)).to_have_text("done")
    assert await said(page) == numbered(*range(1, 121))
    await expect(curve(page, "val loss")).to_contain_text("8 points")
    # Behind what was there already, not from the beginning.
    resumed = [url for url in asked if f"{job}/events" in url]
    assert resumed
    assert all(int(url.rpartition("offset=")[2]) > 1000 for url in resumed)
    # An ended job's log is read to its end, and then nobody listens any more.
    await page.reload()
    await expect(curve(page, "train loss")).to_contain_text("40 points")
    before = len(asked)
    await page.get_by_role("link", name="All jobs").click()
    await expect(row(page, "long")).to_contain_text("done")
    assert not [url for url in asked[before:] if "/events" in url]


async def test_jobs_begun_elsewhere_are_there_at_once_and_are_cancelled_after_a_question(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    served = await start(flags=FLAGS)
    page = await open_page(served, "#/jobs")
    await expect(page.get_by_text("There are no jobs yet")).to_be_visible()
    waiting = {"steps": 4, "hold_at": 2, "gate": str(tmp_path / "gate")}
    job = await submit(served, name="one", **waiting)
    await submit(served, name="two", **waiting)
    await expect(row(page, "one")).to_contain_text("work step 1 of 4")
    await expect(row(page, "one").get_by_role("progressbar")).to_have_attribute("aria-valuetext", "25%")
    await expect(row(page, "two").locator(".badge")).to_have_text("queued")
    await page.get_by_role("link", name="Pool", exact=True).click()
    await page.get_by_role("link", name=re.compile("scripted one 25% and 1 job more")).click()
    await row(page, "two").get_by_role("button", name="Cancel").click()
    await page.get_by_role("alertdialog").get_by_role("button", name="Keep it").click()
    await expect(row(page, "two").locator(".badge")).to_have_text("queued")
    await row(page, "two").get_by_role("button", name="Cancel").click()
    await page.get_by_role("button", name="Cancel the job").click()
    await expect(row(page, "two").locator(".badge")).to_have_text("cancelled")
    await row(page, "one").get_by_role("link").click()
    await page.get_by_role("button", name="Cancel").click()
    await page.get_by_role("button", name="Cancel the job").click()
    await expect(status(page)).to_have_text("cancelled")
    assert (await served.request("GET", f"/api/jobs/{job}")).body["status"] == "cancelled"
    await page.get_by_role("link", name="Run again").click()
    form = page.get_by_role("form", name="New job: scripted")
    await expect(form.get_by_label("name", exact=True)).to_have_value("one")
    await expect(form.get_by_label("gate", exact=True)).to_have_value(str(tmp_path / "gate"))
    await expect(form.get_by_label("hold at", exact=True)).to_have_value("2")
    await page.get_by_role("link", name="Cancel").click()
    await expect(page.get_by_role("region", name="Ended").get_by_role("listitem")).to_have_count(2)
    await expect(page.get_by_role("region", name="Under way")).to_have_count(0)


async def test_a_job_that_fails_says_why_and_html_in_it_stays_text(start: Start, open_page: OpenPage):
    served = await start(flags=FLAGS)
    job = await submit(served, name=HOSTILE, steps=1, end="failed", error=f"no {HOSTILE} room")
    page = await open_page(served, f"#/jobs/{job}")
    await expect(status(page)).to_have_text("failed")
    await expect(page.get_by_role("group", name="Why")).to_have_text(f"no {HOSTILE} room")
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"scripted {HOSTILE}")
    await page.get_by_role("link", name="All jobs").click()
    await expect(page.locator(".job-row")).to_contain_text(f"no {HOSTILE} room")
    assert await page.evaluate("[window.hit, document.images.length]") == [None, 0]
    await page.evaluate("location.hash = '#/jobs/job_none'")
    await expect(page.get_by_role("heading", name="No such job")).to_be_visible()


async def test_what_a_job_has_made_can_be_loaded_there(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "made-8bit", tokens=2)
    served = await start(models=folder.parent, flags=FLAGS)
    result = {"path": str(folder), "bits_per_weight": 8.5012345}
    page = await open_page(served, f"#/jobs/{await submit(served, name='x', steps=1, result=result)}")
    made = page.get_by_role("region", name="Result")
    await expect(made).to_contain_text("8.5012")
    await made.get_by_role("button", name="Load made-8bit").click()
    await expect(made.get_by_role("button", name="Load made-8bit")).to_have_text("Loaded")
    await made.get_by_role("link", name="Chat with made-8bit").click()
    await page.get_by_role("textbox", name="Message", exact=True).fill("hello")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message-who")).to_have_text("made-8bit")


async def test_a_long_log_shows_its_last_lines_and_is_followed_until_one_scrolls_up(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    gate = tmp_path / "gate"
    served = await start(flags=FLAGS)
    job = await submit(served, name="loud", steps=60, lines=50, hold_at=59, gate=str(gate))
    page = await open_page(served, f"#/jobs/{job}", permissions=["clipboard-read", "clipboard-write"])
    follow = page.get_by_role("button", name="Follow")
    await expect(page.get_by_text("The last 1,000 of 2,900 lines")).to_be_visible()
    assert await said(page) == numbered(*range(1901, 2901))
    log = page.get_by_role("log", name="Log of the job")
    at_end = "e => e.scrollHeight - e.scrollTop - e.clientHeight < 24"
    assert await log.evaluate(at_end)
    await expect(follow).to_have_attribute("aria-pressed", "true")
    await log.evaluate("e => { e.scrollTop = 100; }")
    await expect(follow).to_have_attribute("aria-pressed", "false")
    await page.get_by_role("button", name="Copy").click()
    await expect(page.get_by_text("1,000 lines copied")).to_be_visible()
    assert (await page.evaluate("navigator.clipboard.readText()")).split("\n") == await said(page)
    await follow.click()
    await until(lambda: log.evaluate(at_end), 60)
    gate.touch()
    await expect(page.get_by_text("The last 1,000 of 3,000 lines")).to_be_visible()
    await until(lambda: log.evaluate(at_end), 60)
    assert (await said(page))[-1] == "said 3000"


async def test_axe_finds_nothing_serious_and_a_phone_scrolls_only_down(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    served = await start(flags=FLAGS)
    await submit(served, name="a-name-that-is-rather-long-" * 3, steps=2, end="failed")
    job = await submit(served, name="one", steps=6, hold_at=6, gate=str(tmp_path / "gate"), lines=4)
    for options in ({"color_scheme": "light"}, {"color_scheme": "dark"}, PHONE):
        page = await open_page(served, "#/jobs", **options)
        await expect(page.locator(".job-row")).to_have_count(2)
        await expect(row(page, "one").get_by_role("progressbar")).to_have_attribute("aria-valuetext", "83%")
        for path, there in (
            (f"#/jobs/{job}", ".job-plot canvas"),
            ("#/jobs/new/scripted", ".job-form"),
            ("#/jobs", ".job-row"),
        ):
            await page.evaluate(f"location.hash = '{path}'")
            await expect(page.locator(there).first).to_be_visible()
            assert await faults_of(page) == [], (path, options)
            if options is PHONE:
                assert await page.evaluate(BEYOND_THE_EDGE) == [], path


RECORD = """async () => {
    const { Record, MAX_POINTS, aligned } = await import("./static/js/jobs/record.js");
    const record = new Record();
    const metric = (values) => ({ type: "metric", time: 1, values });
    const known = [record.take(10, metric({ a: 1 })), record.take(10, metric({ a: 2 })),
        record.take(9, metric({ a: 3 })), record.take(20, metric({ a: null, b: 5 }))];
    const few = aligned(["a", "b"].map((name) => record.series.get(name)));
    for (let i = 0; i < MAX_POINTS; i++) record.take(21 + i, metric({ step: i, c: i }));
    const { x, count } = record.series.get("c");
    return { known, few, count, kept: x.length, last: x.at(-1) };
}"""


async def test_a_record_takes_each_event_once_and_thins_curves_that_never_end(
    start: Start, open_page: OpenPage
):
    page = await open_page(await start())
    record = await page.evaluate(RECORD)
    assert record["known"] == [True, False, False, True]
    # Without a step figures are as of their own number.
    assert record["few"] == [[1, 2], [1, None], [None, 5]]
    assert (record["count"], record["kept"], record["last"]) == (8000, 4000, 7999)
