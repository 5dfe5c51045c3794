"""Answers of the parent itself: JSON, and errors in the shape of the protocol that was spoken."""

from __future__ import annotations

import re
import secrets

import msgspec
from aiohttp import web

from mlxpool.shared.errors import ApiError, Protocol, encode, protocol_of

# The request's id, kept on the request: `request[REQUEST_ID]`.
REQUEST_ID = "mlxpool.request_id"
# What Anthropic's clients send with every request; a listing that several kinds of clients read goes by it.
ANTHROPIC_VERSION = "anthropic-version"
_SHARED_PATH = "/v1/models"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id(given: str | None) -> str:
    """The client's own id where it is harmless in a header and a log line, else a fresh one."""
    return given if given and _CLIENT_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def client_protocol(request: web.BaseRequest) -> Protocol:
    """Whose answers this client reads: by the path, and where it is no protocol's own by the headers."""
    if request.path.startswith(_SHARED_PATH) and ANTHROPIC_VERSION in request.headers:
        return "anthropic"
    return protocol_of(request.path)


def json_response(body: object, status: int = 200) -> web.Response:
    """Any msgspec-encodable object as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def error_response(request: web.BaseRequest, err: ApiError) -> web.Response:
    """The error with its status, headers and envelope."""
    return web.Response(
        status=err.status,
        body=encode(err, client_protocol(request), request.get(REQUEST_ID)),
        content_type="application/json",
        headers=err.headers(),
    )
