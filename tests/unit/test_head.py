"""The fields that the parent reads itself: values are told as JSON, and short."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxpool.parent.edge.head import read_head
from mlxpool.parent.edge.http_server import _refused
from mlxpool.parent.history.resolve import read_ask
from mlxpool.shared.errors import ApiError

ALLOWED = 'use seconds, a duration like "15m", 0, or -1 for ever'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"model": true}', "model is true; use a string"),
        ('{"model": {"a": null}}', 'model is {"a":null}; use a string'),
        ('{"keep_alive": false}', f"keep_alive is false; {ALLOWED}"),
        ('{"keep_alive": "soon"}', f'keep_alive is "soon"; {ALLOWED}'),
        ('{"keep_alive": ["5m"]}', f'keep_alive is ["5m"]; {ALLOWED}'),
        (f'{{"keep_alive": "{"9" * 400}"}}', f'keep_alive is "{"9" * 79}…; {ALLOWED}'),
        (f'{{"model": ["{"x" * 5000}"]}}', f'model is ["{"x" * 78}…; use a string'),
    ],
)
def test_a_value_is_told_as_it_was_sent(body: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_head(body.encode())
    assert (caught.value.status, caught.value.message) == (400, message)


def test_half_of_a_character_is_named_with_its_place() -> None:
    with pytest.raises(ApiError) as caught:
        read_head(b'{"a": "\\ud83d\\ude00", "b": "cut\\ud83d"}')
    assert "\\ud83d at byte 31 is half of a character" in caught.value.message


@pytest.mark.parametrize("number", ["1" + "0" * 5000, "1e999"])
@pytest.mark.parametrize("read", [read_head, read_ask])
def test_a_number_beyond_all_ranges_is_told_as_one(read: Callable[[bytes], object], number: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(f'{{"stream": {number}}}'.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert caught.value.message.startswith("the body holds too large a number: ")


@pytest.mark.parametrize("read", [read_head, read_ask])
def test_what_is_no_object_is_told_as_that(read: Callable[[bytes], object]) -> None:
    with pytest.raises(ApiError, match="^the body must be a JSON object$"):
        read(b"[1e3]")


@pytest.mark.parametrize(
    ("library", "told"),
    [
        ("Please install `backports.zstd`", "bodies in zstd are not read; send gzip, deflate or none"),
        ("Can not decode content-encoding: brotli (br). Please install `Brotli`",
         "bodies in brotli are not read; send gzip, deflate or none"),
        ("Got more than 8190 bytes when reading: b'aaaa'", "more than 8190 bytes"),
        ("Bad status line:\n\n  b'x'", "not a valid HTTP request: Bad status line"),
        ("", "not a valid HTTP request: malformed"),
    ],
)  # fmt: skip
def test_what_the_http_library_can_not_read_is_told_in_words_of_the_api(library: str, told: str) -> None:
    assert told in _refused(library)
    assert "nstall" not in _refused(library)
