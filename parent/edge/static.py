"""The dashboard's files: `/` and `/static/…`, out of a table that is made once.

A request's path is looked up among the names found in `parent/web` when the app was made, and never becomes a
path itself, so there is nothing to traverse. A file is read at its first request and kept. A vendored library
lies in a folder named after its version, so a browser may keep it for ever; everything else is asked for
again each time and answered 304 while its ETag holds, so that an updated server is never met by yesterday's
page.

The headers are half of the page's defence. Scripts and styles come from this origin and files alone, none
inline; and Trusted Types make the browser itself refuse any text that would be parsed as HTML, whichever line
of script tried. Model text is drawn as text nodes, and these headers hold even if that were got wrong.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

WEB_FOLDER = Path(__file__).resolve().parents[1] / "web"
INDEX = "index.html"
STATIC_PREFIX = "/static/"
VENDOR_PREFIX = "vendor/"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
# Licences have no ending of their own.
OTHER_CONTENT_TYPE = "text/plain; charset=utf-8"

YEAR_S = 365 * 24 * 3600
KEEP_FOR_EVER = f"public, max-age={YEAR_S}, immutable"
ASK_EVERY_TIME = "no-cache"

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True)
class Asset:
    """One file as it is sent. etag: strong, in its quotes."""

    body: bytes
    etag: str
    content_type: str
    cache_control: str


class Assets:
    """The files below a folder, by their names with `/`. The set of names is fixed when this is made."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): path
            for root, _, names in os.walk(folder)
            for path in (Path(root, name) for name in names)
            if path.is_file() and not path.is_symlink()
        }
        self._read: dict[str, Asset] = {}

    def names(self) -> list[str]:
        """Every file's name, sorted."""
        return sorted(self._files)

    def get(self, name: str) -> Asset | None:
        """The file of exactly that name; None where there is none."""
        known = self._read.get(name)
        if known is not None or name not in self._files:
            return known
        body = self._files[name].read_bytes()
        asset = Asset(
            body,
            f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            CONTENT_TYPES.get(Path(name).suffix, OTHER_CONTENT_TYPE),
            KEEP_FOR_EVER if name.startswith(VENDOR_PREFIX) and name.count("/") > 1 else ASK_EVERY_TIME,
        )
        self._read[name] = asset
        return asset


def is_static_path(path: str) -> bool:
    """True for the paths of the dashboard's own files, which need no key: they are the same for everybody."""
    return path == "/" or path.startswith(STATIC_PREFIX)


def add_static_routes(app: web.Application, folder: Path = WEB_FOLDER) -> None:
    """`GET /` and `GET /static/{name}`. Both refuse an unknown name with a 404 `not_found`."""
    assets = Assets(folder)

    def answer(request: web.Request, name: str) -> web.Response:
        asset = assets.get(name)
        if asset is None:
            raise error("not_found", f"the dashboard has no file {cut(quote(name))!r}")
        headers = {**SECURITY_HEADERS, "ETag": asset.etag, "Cache-Control": asset.cache_control}
        if _has_it(request, asset):
            return web.Response(status=304, headers=headers)
        return web.Response(body=asset.body, headers={**headers, "Content-Type": asset.content_type})

    async def index(request: web.Request) -> web.Response:
        return answer(request, INDEX)

    async def static(request: web.Request) -> web.Response:
        return answer(request, request.match_info["name"])

    app.add_routes([web.get("/", index), web.get(STATIC_PREFIX + "{name:.+}", static)])


def _has_it(request: web.Request, asset: Asset) -> bool:
    """Whether If-None-Match names what would be sent; a weak tag is as good, the bytes are the same."""
    tags = request.headers.get("If-None-Match", "")
    return any(tag.strip().removeprefix("W/") in (asset.etag, "*") for tag in tags.split(","))
