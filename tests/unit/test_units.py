"""Sizes as a config file says them: written and read again they are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.units import parse_size, size_text, size_to_ask_for


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1kB"),
        (8_000_000_000, "8GB"),
        (512 * 2**20, "512MiB"),
        (1_500_000, "1500kB"),
        (2**40, "1TiB"),
        (1_000_001, "1000001"),
    ],
)
def test_a_size_is_written_in_its_largest_whole_unit(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


# Beyond it a number with a unit is read as the nearest float: eight petabytes and more.
@given(st.integers(0, 2**53))
def test_what_is_written_is_read_as_it_was(size_bytes: int) -> None:
    assert parse_size(size_text(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "asked"),
    [
        (1, "0.1MB"),
        (572_056_137, "572.1MB"),
        (572_100_000, "572.1MB"),
        (572_100_001, "572.2MB"),
        (999_999_999, "1000.0MB"),
        (10**9, "1.0GB"),
        (28_901_750_272, "29.0GB"),
        (5 * 10**15, "5000.0TB"),
    ],
)
def test_a_size_to_ask_for_is_never_less(size_bytes: int, asked: str) -> None:
    assert size_to_ask_for(size_bytes) == asked


@given(st.integers(0, 2**50))
def test_a_size_to_ask_for_suffices_and_is_the_least(size_bytes: int) -> None:
    asked = parse_size(size_to_ask_for(size_bytes))
    assert size_bytes <= asked <= size_bytes + max(10**5, size_bytes // 10 + 1)
