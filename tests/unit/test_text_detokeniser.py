"""The detokeniser: streamed pieces concatenated are the whole text, and nothing settles too early."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from mlxpool.worker.text.detokeniser import ByteDetokeniser, WindowDetokeniser


def single_byte(token: int) -> bytes:
    return bytes([token])


def stream(detokeniser: ByteDetokeniser | WindowDetokeniser, ids: Sequence[int]) -> list[str]:
    return [*(detokeniser.push(token) for token in ids), detokeniser.flush()]


def test_a_character_cut_over_tokens_comes_out_once_and_whole() -> None:
    pieces = stream(ByteDetokeniser(single_byte), "é€😀".encode())
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_one_space_is_trimmed_at_the_very_start_only() -> None:
    assert stream(ByteDetokeniser(single_byte), b"  a b") == ["", " ", "a", " ", "b", ""]
    assert stream(ByteDetokeniser(lambda token: b"" if token == 0 else b" x"), [0, 1, 1]) == [
        "",
        "x",
        " x",
        "",
    ]


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    assert stream(ByteDetokeniser(single_byte), b"a\xe2\x82") == ["a", "", "", "\ufffd"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255)))
def test_any_bytes_decode_as_the_whole_does(data: list[int]) -> None:
    streamed = "".join(stream(ByteDetokeniser(single_byte), data))
    assert streamed == bytes(data).decode("utf-8", errors="replace").removeprefix(" ")


def sentencepiece() -> Tokenizer:
    """Metaspace words with byte fallback, whose decoder strips the first space of a text."""
    words = ["▁Hello", "▁world", "▁", "!", "ing"]
    vocab = {token: i for i, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<tool>", special=True, normalized=False)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def tokens_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [token_id for token in tokens if (token_id := tokenizer.token_to_id(token)) is not None]


def test_only_the_first_space_of_a_text_is_stripped() -> None:
    tokenizer = sentencepiece()
    ids = tokens_of(tokenizer, "▁Hello", "▁world", "!", "▁", "▁world", "ing")
    assert stream(WindowDetokeniser(tokenizer.decode), ids) == [
        "Hello", " world", "!", " ", " world", "ing", "",
    ]  # fmt: skip


def test_byte_fallback_holds_an_incomplete_character() -> None:
    tokenizer = sentencepiece()
    ids = [*tokens_of(tokenizer, "▁Hello"), *"😀".encode(), *tokens_of(tokenizer, "!")]
    assert stream(WindowDetokeniser(tokenizer.decode), ids) == ["Hello", "", "", "", "😀", "!", ""]


def test_a_special_token_takes_no_space_from_the_word_after_it() -> None:
    tokenizer = sentencepiece()
    ids = tokens_of(tokenizer, "▁Hello", "<tool>", "<tool>", "▁world", "!")
    assert stream(WindowDetokeniser(tokenizer.decode), ids) == ["Hello", "", "", " world", "!", ""]


@example(["<tool>", "▁", "▁world"])
@example(["▁", "<tool>", "▁world"])
@example(["▁Hello", "▁", "<tool>", "▁", "<tool>", "▁world"])
@settings(deadline=None)
@given(st.lists(st.sampled_from(["▁Hello", "▁world", "▁", "!", "ing", "é", "😀", "<tool>"])))
def test_a_window_decodes_as_the_whole_does(tokens: list[str]) -> None:
    tokenizer = sentencepiece()
    ids: list[int] = []
    for token in tokens:
        known = tokenizer.token_to_id(token)
        ids.extend(token.encode() if known is None else [known])
    assert "".join(stream(WindowDetokeniser(tokenizer.decode), ids)) == tokenizer.decode(ids)


def test_invalid_bytes_are_not_held_for_ever() -> None:
    detokeniser = WindowDetokeniser(sentencepiece().decode)
    given_out = "".join(detokeniser.push(0xFF) for _ in range(100))
    assert len(given_out) >= 90


def test_tokens_without_text_are_not_gathered() -> None:
    tokenizer = sentencepiece()
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return str(tokenizer.decode(list(ids)))

    detokeniser = WindowDetokeniser(decode)
    (tool,) = tokens_of(tokenizer, "<tool>")
    assert [detokeniser.push(tool) for _ in range(100)] == [""] * 100
    assert max(decoded) < 12


def test_an_answer_that_goes_on_from_a_text_keeps_its_first_space() -> None:
    assert stream(ByteDetokeniser(single_byte, continues=True), b" a") == [" ", "a", ""]
    tokenizer = sentencepiece()
    ids = tokens_of(tokenizer, "▁Hello", "▁world")
    before = tokens_of(tokenizer, "▁Hello")
    assert "".join(stream(WindowDetokeniser(tokenizer.decode), ids)) == "Hello world"
    assert "".join(stream(WindowDetokeniser(tokenizer.decode, before), ids)) == " Hello world"


def test_a_detokeniser_knows_whether_a_character_is_incomplete() -> None:
    detokeniser = ByteDetokeniser(single_byte)
    known = []
    for byte in "a€b".encode():
        detokeniser.push(byte)
        known.append(detokeniser.in_character)
    assert known == [False, True, True, False, False]
    detokeniser.push(0xE2)
    detokeniser.flush()
    assert not detokeniser.in_character
