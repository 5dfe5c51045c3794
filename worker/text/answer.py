"""One row's way from token ids to events: detokeniser, then stop matcher.

The engine thread owns it. A token that ends the answer by being an eos gives no text of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.worker.text.detokeniser import Detokeniser
from mlxpool.worker.text.stops import StopMatcher


class AnswerText:
    """Text of one answer. `stop` is the stop string met, None so far."""

    def __init__(self, detokeniser: Detokeniser, stops: Sequence[str]) -> None:
        self._detokeniser = detokeniser
        self._matcher = StopMatcher(stops)
        self.stop: str | None = None

    def add(self, token: int) -> str:
        """Text that may be sent after this token; sets `stop` when the answer ends here."""
        text, self.stop = self._matcher.add(self._detokeniser.add(token))
        return text

    def finish(self) -> str:
        """The rest of the text when no stop string ended it. A held character may complete a stop."""
        text, self.stop = self._matcher.add(self._detokeniser.finish())
        return text if self.stop is not None else text + self._matcher.finish()
