"""How models mark their reasoning: what a prompt may open, what an answer is split at. Data."""

from __future__ import annotations

import msgspec

HARMONY = "harmony"
# What a prompt of that family ends with when it has begun the reasoning.
HARMONY_OPENER = "<|channel|>analysis<|message|>"
HARMONY_MESSAGE_END = "<|end|>"


class ReasoningFamily(msgspec.Struct, frozen=True):
    """tags: (opening, closing), the model's own first, which is the one a prompt opens. tokens: what in them
    is a token. newlines: those of the template after the opening tag, before and after the closing one.
    dropped: markers around the answer itself, which are no text."""

    name: str
    tags: tuple[tuple[str, str], ...]
    tokens: tuple[str, ...] = ()
    newlines: tuple[int, int, int] = (1, 1, 2)
    dropped: tuple[str, ...] = ()


def _pair(name: str, opening: str, closing: str) -> ReasoningFamily:
    return ReasoningFamily(name, ((opening, closing),), (opening, closing))


_THINK_TAGS = tuple((f"<{word}>", f"</{word}>") for word in ("think", "thinking", "thought", "reasoning"))

REASONING_FAMILIES = {
    family.name: family
    for family in (
        # Models trained on the first write the longer ones too.
        ReasoningFamily("think", _THINK_TAGS, _THINK_TAGS[0]),
        _pair("longcat", "<longcat_think>", "</longcat_think>"),
        _pair("think_start", "<|think:start|>", "<|think:end|>"),
        _pair("seed", "<seed:think>", "</seed:think>"),
        _pair("mistral", "[THINK]", "[/THINK]"),
        _pair("thought", "<thought>", "</thought>"),
        # The channel's name is part of the tag, the newline after it the reasoning's own.
        ReasoningFamily(
            "gemma4", (("<|channel>thought", "<channel|>"),), ("<|channel>", "<channel|>"), (0, 1, 0)
        ),
        ReasoningFamily(
            "kimi_k3",
            (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
            ("<|open|>", "<|close|>", "<|sep|>"),
            dropped=(
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ),
        ),
    )
}
