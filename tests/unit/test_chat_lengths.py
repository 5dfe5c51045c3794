"""Texts that are far longer than a model's context are not encoded to find that out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared import chat
from mlxpool.shared.chat import ChatTokenizer
from tests.tools import tiny_models

LIMIT = 5000


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    tiny_models.tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return ChatTokenizer.open(tmp_path)


@pytest.fixture
def encoded(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all that is encoded, in characters."""
    lengths: list[int] = []
    encode = tokenizer.encode

    def noted(text: str, *more: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *more)

    monkeypatch.setattr(tokenizer, "encode", noted)
    return lengths


def test_of_a_text_far_too_long_only_the_beginning_is_read(
    tokenizer: ChatTokenizer, encoded: list[int]
) -> None:
    text = "x " * (6 << 20)
    about = tokenizer.encode_within(text, LIMIT)
    assert isinstance(about, int)
    assert sum(encoded) <= 2 * chat._PIECE_CHARS
    piece = len(tokenizer.encode(text[: chat._PIECE_CHARS]))
    assert about == pytest.approx(piece * len(text) / chat._PIECE_CHARS, rel=0.01)


@pytest.mark.parametrize("characters", [10, 2 * chat._PIECE_CHARS, 2 * chat._PIECE_CHARS + 1, 700_000])
def test_a_text_within_the_limit_is_encoded_exactly(tokenizer: ChatTokenizer, characters: int) -> None:
    text = ("river lamp stone\n" * (characters // 17 + 1))[:characters]
    ids = tokenizer.encode(text)
    assert tokenizer.encode_within(text, len(ids)) == ids
    assert tokenizer.encode_within(text, 10 * len(ids)) == ids


def test_a_cut_in_the_middle_of_words_refuses_nothing_that_fits(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_PIECE_CHARS", 1000)
    text = "<|im_start|>" * 5000
    ids = tokenizer.encode(text)
    assert len(ids) == 5000
    assert tokenizer.encode_within(text, len(ids)) == ids
