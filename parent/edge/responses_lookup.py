"""What a body of /v1/responses, or a path, refers to by ids: responses that run or are stored, and items.

Who runs a response knows it best and is asked first. Items are looked up once for each response that holds
some of them, and counted as they come: a small body may name a large item many times.

Owns nothing; of the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.parent.history import resolve
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Ask
from mlxpool.parent.history.store import HistoryStore
from mlxpool.shared.api.read import invalid
from mlxpool.shared.config import seconds_text
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

from .relay import maybe_apart

# After a disk that was full or a file that was locked.
RETRY_AFTER_S = 5.0


class Lookup:
    """find_running: the record of a response that still runs, by its id; set by whoever runs some."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self.find_running: Callable[[str], Record | None] = lambda _: None

    async def find(self, response_id: str, param: str | None = None, *, events: bool = False) -> Record:
        """A response by its id, also one that still runs. events: whether its stream is needed. Raises
        ApiError 404, and 503."""
        running = self.find_running(response_id)
        if running is not None:
            return running
        shown = cut(repr(response_id))
        try:
            record = await self._store.get(response_id, events=events)
        except Damaged:
            raise error(
                "response_not_found",
                f"the stored response {shown} is damaged and can't be read; send its conversation as input",
                param=param,
            ) from None
        except Unavailable as err:
            raise unavailable(err) from None
        if record is None:
            age = seconds_text(self._store.figures.max_age_s)
            raise error(
                "response_not_found",
                f"there is no response {shown}: it was not stored, was deleted, or made room for newer ones"
                f" (history.max_age is {age}); send its conversation as input",
                param=param,
            )
        return record

    async def items(self, ask: Ask, own: Record | None, max_body_bytes: int) -> dict[str, bytes]:
        """By its id, JSON of each item that the body refers to. own: a record that this client alone can
        refer to. Raises ApiError 400 for an item that is not there, 413 where all of them are too long."""
        counts = Counter(ask.references.values())
        found: dict[str, bytes | None] = {}
        length = 0
        for index, item_id in ask.references.items():
            if item_id not in found:
                record = await self._holder_of(item_id, own)
                beside = {} if record is None else await _items_of(record)
                more = {one: item for one, item in beside.items() if one in counts and one not in found}
                length += sum(counts[one] * len(item or b"") for one, item in more.items())
                resolve.check_length(length, max_body_bytes, ask)
                found |= more
            if found.get(item_id) is None:
                shown = cut(repr(item_id))
                why = (
                    f"refers to item {shown}, a call that was cut; leave it out"
                    if item_id in found
                    else f"refers to item {shown}, which no stored response has; send the item itself"
                )
                raise invalid(f"input[{index}].id", f"input[{index}] {why}")
        return {item_id: item for item_id, item in found.items() if item is not None}

    async def _holder_of(self, item_id: str, own: Record | None) -> Record | None:
        if own is not None and item_id in own.items:
            return own
        try:
            return await self._store.holder_of(item_id)
        except Damaged:
            return None
        except Unavailable as err:
            raise unavailable(err) from None


def unavailable(err: Unavailable) -> ApiError:
    """503 for a history that can't be read or written now."""
    return ApiError(
        503,
        "internal_error",
        f"the history can't be used just now ({err}); try again",
        retry_after_s=RETRY_AFTER_S,
    )


async def _items_of(record: Record) -> dict[str, bytes | None]:
    items: dict[str, bytes | None] = await maybe_apart(len(record.response), resolve.items_of, record)
    return items
