"""What each token adds to a text, in each kind of vocabulary."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from mlxpool.shared.chat import ChatTokenizer
from tests.tools import tiny_models


def open_one(folder: Path, tokenizer: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer.with_tokenizer(folder, tokenizer)


def test_a_byte_level_vocabulary_is_bytes(tmp_path: Path) -> None:
    made = tiny_models.tokenizer()
    made.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("é x", special=False)])
    tokenizer = open_one(tmp_path, made)
    words = tokenizer.vocabulary()
    assert sorted(words[:256]) == sorted(bytes([byte]) for byte in range(256))
    assert b"".join(words[token] for token in made.encode("né\n").ids) == "né\n".encode()
    # Special tokens add nothing; others that were added are the text they say.
    assert words[tiny_models.BOS_ID] == words[tiny_models.EOS_ID] == b""
    assert words[made.token_to_id("<tool_call>")] == b"<tool_call>"
    assert words[made.token_to_id("é x")] == "é x".encode()


def test_a_sentencepiece_vocabulary_has_spaces_and_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "<0xE2>": 3, "▁the": 4, "ing": 5, "▁": 6, "<0xZZ>": 8}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    words = open_one(tmp_path, made).vocabulary()
    assert words == [b"", b"", b"\n", b"\xe2", b" the", b"ing", b" ", b"", b"<0xZZ>"]


def test_a_metaspace_vocabulary_has_spaces_and_no_bytes(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"▁a": 0, "<0x0A>": 1}, unk_token="▁a"))
    made.decoder = decoders.Metaspace()
    assert open_one(tmp_path, made).vocabulary() == [b" a", b"<0x0A>"]


def test_a_vocabulary_without_a_decoder_is_its_own_text(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"▁a": 0, "b": 2}, unk_token="b"))
    assert open_one(tmp_path, made).vocabulary() == ["▁a".encode(), b"", b"b"]
