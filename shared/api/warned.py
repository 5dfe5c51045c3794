"""What a request asks for and does not get, in sentences. Owned by the request's reader.

A history may hold a hundred items of one kind that nobody here can read: one sentence tells of all of them.
"""

from __future__ import annotations

# As many places are enough to find the rest.
_PLACES_NAMED = 3


class Warnings:
    """Sentences, each with the places that it is about, in the order they were first said."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, where: str, what: str) -> None:
        """where: the field or item. what: what about it, without the place."""
        self._places.setdefault(what, []).append(where)

    def said(self) -> tuple[str, ...]:
        return tuple(f"{_named(places)}: {what}" for what, places in self._places.items())


def _named(places: list[str]) -> str:
    named = ", ".join(places[:_PLACES_NAMED])
    more = len(places) - _PLACES_NAMED
    return f"{named} and {more} more" if more > 0 else named
