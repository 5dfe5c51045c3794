"""What is served at / and /static: types, caching, defences, and that nothing else can be reached."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mlxpool.parent.edge.static import WEB_FOLDER, Assets
from tests.tools.served import serve

ROOT = Path(__file__).parents[2]
KEYS = '[server]\napi_keys = ["open-sesame"]\n'


@pytest.fixture(scope="module")
def vendor_web() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_web", ROOT / "deploy/vendor_web.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up while it is made.
    sys.modules["vendor_web"] = module
    spec.loader.exec_module(module)
    return module


async def test_the_page_is_served_without_a_key_and_asks_again_each_time(tmp_path: Path):
    async with serve(tmp_path, scripted=True, config=KEYS) as served:
        page = await served.request("GET", "/")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        assert page.body == (WEB_FOLDER / "index.html").read_bytes()
        again = await served.request("GET", "/", If_None_Match=page.headers["etag"])
        assert (again.status, again.body) == (304, b"")
        weak = await served.request("GET", "/", If_None_Match=f'"other", W/{page.headers["etag"]}')
        assert weak.status == 304
        changed = await served.request("GET", "/", If_None_Match='"other"')
        assert changed.status == 200
        head = await served.request("HEAD", "/")
        assert (head.status, head.headers["content-length"]) == (200, str(len(page.body)))
        assert (await served.request("GET", "/api/pool")).code == "invalid_api_key"


async def test_files_have_their_types_and_only_versioned_ones_are_kept(tmp_path: Path):
    wanted = {
        "static/js/main.js": ("text/javascript; charset=utf-8", "no-cache"),
        "static/css/base.css": ("text/css; charset=utf-8", "no-cache"),
        "static/icon.svg": ("image/svg+xml", "no-cache"),
        "static/vendor/manifest.json": ("application/json", "no-cache"),
        "static/vendor/preact-11.2.0/preact.js": (
            "text/javascript; charset=utf-8",
            "public, max-age=31536000, immutable",
        ),
        "static/vendor/preact-11.2.0/LICENSE": (
            "text/plain; charset=utf-8",
            "public, max-age=31536000, immutable",
        ),
    }
    async with serve(tmp_path, scripted=True) as served:
        for path, (kind, cache) in wanted.items():
            answer = await served.request("GET", f"/{path}")
            assert answer.status == 200, path
            assert (answer.headers["content-type"], answer.headers["cache-control"]) == (kind, cache)
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_policy_allows_this_origin_alone_and_nothing_inline(tmp_path: Path):
    async with serve(tmp_path, scripted=True) as served:
        policy = (await served.request("GET", "/")).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'self'",
        "img-src": "'self' data:",
        "object-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    page = (WEB_FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page)


OUTSIDE = (
    "/static/../../pyproject.toml",
    "/static/%2e%2e/%2e%2e/pyproject.toml",
    "/static/..%2f..%2fpyproject.toml",
    "/static/js/..%5c..%5c..%5cpyproject.toml",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/js",
    "/static/js/",
    "/static/JS/main.js",
    "/static/js/main.js%00",
    "/static/",
)


async def test_nothing_but_the_pages_own_files_can_be_reached(tmp_path: Path):
    async with serve(tmp_path, scripted=True) as served:
        for path in OUTSIDE:
            # By hand: a client would tidy the path before it is sent.
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert re.match(rb"HTTP/1\.1 40[04] ", answer), (path, answer[:200])
            assert b"root:" not in answer
            assert b"build-backend" not in answer


def test_a_link_out_of_the_folder_is_no_file_of_it(tmp_path: Path):
    web = tmp_path / "web"
    web.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (web / "link.txt").symlink_to(tmp_path / "secret.txt")
    (web / "own.js").write_text("1;")
    (web / "vendor").mkdir()
    (web / "vendor" / "loose.js").write_text("2;")
    assets = Assets(web)
    assert assets.names() == ["own.js", "vendor/loose.js"]
    assert assets.get("link.txt") is None
    loose = assets.get("vendor/loose.js")
    assert loose is not None
    # Without a version in its path it may change, wherever it lies.
    assert loose.cache_control == "no-cache"


def module_imports(path: Path) -> set[Path]:
    """The modules that a module imports before it runs."""
    source = path.read_text()
    found = re.findall(r'^(?:import|export)\b[^;"]*?"(\.[^"]+)";', source, re.M)
    found += re.findall(r'from"(\.[^"]+)"', source) if "vendor" in path.parts else []
    return {(path.parent / name).resolve() for name in found}


def test_the_page_fetches_what_the_first_view_needs_at_once_and_no_more():
    """A module that is imported and not named in the page costs one round trip more for each level."""
    todo, needed = [WEB_FOLDER / "js/main.js", WEB_FOLDER / "js/pool/page.js"], set[Path]()
    while todo:
        path = todo.pop()
        if path not in needed:
            needed.add(path)
            todo += module_imports(path)
    index = (WEB_FOLDER / "index.html").read_text()
    preloaded = set(re.findall(r'<link rel="modulepreload" href="static/([^"]+)">', index))
    names = {path.relative_to(WEB_FOLDER).as_posix() for path in needed}
    assert preloaded == names - {"js/main.js"}


def test_every_file_that_the_page_names_is_there():
    index = (WEB_FOLDER / "index.html").read_text()
    for name in re.findall(r'(?:href|src)="static/([^"]+)"', index):
        assert (WEB_FOLDER / name).is_file(), name
    for path in WEB_FOLDER.glob("js/**/*.js"):
        for target in module_imports(path):
            assert target.is_file(), f"{path} imports {target}"


def test_no_module_writes_markup():
    """Trusted Types refuse it in the browser; here it is refused before it is shipped."""
    for path in WEB_FOLDER.glob("js/**/*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|\beval\(",
            path.read_text(),
        ), path


def test_the_vendored_files_are_what_was_fetched(vendor_web: ModuleType):
    assert vendor_web.differences(vendor_web.PAGE_VENDOR) == []
    assert vendor_web.differences(vendor_web.TEST_VENDOR) == []


def test_a_changed_a_missing_and_a_strange_vendored_file_are_named(vendor_web: ModuleType, tmp_path: Path):
    copy = tmp_path / "vendor"
    shutil.copytree(vendor_web.PAGE_VENDOR, copy)
    package = next(p for p in vendor_web.PACKAGES if p.name == "htm")
    (copy / package.folder / "htm.js").write_text("changed")
    (copy / package.folder / "LICENSE").unlink()
    (copy / "strange.js").write_text("")
    said = vendor_web.differences(copy)
    assert f"{package.folder}/htm.js: changed" in said
    assert f"{package.folder}/LICENSE: missing" in said
    assert "strange.js: not in the manifest" in said


def test_bare_imports_become_paths_and_unknown_ones_are_refused(vendor_web: ModuleType):
    paths = {"preact": "preact-1/preact.js", "preact/hooks": "preact-1/hooks.js"}
    source = """import{h}from"preact";export*from 'preact/hooks';import{a}from"./own.js";"""
    assert vendor_web.rewrite_imports(source, paths) == (
        """import{h}from"../preact-1/preact.js";export*from '../preact-1/hooks.js';import{a}from"./own.js";"""
    )
    with pytest.raises(ValueError, match="'lodash', which is not vendored"):
        vendor_web.rewrite_imports('import x from "lodash";', paths)


def test_every_vendored_library_has_its_licence(vendor_web: ModuleType):
    for package in vendor_web.PACKAGES:
        assert list((package.into / package.folder).glob("LICENSE*")), package.name
