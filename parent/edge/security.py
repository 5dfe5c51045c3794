"""Who may talk to this server: Host, Origin and API key, as pure questions about one request's headers.

Host defends against DNS rebinding (a page whose name was made to resolve to 127.0.0.1 still sends its own
name), Origin against any page that simply posts here, the key against everyone else. Browsers are answered
with CORS headers only for listed origins.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from mlxpool.shared.config import Server
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
CORS_MAX_AGE_S = 600


def host_name(value: str) -> str | None:
    """The name in a Host header without its port, lower case; None where it is none."""
    try:
        parts = urlsplit(f"//{value}")
        _ = parts.port
    except ValueError:
        return None
    clean = value and not any(c in value for c in "/@?# ")
    return parts.hostname.rstrip(".").lower() if clean and parts.hostname else None


def is_loopback_name(name: str) -> bool:
    """localhost and the names below it, 127.0.0.0/8 written in full, ::1."""
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    octets = name.split(".")
    return len(octets) == 4 and octets[0] == "127" and all(o.isascii() and o.isdigit() for o in octets)


def check_host(headers: Mapping[str, str], server: Server) -> ApiError | None:
    """403 forbidden_host for a Host that is neither loopback nor listed."""
    value = headers.get("Host", "")
    name = host_name(value)
    if name is not None and (is_loopback_name(name) or name in server.allowed_hosts):
        return None
    return error(
        "forbidden_host",
        f"host {cut(value)!r} is not served here; use localhost or 127.0.0.1,"
        " or list it in [server] allowed_hosts",
    )


def origin_is_allowed(headers: Mapping[str, str], server: Server) -> bool:
    """True when the Origin header is a listed one: such pages get CORS headers."""
    return headers.get("Origin", "") in server.allowed_origins


def check_origin(headers: Mapping[str, str], server: Server) -> ApiError | None:
    """403 forbidden_origin for a request that a page of another site made."""
    origin = headers.get("Origin")
    if origin is None or origin_is_allowed(headers, server):
        return None
    scheme, _, authority = origin.partition("://")
    if scheme in ("http", "https") and authority and authority.lower() == headers.get("Host", "").lower():
        return None
    return error(
        "forbidden_origin",
        f"pages of {cut(origin)!r} may not use this server; list the origin in [server] allowed_origins",
    )


def check_key(headers: Mapping[str, str], server: Server) -> ApiError | None:
    """401 invalid_api_key where keys are set and the request brings none of them."""
    if not server.api_keys:
        return None
    given = headers.get("x-api-key", "")
    authorization = headers.get("Authorization", "")
    if authorization[:7].lower() == "bearer ":
        given = authorization[7:].strip()
    offered = given.encode("utf-8", "surrogateescape")
    # Every key is compared in full, so that time tells nothing about which one came near.
    if sum(hmac.compare_digest(offered, key.encode()) for key in server.api_keys):
        return None
    what = "the API key is not one of this server's" if given else "this server asks for an API key"
    return error("invalid_api_key", f"{what}; send it as `Authorization: Bearer …` or `x-api-key`")


def cors_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for an answer to a page of a listed origin."""
    return {
        "Access-Control-Allow-Origin": headers.get("Origin", ""),
        "Access-Control-Expose-Headers": "x-request-id, request-id, retry-after, warning",
        "Vary": "Origin",
    }


def preflight_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that answer an OPTIONS preflight of a listed origin."""
    return {
        **cors_headers(headers),
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", "content-type"),
        "Access-Control-Max-Age": str(CORS_MAX_AGE_S),
    }
