"""The Models page: what is here, whether it fits, pulls with progress, removal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page, Route, expect

from tests import tiny_glm
from tests.browser.conftest import OpenPage, Start
from tests.tools.fake_hub import FakeHub, Fault
from tests.tools.hub_models import write_random_model
from tests.tools.scripted_script import make_scripted_model, write_script

pytestmark = pytest.mark.asyncio(loop_scope="session")


def row(page: Page, model: str) -> Locator:
    """A model's row of the library."""
    return page.get_by_role("listitem", name=model, exact=True)


def pull(page: Page, name: str) -> Locator:
    """The row of a pull."""
    return page.get_by_role("listitem", name=f"Pull of {name}", exact=True)


async def test_the_library_says_what_fits_and_can_be_searched(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    models = tmp_path / "models"
    make_scripted_model(models, "small-one", weights_bytes=100_000_000)
    make_scripted_model(models, "huge-one", weights_bytes=900_000_000_000)
    broken = make_scripted_model(models, "broken-one")
    (broken / "model.safetensors").write_bytes(b"")
    page = await open_page(await start(models=models, budget="2GB"), "#/models")
    await expect(page.locator(".library-name")).to_have_text(["broken-one", "huge-one", "small-one"])
    await expect(row(page, "small-one").locator(".verdict .word")).to_have_text("fits")
    await expect(row(page, "small-one")).to_contain_text("llama · 100 MB on disk · context 2,048")
    await expect(row(page, "huge-one").locator(".verdict")).to_contain_text("too large")
    await expect(row(page, "huge-one").get_by_role("button", name="Load")).to_be_disabled()
    await expect(row(page, "broken-one")).to_contain_text("model.safetensors")
    await expect(row(page, "broken-one").get_by_role("button", name="Load")).to_be_disabled()
    await page.get_by_role("searchbox", name="Search the library").fill("SMALL")
    await expect(page.locator(".library-name")).to_have_text(["small-one"])
    await page.get_by_role("searchbox", name="Search the library").fill("none such")
    await expect(page.get_by_text("No model matches “none such”")).to_be_visible()
    await page.get_by_role("button", name="Show all").click()
    await expect(page.locator(".library-name")).to_have_count(3)


async def test_a_plan_is_taken_apart_and_asked_for_at_another_context(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a", weights_bytes=100_000_000, context=8192)
    page = await open_page(await start(models=folder.parent, budget="2GB"), "#/models")
    await row(page, "a").get_by_role("button", name="Memory of a").click()
    plan = page.get_by_role("dialog", name="Memory of a")
    await expect(plan.get_by_role("row", name="Weights")).to_contain_text("100 MB")
    await expect(plan.get_by_role("row", name="Budget")).to_contain_text("2.00 GB")
    await expect(plan.get_by_role("status")).to_have_text("Fits, with a context of 8,192 tokens.")
    kv_full = await plan.get_by_role("row", name="KV").inner_text()
    await plan.get_by_role("textbox", name="With another context").fill("1024")
    await expect(plan.get_by_role("status")).to_have_text("Fits, with a context of 1,024 tokens.")
    assert await plan.get_by_role("row", name="KV").inner_text() != kv_full
    await plan.get_by_role("textbox", name="With another context").fill("lots")
    await expect(plan.get_by_role("alert")).to_have_text("Use a whole number of tokens.")
    await page.keyboard.press("Escape")
    await expect(plan).to_have_count(0)
    await expect(row(page, "a").get_by_role("button", name="Memory of a")).to_be_focused()


async def test_load_unload_and_pin_from_the_library(tmp_path: Path, start: Start, open_page: OpenPage):
    folder = make_scripted_model(tmp_path / "models", "a")
    served = await start(models=folder.parent)
    page = await open_page(served, "#/models")
    await row(page, "a").get_by_role("button", name="Load a").click()
    await expect(row(page, "a").locator(".badge")).to_have_text("ready")
    await row(page, "a").get_by_role("button", name="Pin a").click()
    await expect(row(page, "a").get_by_role("button", name="Unpin a")).to_have_attribute(
        "aria-pressed", "true"
    )
    await row(page, "a").get_by_role("button", name="Unload a").click()
    await expect(row(page, "a").locator(".badge")).to_have_text("not loaded")
    assert (await served.worker("a"))["pinned"] is True


async def test_a_model_that_appears_on_disk_appears_on_the_page(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    (tmp_path / "models").mkdir()
    page = await open_page(await start(models=tmp_path / "models"), "#/models")
    await expect(page.get_by_text("There are no models here yet")).to_be_visible()
    make_scripted_model(tmp_path / "models", "late")
    await expect(page.locator(".library-name")).to_have_text(["late"])


async def test_a_removal_asks_first_and_refuses_a_loaded_model(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    home_models = tmp_path / "home" / "models"
    home_models.mkdir(parents=True)
    folder = make_scripted_model(home_models, "mine")
    make_scripted_model(tmp_path / "models", "elsewhere")
    page = await open_page(await start(models=tmp_path / "models"), "#/models")
    await expect(row(page, "elsewhere").get_by_role("button", name="Remove elsewhere")).to_be_disabled()
    await row(page, "mine").get_by_role("button", name="Load mine").click()
    await expect(row(page, "mine").locator(".badge")).to_have_text("ready")
    remove = row(page, "mine").get_by_role("button", name="Remove mine")
    asked = page.get_by_role("alertdialog", name="Remove mine?")
    await remove.click()
    await expect(asked).to_contain_text(str(folder))
    await asked.get_by_role("button", name="Remove").click()
    await expect(page.get_by_role("alert").filter(has_text="unload it first")).to_be_visible()
    await row(page, "mine").get_by_role("button", name="Unload mine").click()
    await expect(row(page, "mine").locator(".badge")).to_have_text("not loaded")
    await remove.click()
    await asked.get_by_role("button", name="Cancel").click()
    assert (folder / "config.json").exists()
    await remove.click()
    await asked.get_by_role("button", name="Remove").click()
    await expect(page.locator(".library-name")).to_have_text(["elsewhere"])
    assert not folder.exists()


async def test_a_name_that_is_no_repository_is_refused_in_place(start: Start, open_page: OpenPage):
    page = await open_page(await start(), "#/models")
    field = page.get_by_role("textbox", name="Model to pull")
    await field.fill("not a repository")
    await page.keyboard.press("Enter")
    await expect(
        page.get_by_role("alert").filter(has_text="“not a repository” is not a repository")
    ).to_be_visible()
    await expect(field).to_be_focused()
    await expect(field).to_have_attribute("aria-invalid", "true")


async def test_a_pull_shows_its_progress_and_ends_in_the_library(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    source = write_random_model(tmp_path / "source", mebibytes=8)
    with FakeHub() as hub:
        hub.add("some/model", source)
        # Cut once, it goes on a moment later from where it was: that moment is told.
        hub.faults["model.safetensors"] = Fault(cut_after=5 << 20)
        page = await open_page(await start(env={"HF_ENDPOINT": hub.url}), "#/models")
        await page.evaluate(
            """() => {
                window.seen = [];
                new MutationObserver(() => {
                    const bar = document.querySelector(".job [role=progressbar]");
                    if (bar) window.seen.push(Number(bar.getAttribute("aria-valuenow")));
                }).observe(document.body, { subtree: true, childList: true, attributes: true });
            }"""
        )
        await page.get_by_role("textbox", name="Model to pull").fill("some/model")
        await page.get_by_role("button", name="Pull").click()
        await expect(pull(page, "some/model")).to_contain_text("done just now")
        await expect(page.locator(".library-name")).to_have_text([re.compile("model$")])
        seen = await page.evaluate("window.seen")
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert any(0 < value < 100 for value in seen), seen


async def test_a_pull_can_be_cancelled(tmp_path: Path, start: Start, open_page: OpenPage):
    source = write_random_model(tmp_path / "source", mebibytes=8)
    with FakeHub() as hub:
        hub.add("some/model", source)
        hub.faults["model.safetensors"] = Fault(hold_after=1 << 20)
        served = await start(env={"HF_ENDPOINT": hub.url})
        page = await open_page(served, "#/models")
        await page.get_by_role("textbox", name="Model to pull").fill("some/model")
        await page.keyboard.press("Enter")
        await pull(page, "some/model").get_by_role("button", name="Cancel").click()
        await expect(pull(page, "some/model")).to_contain_text("cancelled")
        await expect(page.locator(".library-row")).to_have_count(0)
        hub.release()


async def test_a_pull_that_fails_says_why(start: Start, open_page: OpenPage):
    with FakeHub() as hub:
        page = await open_page(await start(env={"HF_ENDPOINT": hub.url}), "#/models")
        await page.get_by_role("textbox", name="Model to pull").fill("no/such")
        await page.keyboard.press("Enter")
        await expect(pull(page, "no/such")).to_contain_text("failed")
        await expect(pull(page, "no/such").locator(".bad")).to_contain_text("no/such")


async def test_a_library_that_can_not_be_read_says_so_and_tries_again(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    folder = make_scripted_model(tmp_path / "models", "a")
    served = await start(models=folder.parent)
    page = await open_page(served)
    await page.route("**/api/library", lambda route: route.fulfill(status=503, body="{}"))
    await page.get_by_role("link", name="Models", exact=True).click()
    fault = page.get_by_role("alert").filter(has_text="The library can't be shown: The server answered 503.")
    await expect(fault).to_be_visible()
    await page.unroute("**/api/library")
    await fault.get_by_role("button", name="Try again").click()
    await expect(page.locator(".library-name")).to_have_text(["a"])


async def test_a_streamed_model_shows_which_experts_are_asked_for(
    tmp_path: Path, start: Start, open_page: OpenPage
):
    models = tmp_path / "models"
    config = tiny_glm.config()
    tiny_glm.write_container(models / "glm", config, tiny_glm.weights(config), mtp=False)
    write_script(models / "glm")
    make_scripted_model(models, "small")
    page = await open_page(await start(models=models), "#/models")
    layers = [
        {"layer": layer, "counts": [float(place * layer) for place in range(16)], "resident": [1, 15]}
        for layer in range(1, 7)
    ]

    async def told(route: Route) -> None:
        await route.fulfill(json={"model": "glm", "layers": layers})

    await page.route("**/api/models/glm/experts", told)
    for name in ("glm", "small"):
        await row(page, name).get_by_role("button", name=f"Load {name}").click()
        await expect(row(page, name)).to_contain_text("ready")
    await expect(row(page, "small").get_by_role("button", name="Experts of small")).to_have_count(0)
    await row(page, "glm").get_by_role("button", name="Experts of glm").click()
    dialog = page.get_by_role("dialog", name="Experts of glm")
    await expect(dialog).to_contain_text("12 of 96")
    seen = dialog.get_by_role("img", name="6 layers of experts; 12 of 96 are in memory")
    # Expert 15 of layer 1 is in memory and wanted; its neighbour is not in memory.
    pixels = await seen.evaluate(
        "(canvas) => Array.from(canvas.getContext('2d').getImageData(0, 1, canvas.width, 1).data)"
    )
    held, other = (pixels[4 * place : 4 * place + 4] for place in (15 * 32 + 5, 14 * 32 + 5))
    assert held[3] == 255
    assert held[:3] != other[:3]
    await dialog.get_by_role("button", name="Close").click()
    await expect(dialog).to_have_count(0)
