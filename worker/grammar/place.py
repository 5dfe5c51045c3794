"""Where in a schema something stands, for messages. Pure."""

from __future__ import annotations

from mlxpool.shared.text import cut

# Enough of a pointer to find the place.
_POINTER_CHARS = 200


class Place:
    """What leads to a place from the one above, which many share. A name may be a megabyte and lie above
    thousands of places, so that the pointer is only written out where somebody reads it."""

    __slots__ = ("_above", "_name")

    def __init__(self, name: str = "", above: Place | None = None) -> None:
        """Without a place above, the name is a whole pointer."""
        self._name = name
        self._above = above

    def under(self, name: str) -> Place:
        return Place(name, self)

    def __str__(self) -> str:
        """The JSON pointer, with long names and itself cut short."""
        names: list[str] = []
        place = self
        while place._above is not None:
            names.append("/" + cut(place._name).replace("~", "~0").replace("/", "~1"))
            place = place._above
        names.append(place._name)
        return cut("".join(reversed(names)), _POINTER_CHARS)

    @property
    def at(self) -> str:
        """` at` and the pointer, nothing for the whole schema."""
        pointer = str(self)
        return f" at {pointer}" if pointer else ""
