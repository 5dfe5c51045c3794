"""What the answers of one model share, made once: its markers as its vocabulary has them.

Immutable; `answer` makes the machines of one row.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import Detokeniser
from mlxpool.worker.text.format import AnswerFormat
from mlxpool.worker.text.marks import Marks, TokenText
from mlxpool.worker.text.tools.block_calls import Parse
from mlxpool.worker.text.tools.families import TOOL_FAMILIES, family_tokens


class ModelText:
    """detokeniser: a fresh one for each row, told whether the answer goes on from a text. token_id: the id of
    a token's text, None where there is none. is_special: whether an id has no text of its own. parser:
    mlx-lm's parser of a tool family by its name, asked for only by families that need one."""

    def __init__(
        self,
        detokeniser: Callable[[bool], Detokeniser],
        token_id: Callable[[str], int | None],
        is_special: Callable[[int], bool],
        parser: Callable[[str], Parse],
    ) -> None:
        self._detokeniser = detokeniser
        self._parser = parser
        reasoning = {token for family in REASONING_FAMILIES.values() for token in family.tokens}
        self._marks = Marks(family_tokens(), token_id, is_special, ordinary=reasoning)

    def answer(self, answer_format: AnswerFormat) -> AnswerText:
        """The machines for one answer."""
        family = TOOL_FAMILIES.get(answer_format.tools or "")
        parse = self._parser(family.name) if family is not None and family.needs_parser else None
        source = TokenText(self._detokeniser(answer_format.continues), self._marks)
        return AnswerText(source, answer_format, self._marks, parse)
