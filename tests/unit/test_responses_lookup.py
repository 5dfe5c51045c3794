"""Items named by their ids: each response is read once, and no more than a body may hold is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxpool.parent.edge.responses_lookup import Lookup
from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Ask, read_ask
from mlxpool.shared.errors import ApiError


def record(name: str, items: dict[str, str], **fields: Any) -> Record:
    """A response whose messages say these texts, by their ids."""
    output = [
        {
            "id": item,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
        }
        for item, text in items.items()
    ]
    response = msgspec.json.encode({"id": name, "output": output, **fields})
    return Record(name, 0.0, "completed", "m", False, None, b"[]", response, None, tuple(items))


class Store:
    """holders: by the item's id, or what asking for it raises. asked: the ids that were asked for."""

    def __init__(self, holders: dict[str, Record | Exception]) -> None:
        self._holders = holders
        self.asked: list[str] = []

    async def holder_of(self, item_id: str) -> Record | None:
        self.asked.append(item_id)
        held = self._holders.get(item_id)
        if isinstance(held, Exception):
            raise held
        return held


def naming(*ids: str) -> Ask:
    body = {"model": "m", "input": [{"type": "item_reference", "id": item} for item in ids]}
    return read_ask(json.dumps(body).encode())


async def found(store: Store, ask: Ask, own: Record | None = None, limit: int = 10**6) -> dict[str, str]:
    items = await Lookup(store).items(ask, own, limit)  # type: ignore[arg-type]
    return {name: json.loads(item)["content"][0]["text"] for name, item in items.items()}


async def test_a_response_is_read_once_for_all_of_its_items_however_often_they_are_named() -> None:
    one = record("resp_1", {"a": "A", "b": "B", "unasked": "C"})
    store = Store({"a": one, "b": one, "c": record("resp_2", {"c": "D"})})
    assert await found(store, naming("b", "a", *["b"] * 300, "c")) == {"a": "A", "b": "B", "c": "D"}
    assert store.asked == ["b", "c"]


async def test_what_a_client_alone_can_name_is_found_first() -> None:
    own = record("resp_1", {"a": "mine"})
    store = Store({"a": record("resp_2", {"a": "stored"}), "b": record("resp_2", {"b": "stored"})})
    assert await found(store, naming("a", "b"), own) == {"a": "mine", "b": "stored"}
    assert store.asked == ["b"]


async def test_reading_stops_where_items_are_more_than_a_body_may_hold() -> None:
    large = {name: record(f"resp_{name}", {name: "x" * 1000}) for name in "abcdefgh"}
    store = Store(dict(large))
    with pytest.raises(ApiError, match="compact") as refused:
        await found(store, naming(*"abcdefgh"), limit=3000)
    assert (refused.value.status, refused.value.param) == (413, "input")
    assert store.asked == ["a", "b", "c"]
    with pytest.raises(ApiError, match="compact"):
        await found(store, naming(*["a"] * 3), limit=3000)


@pytest.mark.parametrize("held", [None, Damaged("rot"), record("resp_1", {"other": "x"})])
async def test_an_item_that_is_nowhere_is_named_by_its_place(held: Any) -> None:
    store = Store({"a": record("resp_2", {"a": "A"}), "b": held})
    with pytest.raises(
        ApiError, match=r"input\[1\] refers to item 'b', which no stored response has"
    ) as refused:
        await found(store, naming("a", "b"))
    assert (refused.value.status, refused.value.param) == (400, "input[1].id")


async def test_a_history_that_can_not_be_read_now_says_when_to_try_again() -> None:
    with pytest.raises(ApiError, match="locked") as refused:
        await found(Store({"a": Unavailable("it is locked")}), naming("a"))
    assert (refused.value.status, refused.value.headers()) == (503, {"Retry-After": "5"})
