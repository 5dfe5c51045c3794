"""A file's name says all that a start needs to know, in one spelling only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.kv.names import FileName, TempName, blocks, file_name, parse, parse_temp, temp_name

HASH = st.binary(min_size=16, max_size=16)
GOOD = f"{'0a' * 16}.{'ff' * 16}.256.512.slice.safetensors"


@given(
    name=HASH,
    parent=HASH,
    start=st.integers(0, 10**9 - 2),
    length=st.integers(1, 256),
    kind=st.sampled_from(["slice", "state"]),
)
def test_a_name_reads_back_as_it_was_written(
    name: bytes, parent: bytes, start: int, length: int, kind: str
) -> None:
    file = FileName(name, parent, start, min(start + length, 10**9 - 1), kind)  # type: ignore[arg-type]
    assert parse(file_name(file)) == file


@pytest.mark.parametrize(
    "foreign",
    [
        GOOD.upper(),
        GOOD.replace("0a0a", "0A0a", 1),
        GOOD.replace(".256.", ".0256."),
        GOOD.replace(".256.512.", ".512.512."),
        GOOD.replace(".256.512.", ".513.512."),
        GOOD.replace(".256.", ".-1."),
        GOOD.replace(".256.", ".٣."),
        GOOD.replace("slice", "slices"),
        GOOD.replace("0a0a", "0a", 1),
        GOOD + ".tmp",
        GOOD + "\n",
        "." + GOOD,
        "model.safetensors",
        "",
    ],
)
def test_another_spelling_is_no_records_name(foreign: str) -> None:
    assert parse(GOOD) is not None
    assert parse(foreign) is None


def test_an_unfinished_file_says_who_writes_it_and_how_large_it_gets() -> None:
    text = temp_name(4711, 8192, "0f")
    assert parse_temp(text) == TempName(4711, 8192)
    assert parse(text) is None
    for foreign in (
        GOOD,
        ".writing-",
        ".writing-0-1-a",
        ".writing-1-0-a",
        ".writing-1-1-x",
        text + ".safetensors",
    ):
        assert parse_temp(foreign) is None


def test_sizes_are_counted_in_whole_blocks() -> None:
    assert [blocks(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
