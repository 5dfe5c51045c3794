"""What a model can do, told from its folder without reading its vocabulary.

A worker asks its tokenizer whether a marker is a token. Markers are added tokens, and those stand at the
beginning of tokenizer.json: its first bytes are enough. What was told of a folder's files is remembered as
long as they stay as they are.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.parent.library import LibraryModel
from mlxpool.shared.colibri.plan import StreamPlan
from mlxpool.shared.families import NO_FAMILY

# Added tokens of the largest known vocabularies take a tenth of that.
_HEAD_BYTES = 2 * 2**20
# More models than a machine has.
_KEPT = 1024

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_DEPTH = re.compile(r"\breasoning_effort\b")

_Stamps = tuple[tuple[int, int] | None, ...]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What is claimed is what was built. chat, and what is made of it: the folder has a chat template. tools:
    where the template knows none, they are told in words. batch: requests decode together. streamed_experts:
    they are read from disk as they are needed. dsa: attention chooses what it attends to. mtp: the
    checkpoint's own draft layer is used."""

    chat: bool
    completions: bool = True
    messages: bool
    responses: bool
    streaming: bool = True
    tools: bool
    structured_output: bool = True
    log_probs: bool = True
    reasoning: bool
    vision: bool = False
    audio: bool = False
    embeddings: bool = False
    adapters: bool = True
    speculation: bool = False
    batch: bool
    streamed_experts: bool = False
    dsa: bool = False
    mtp: bool = False


class _Told(msgspec.Struct, frozen=True):
    """What a folder's files say. reasoning: the family. effort: whether the template reads a depth."""

    chat: bool
    reasoning: str | None
    effort: bool


def capabilities(model: LibraryModel, stream: StreamPlan | None = None) -> Capabilities:
    """Of this model, as its files and settings are now. What can't be read of it is not claimed. stream: its
    plan, where its experts are streamed."""
    told, own = _told_of(model.path), model.settings
    return Capabilities(
        chat=told.chat,
        messages=told.chat,
        responses=told.chat,
        tools=told.chat and own.tool_parser != NO_FAMILY,
        reasoning=_reasons(model, told),
        adapters=stream is None,
        batch=own.rows(streamed=stream is not None) > 1,
        speculation=stream is not None and stream.drafts > 0,
        streamed_experts=stream is not None,
        dsa=stream is not None and stream.has_indexer,
        mtp=stream is not None and stream.drafts > 0,
    )


def anthropic_capabilities(model: LibraryModel, ours: Capabilities) -> dict[str, Any]:
    """The same as Anthropic's clients read it: an object of support for each, ours among them."""
    reasons, depth = _support(ours.reasoning), _support(ours.reasoning and _told_of(model.path).effort)
    no = _support(False)
    return {
        **msgspec.to_builtins(ours),
        # Anthropic's batch jobs there, and our rows that decode together elsewhere.
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": {**depth, "low": depth, "medium": depth, "high": depth, "xhigh": depth, "max": depth},
        "image_input": no,
        "pdf_input": no,
        "server_tools": {**no, "code_execution": no, "web_search": no},
        "structured_outputs": _support(ours.messages),
        "thinking": {
            **reasons,
            "types": {"enabled": reasons, "disabled": reasons, "adaptive": reasons, "between_tools": no},
        },
    }


def _reasons(model: LibraryModel, told: _Told) -> bool:
    family = model.settings.reasoning_parser or told.reasoning
    return told.chat and family not in (None, NO_FAMILY)


def _support(supported: bool) -> dict[str, Any]:
    return {"supported": supported}


def _told_of(path: Path) -> _Told:
    return _read(path, tuple(_stamp(path / name) for name in _FILES))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size


@lru_cache(maxsize=_KEPT)
def _read(path: Path, stamps: _Stamps) -> _Told:
    del stamps  # they make what was told of other files another answer
    # Not imported by a parent that is never asked: they take longer than its start may.
    from mlxpool.shared.chat import ChatTokenizerError, read_json, template_of
    from mlxpool.shared.prompt.choose import choose_reasoning

    try:
        source = template_of(path, read_json(path / "tokenizer_config.json"))
    except (ChatTokenizerError, OSError, TypeError, ValueError):
        source = None
    if source is None:
        return _Told(False, None, False)
    added = _added_tokens(path / "tokenizer.json")
    return _Told(True, choose_reasoning(source, added.__contains__), _DEPTH.search(source) is not None)


def _added_tokens(path: Path) -> frozenset[str]:
    """Their texts; none where the file does not begin as such files do."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
        begins = _ADDED_TOKENS.search(head)
        entries = [] if begins is None else json.JSONDecoder().raw_decode(head, begins.end())[0]
    except (OSError, ValueError, RecursionError):
        return frozenset()
    return frozenset(str(entry.get("content")) for entry in entries if isinstance(entry, dict))
