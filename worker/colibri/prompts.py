"""Prompts to measure with: always the same text, and no two of them the same."""

from __future__ import annotations

from collections.abc import Callable

_PASSAGES = (
    "The harbour master kept a ledger of every ship that came in before noon, and of what it carried. ",
    "def merge(left, right):\n    while left and right:\n        yield (left or right).pop(0)\n",
    "Water boils at a lower temperature on a mountain, because there is less air above it to press on it. ",
    "Dear Ms Okafor, thank you for your letter of the third. We regret that the parcel has not arrived. ",
    "Question: a train leaves at 9:40 and needs 75 minutes. When does it arrive? Answer: at 10:55. ",
    "Im Herbst sammeln die Kinder Kastanien und bauen daraus Tiere mit Beinen aus Streichhölzern. ",
    "SELECT city, count(*) FROM visits WHERE year = 2019 GROUP BY city HAVING count(*) > 10 ORDER BY 2;\n",
    "Once the dough has doubled, fold it twice, let it rest ten minutes, and heat the oven to 230 degrees. ",
)


def prompt(encode: Callable[[str], list[int]], tokens: int, number: int) -> list[int]:
    """The ids of one of `tokens` tokens. number: which; those of different numbers begin differently."""
    ids: list[int] = []
    place = number
    while len(ids) < tokens:
        # Counted, so that a long one does not repeat itself word for word.
        ids += encode(f"{place + 1}. {_PASSAGES[place % len(_PASSAGES)]}")
        place += 1
    return ids[:tokens]
