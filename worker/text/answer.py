"""One row's way from token ids to events: detokeniser, reasoning, tool calls, stop strings.

A stop string is looked for in the text of the answer alone: what the model reasons and what it hands to a
tool is not what a client reads, and ends nothing there. The engine thread owns a row's `AnswerText`. A token
that ends the answer by being an eos gives no text of its own and is not pushed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from mlxpool.shared.prompt.reasoning_families import HARMONY, HARMONY_MESSAGE_END, REASONING_FAMILIES
from mlxpool.worker.text.detokeniser import Detokeniser
from mlxpool.worker.text.events import Logprobs, Reasoning, Text, TextEvent, ToolCallEnd
from mlxpool.worker.text.format import AnswerFormat
from mlxpool.worker.text.held_logprobs import HeldLogprobs
from mlxpool.worker.text.marks import Marks
from mlxpool.worker.text.reasoning import ReasoningSplitter
from mlxpool.worker.text.stops import StopMatcher
from mlxpool.worker.text.tools.block_calls import Parse
from mlxpool.worker.text.tools.families import TOOL_FAMILIES, make_machine
from mlxpool.worker.text.tools.harmony import HarmonyMachine
from mlxpool.worker.text.tools.machine import ToolMachine

# Bytes of randomness in a call's id, written in hex.
_ID_BYTES = 12


def new_call_id() -> str:
    """An id no other call has."""
    return f"call_{secrets.token_hex(_ID_BYTES)}"


class AnswerText:
    """The events of one answer.

    source: gives each token's text, with the markers of `marks` as their characters (`TokenText`). parse:
    mlx-lm's parser of the tool family, for the families that need one. over: the answer ends here although
    the model would go on, because a stop string was met (`stop`) or its one call is complete. called: at
    least one call was completed. added_chars: what the last token settled, without markers.
    """

    def __init__(
        self,
        source: Detokeniser,
        answer_format: AnswerFormat = AnswerFormat(),  # noqa: B008 - frozen
        marks: Marks | None = None,
        parse: Parse | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        marks = marks or Marks()
        self.over = False
        self.stop: str | None = None
        self.called = False
        self.added_chars = 0
        self._source = source
        self._marks = marks
        self._one_call = answer_format.one_call
        self._stops = StopMatcher(answer_format.stops) if answer_format.stops else None
        self._logprobs = HeldLogprobs()
        self._heard = 0  # characters that came from the tokens, without markers
        self._ended = False
        self._splitter: ReasoningSplitter | None = None
        self._tools: ToolMachine | None = None
        reasoning, tools = answer_format.reasoning, answer_format.tools
        if HARMONY in (reasoning, tools):
            declared = answer_format.declared if tools is not None else ()
            self._tools = HarmonyMachine(declared, marks, new_id, answer_format.starts_inside)
            self._bare = False
            return
        ends: list[str] = []
        if tools is not None:
            family = TOOL_FAMILIES[tools]
            self._tools = make_machine(family, answer_format.declared, marks, parse, new_id)
            ends = [marks.form(opener) for opener in family.openers if marks.is_token(opener)]
        if reasoning is not None:
            self._splitter = ReasoningSplitter(
                REASONING_FAMILIES[reasoning], marks, answer_format.starts_inside, ends
            )
        self._bare = not self._machines()

    @property
    def bound_chars(self) -> int:
        """Characters that may be held back at most, whatever the answer is."""
        return sum(machine.bound_chars for machine in self._machines())

    @property
    def held_chars(self) -> int:
        """Characters that are held back now."""
        return sum(machine.held_chars for machine in self._machines())

    @property
    def thinks_until(self) -> str | None:
        """What closes the block of reasoning that is open, None outside of one."""
        if isinstance(self._tools, HarmonyMachine):
            return HARMONY_MESSAGE_END if self._tools.thinks else None
        return None if self._splitter is None else self._splitter.open_until

    @property
    def in_character(self) -> bool:
        """Whether the last token ended inside a character."""
        return self._source.in_character

    def _machines(self) -> list[ReasoningSplitter | ToolMachine | StopMatcher]:
        machines = (self._splitter, self._tools, self._stops)
        return [machine for machine in machines if machine is not None]

    def push(self, token: int) -> list[TextEvent]:
        """What this token settles. Nothing once the answer is over."""
        if self.over:
            return []
        text = self._source.push(token)
        plain = self._marks.plain(text)
        self.added_chars = len(plain)
        if self._bare:
            return [Text(plain)] if plain else []
        self._heard += self.added_chars
        return self._read(text)

    def told(self, entry: Logprobs | None = None) -> list[Logprobs]:
        """The log-probabilities that may be sent now. entry: that of the token pushed last, None at the end.
        Those of a stop string, or of a token that reaches into it, never come."""
        if self._stops is None:
            return [] if entry is None else [entry]
        if entry is not None:
            self._logprobs.add(self._heard + self._source.in_character, entry)
        if self.stop is not None:
            return self._logprobs.before(self.stop)
        if self.over or self._ended:
            return self._logprobs.all()
        return self._logprobs.settled(self._heard - self.held_chars)

    def flush(self, cut: bool = False) -> list[TextEvent]:
        """The answer ended: what was held, which may complete a stop string or a call.
        cut: a limit ended it, and a call that it cuts stays open."""
        self._ended = True
        if self.over:
            return []
        events = self._read(self._source.flush())
        if self._splitter is not None:
            for text, reasoning in self._splitter.flush():
                self._sort(text, reasoning, events)
        if self._tools is not None:
            self._keep(self._tools.flush(cut), events)
        self._release(events)
        return events

    def _read(self, text: str) -> list[TextEvent]:
        events: list[TextEvent] = []
        if not text:
            return events
        if self._splitter is None:
            self._sort(text, False, events)
            return events
        for part, reasoning in self._splitter.push(text):
            self._sort(part, reasoning, events)
        return events

    def _sort(self, text: str, reasoning: bool, events: list[TextEvent]) -> None:
        if self.over:
            return
        if reasoning:
            text = self._marks.plain(text)
            if text:
                self._release(events)
                events.append(Reasoning(text))
        elif self._tools is None:
            self._say(self._marks.plain(text), events)
        else:
            self._keep(self._tools.push(text), events)

    def _keep(self, made: list[TextEvent], events: list[TextEvent]) -> None:
        """What the tool machine made, up to where the answer is over."""
        for event in made:
            if self.over:
                return
            if isinstance(event, Text):
                self._say(event.text, events)
                continue
            self._release(events)
            events.append(event)
            if isinstance(event, ToolCallEnd):
                self.called = True
                self.over = self._one_call

    def _say(self, text: str, events: list[TextEvent]) -> None:
        if self._stops is not None:
            text, self.stop = self._stops.push(text)
            self.over = self.stop is not None
        self._add_text(text, events)

    def _release(self, events: list[TextEvent]) -> None:
        """Something else than text follows: what could have begun a stop string doesn't."""
        if self._stops is not None:
            self._add_text(self._stops.flush(), events)

    def _add_text(self, text: str, events: list[TextEvent]) -> None:
        if text:
            events.append(Text(text))
