"""The bytes of tokens that log-probabilities show."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from mlxpool.shared.chat import ChatTokenizer
from mlxpool.worker.token_bytes import TokenBytes
from tests.tools import tiny_models


def sentencepiece(folder: Path) -> ChatTokenizer:
    vocabulary = {"<unk>": 0, "</s>": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "▁Hello": 5, "▁": 6}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    return ChatTokenizer.with_tokenizer(folder, made)


async def test_the_space_of_a_word_and_the_parts_of_a_character_are_shown(tmp_path: Path) -> None:
    token_bytes = await TokenBytes(sentencepiece(tmp_path)).by_id()
    assert token_bytes(5) == b" Hello"
    assert b"".join(map(token_bytes, (2, 3, 4))) == "€".encode()


async def test_a_special_token_is_shown_as_it_is_spelled_and_no_token_as_nothing(tmp_path: Path) -> None:
    assert (await TokenBytes(sentencepiece(tmp_path)).by_id())(1) == b"</s>"
    byte_level = ChatTokenizer.with_tokenizer(tmp_path, tiny_models.tokenizer())
    token_bytes = await TokenBytes(byte_level).by_id()
    assert token_bytes(tiny_models.EOS_ID) == b"<|im_end|>"
    assert token_bytes(tiny_models.VOCAB_SIZE - 1) == b""


async def test_a_vocabulary_is_read_once_and_one_who_leaves_takes_nothing_along(tmp_path: Path) -> None:
    class Counting(ChatTokenizer):
        reads = 0

        def vocabulary(self) -> list[bytes]:
            Counting.reads += 1
            return super().vocabulary()

    vocabulary = TokenBytes(Counting(tiny_models.tokenizer(), None, {}, frozenset()))
    leaving, staying = asyncio.ensure_future(vocabulary.by_id()), asyncio.ensure_future(vocabulary.by_id())
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying)(ord("!") - 0x21) == b"!"
    await vocabulary.by_id()
    assert Counting.reads == 1
