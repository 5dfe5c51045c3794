"""Host, Origin and key checks on headers alone."""

from __future__ import annotations

import pytest

from mlxpool.parent.edge.security import check_host, check_key, check_origin, host_name
from mlxpool.shared.config import Server

SERVER = Server(
    api_keys=("k1", "ключ"), allowed_hosts=("lan.example",), allowed_origins=("https://app.example",)
)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:80", "localhost"),
        ("[::1]:80", "::1"),
        ("a.example.", "a.example"),
        ("", None),
        ("a b", None),
        ("user@localhost", None),
        ("localhost/x", None),
        ("localhost:99999", None),
        ("[::1", None),
    ],
)
def test_the_name_in_a_host_header(value: str, name: str | None):
    assert host_name(value) == name


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9:5", "localhost", "x.localhost", "[::1]", "lan.example:1"]
)
def test_loopback_and_listed_hosts_pass(host: str):
    assert check_host({"Host": host}, SERVER) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0", "127.0.0.1x", "0.0.0.0", ""]
)
def test_other_hosts_are_refused_by_name(host: str):
    refusal = check_host({"Host": host}, SERVER)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (403, "forbidden_host")
    assert repr(host) in refusal.message


def test_a_request_without_origin_comes_from_no_page():
    assert check_origin({"Host": "localhost"}, SERVER) is None


@pytest.mark.parametrize(
    ("origin", "ok"),
    [
        ("http://localhost:8420", True),
        ("https://app.example", True),
        ("http://localhost:8421", False),
        ("http://evil.example", False),
        ("https://app.example.evil", False),
        ("null", False),
        ("", False),
        ("localhost:8420", False),
    ],
)
def test_only_own_and_listed_origins_pass(origin: str, ok: bool):
    assert (check_origin({"Host": "localhost:8420", "Origin": origin}, SERVER) is None) == ok


@pytest.mark.parametrize(
    ("headers", "ok"),
    [
        ({"Authorization": "Bearer k1"}, True),
        ({"Authorization": "BEARER  k1 "}, True),
        ({"x-api-key": "ключ"}, True),
        ({"x-api-key": "k1", "Authorization": "Bearer wrong"}, False),
        ({"Authorization": "Basic k1"}, False),
        ({"Authorization": "Bearer"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "k"}, False),
        ({}, False),
    ],
)
def test_one_of_the_keys_is_needed(headers: dict[str, str], ok: bool):
    refusal = check_key(headers, SERVER)
    assert (refusal is None) == ok
    if refusal is not None:
        assert (refusal.status, refusal.code) == (401, "invalid_api_key")


def test_without_keys_nobody_is_asked():
    assert check_key({}, Server()) is None
