"""The page's own logic, asked in the browser that runs it: streams, Markdown, numbers, log lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page

from tests.browser.conftest import OpenPage
from tests.tools.served import Served, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serve(tmp_path_factory.mktemp("modules"), scripted=True) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def page(served: Served, open_page: OpenPage) -> Page:
    return await open_page(served)


async def ask(page: Page, module: str, expression: str) -> Any:
    """The value of an expression over the names of one module, `m`."""
    source = f"import('./static/js/{module}.js').then((m) => ({expression}))"
    return await page.evaluate(source)


async def test_events_are_read_whatever_pieces_they_come_in(page: Page):
    stream = (
        "event: pool\ndata: {}\n\n: sign of life\ndata: one\ndata:two\n\n"
        "event: x\r\ndata: y\r\n\r\nid: 7\nretry\ndata: last\n\ndata: unfinished"
    )
    expected = [
        {"event": "pool", "data": "{}"},
        None,
        {"event": "message", "data": "one\ntwo"},
        {"event": "x", "data": "y"},
        {"event": "message", "data": "last", "id": "7"},
    ]
    for size in (1, 2, 3, 7, len(stream)):
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        got = await ask(
            page,
            "core/sse",
            f"((p) => {json.dumps(pieces)}.flatMap((x) => p.push(x)))(new m.EventParser())",
        )
        assert got == expected, size


MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("# One\n\n## Two", "<h3>One</h3><h4>Two</h4>"),
    ("**b** *i* ~~d~~ `c<d`", "<p><strong>b</strong> <em>i</em> <del>d</del> <code>c&lt;d</code></p>"),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> said", "<blockquote><p>said</p></blockquote>"),
    ("a<br>b", "<p>a&lt;br&gt;b</p>"),
    ("<script>alert(1)</script>", '<p class="verbatim">&lt;script&gt;alert(1)&lt;/script&gt;</p>'),
    ("<img src=x onerror=alert(1)> and text", "<p>&lt;img src=x onerror=alert(1)&gt; and text</p>"),
    ("&lt;b&gt; &amp; &#955; &nope;", "<p>&lt;b&gt; &amp; λ &amp;nope;</p>"),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("[x](JaVaScRiPt:alert(1))", "<p>[x](JaVaScRiPt:alert(1))</p>"),
    ("[x](data:text/html,hi)", "<p>[x](data:text/html,hi)</p>"),
    (
        "[x](https://e.example/?a=1&b)",
        '<p><a href="https://e.example/?a=1&amp;b" target="_blank" rel="noopener noreferrer nofollow">'
        "x</a></p>",
    ),
    (
        "![alt](https://e.example/i.png)",
        '<p><a href="https://e.example/i.png" target="_blank" rel="noopener noreferrer nofollow">'
        "image: alt</a></p>",
    ),
]


async def rendered(page: Page, text: str, what: str) -> str:
    """A property of the element that this Markdown is drawn as."""
    return await page.evaluate(
        """async ([text, what]) => {
            const { html, render } = await import("./static/js/lib.js");
            const { Markdown } = await import("./static/js/markdown/view.js");
            const box = document.createElement("div");
            render(html`<${Markdown} text=${text} />`, box);
            return box.firstElementChild[what];
        }""",
        [text, what],
    )


async def test_markdown_becomes_elements_and_html_stays_text(page: Page):
    for text, markup in MARKDOWN:
        assert await rendered(page, text, "innerHTML") == markup


async def test_a_text_nested_beyond_the_parser_is_shown_as_it_is(page: Page):
    deep = ">" * 20_000 + " end"
    shown = await rendered(page, deep, "textContent")
    assert shown.endswith(deep)


THINKING = [
    ("plain", "", "plain"),
    ("<thi", "", ""),
    ("<this> is text", "", "<this> is text"),
    ("<think>because", "because", ""),
    ("<think>\nbecause\n</think>\n\nso", "because", "so"),
    ("so <think>late</think>", "", "so <think>late</think>"),
]


async def test_thinking_is_told_from_the_answer(page: Page):
    for text, reasoning, answer in THINKING:
        got = await ask(page, "chat/thinking", f"m.splitThinking({json.dumps(text)})")
        assert got == {"reasoning": reasoning, "answer": answer}, text


async def test_numbers_read_as_people_write_them(page: Page):
    shown = await ask(
        page,
        "core/format",
        "[m.bytes(0), m.bytes(999), m.bytes(999_600), m.bytes(1_240_000_000), m.bytes(48e9),"
        " m.rate(0), m.rate(9.994), m.rate(42.06), m.rate(131.4),"
        " m.span(0.306), m.span(3.14), m.span(75), m.span(600),"
        " m.plural(1, 'token'), m.plural(2048, 'token'), m.percent(0.999),"
        " m.ago(1000, 1_003_000), m.ago(1000, 1_013_000)]",
    )
    assert shown == [
        "0 B", "999 B", "1.00 MB", "1.24 GB", "48.0 GB", "0", "9.99",
        "42.1", "131", "0.31 s", "3.1 s", "75 s", "10 min", "1 token",
        "2,048 tokens", "99%", "just now", "10 s ago",
    ]  # fmt: skip


async def test_a_reconnect_repeats_no_log_line_and_loses_none(page: Page):
    overlap = "m.overlapOf({}, {})"
    for known, fresh, expected in (
        (["a", "b", "c"], ["b", "c", "d"], 2),
        (["a", "a"], ["a", "a", "a"], 2),
        (["a", "b"], ["c"], 0),
        ([], ["a"], 0),
        (["x", "a", "b"], ["a", "b"], 2),
    ):
        got = await ask(page, "core/log_lines", overlap.format(json.dumps(known), json.dumps(fresh)))
        assert got == expected, (known, fresh)


async def test_log_lines_are_bounded_and_bare_of_colour_codes(page: Page):
    lines = await page.evaluate(
        """async () => {
            const { addLines } = await import("./static/js/core/log_lines.js");
            const { logs } = await import("./static/js/core/state.js");
            addLines("m", ["\\u001b[31mred\\u001b[0m"], false);
            const first = logs.value.get("m")[0].text;
            const hundred = Array.from({ length: 100 }, (_, n) => n);
            for (let i = 0; i < 60; i++) addLines("m", hundred.map((n) => `${i} ${n}`), false);
            const kept = logs.value.get("m");
            return [first, kept.length, kept[0].text, kept.at(-1).text];
        }"""
    )
    assert lines == ["red", 5000, "10 0", "59 99"]
