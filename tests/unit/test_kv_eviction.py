"""What leaves first: what was used least recently, and never what something that stays needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.kv.eviction import victims
from mlxpool.shared.kv.listing import Stored
from mlxpool.shared.kv.names import FileName, Kind

ROOT = b"r" * 16


def stored(
    name: str, parent: str = "", start: int = 0, used_s: float = 0.0, kind: Kind = "slice", folder: str = "f"
) -> Stored:
    file = FileName(
        name.encode().ljust(16), parent.encode().ljust(16) if parent else ROOT, start, start + 256, kind
    )
    return Stored(folder, file, f"{folder}/{name}.{kind}", 4096, used_s)


def names(chosen: list[Stored]) -> list[str]:
    return [record.path.removeprefix("f/") for record in chosen]


def test_the_least_recently_used_goes_and_no_more_than_is_needed() -> None:
    records = [stored("new", used_s=3), stored("old", used_s=1), stored("middle", used_s=2)]
    assert names(victims(records, 1)) == ["old.slice"]
    assert names(victims(records, 4097)) == ["old.slice", "middle.slice"]
    assert victims(records, 0) == []


def test_all_models_share_one_order() -> None:
    records = [stored("mine", used_s=2), stored("theirs", used_s=1, folder="g")]
    assert [record.folder for record in victims(records, 1)] == ["g"]


def test_the_end_of_a_prefix_goes_before_its_beginning_whatever_their_times() -> None:
    records = [
        stored("a", used_s=1),
        stored("b", "a", 256, 2),
        stored("c", "b", 512, 3),
        stored("z", used_s=2.5),
    ]
    assert names(victims(records, 5000)) == ["z.slice", "c.slice"]
    assert names(victims(records, 99999)) == ["z.slice", "c.slice", "b.slice", "a.slice"]


def test_a_shared_beginning_is_as_young_as_its_youngest_end() -> None:
    records = [
        stored("system", used_s=0), stored("one", "system", 256, 1), stored("two", "system", 256, 9),
        stored("else", used_s=5),
    ]  # fmt: skip
    assert names(victims(records, 3 * 4096)) == ["one.slice", "else.slice", "two.slice"]


def test_a_state_goes_before_the_slice_of_its_record_and_slices_it_needs() -> None:
    records = [
        stored("a", used_s=1),
        stored("b", "a", 256, 1),
        stored("b", "a", 256, 7, "state"),
        stored("z", used_s=5),
    ]
    assert names(victims(records, 99999)) == ["z.slice", "b.state", "b.slice", "a.slice"]


def test_what_is_about_to_be_written_keeps_what_it_needs() -> None:
    records = [
        stored("a", used_s=1),
        stored("b", "a", 256, 2),
        stored("x", used_s=3),
        stored("y", "x", 256, 4),
    ]
    path = [b"b".ljust(16)]
    assert names(victims(records, 99999, "f", path)) == ["y.slice", "x.slice"]
    assert len(victims(records, 99999, "g", path)) == 4


@given(
    parents=st.lists(st.integers(-1, 30), min_size=1, max_size=30),
    times=st.lists(st.integers(0, 5), min_size=30, max_size=30),
    need=st.integers(0, 30),
)
def test_nothing_that_stays_lacks_a_slice_before_it(parents: list[int], times: list[int], need: int) -> None:
    records: list[Stored] = []
    for place, wanted in enumerate(parents):
        parent = records[wanted] if 0 <= wanted < place else None
        start = parent.file.end if parent else 0
        above = parent.file.name.decode().strip() if parent else ""
        records.append(stored(str(place), above, start, times[place]))
    chosen = victims(records, need * 4096)
    assert len(chosen) == min(need, len(records))
    gone = {record.file.name for record in chosen}
    for record in records:
        if record.file.name not in gone:
            assert record.file.parent not in gone
