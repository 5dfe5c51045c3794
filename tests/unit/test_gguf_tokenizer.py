"""A GGUF's tokenizer is the model's: the same cuts, joins, special tokens and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxpool.shared.gguf import cutters, header
from mlxpool.shared.gguf.header import GgufError, Header
from mlxpool.worker.gguf import bpe, spm, tokenizer
from mlxpool.worker.gguf.tokenizer import TokenizerFiles
from tests.tools import gguf_files
from tests.tools.gguf_files import bpe_tokens, spm_tokens

ROWS = 512
TEXTS = [
    "The theme of this",
    "  two  spaces, and\ttabs\n\n\nlines\r\n",
    "naïve café 漢字 العربية हिन्दी",
    "🙂👨‍👩‍👧 \u200b\ufeff",
    "def f(x):\n    return x**2  # 12345, 3.14",
    "don't WON'T it's",
    "\x00\x01",
]


def built(**metadata: Any) -> TokenizerFiles:
    given = {"general.architecture": "llama", "llama.context_length": 512, **metadata}
    return tokenizer.build(Header(Path("m.gguf"), given, {}), ROWS)


def words(pre: str, text: str) -> list[str]:
    """How a cutter cuts, in plain letters."""
    made = bpe.build(["a"], [], pre)
    return [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", cutters.CUTTERS)
def test_every_text_comes_back_from_byte_level_tokens(pre: str) -> None:
    made = built(**bpe_tokens(pre)).tokenizer
    for text in TEXTS:
        assert made.decode(made.encode(text, add_special_tokens=False).ids) == text


def test_merges_join_bytes_and_special_tokens_stand_alone() -> None:
    made = built(**bpe_tokens()).tokenizer
    assert made.encode("the thx<|im_end|>").tokens == ["the", "Ġ", "th", "x", "<|im_end|>"]
    assert made.decode([260, 257]) == "the"


CUTS = [
    ("smollm", "in 1234 they'll", ["in", " ", "1", "2", "3", "4", " they", "'ll"]),
    ("gpt-2", "in 1234 they'll", ["in", " 1234", " they", "'ll"]),
    (
        "llama-bpe",
        "in 12345 THEY'LL go\n\n  x",
        ["in", " ", "123", "45", " THEY", "'LL", " go", "\n\n", " ", " x"],
    ),
    ("qwen2", "in 123 x=1;\n", ["in", " ", "1", "2", "3", " x", "=", "1", ";\n"]),
    ("tekken", "camelCase 12 HTTPServer", ["camel", "Case", " ", "1", "2", " HTTPServer"]),
    ("default", "a<b 12345", ["a", "<", "b", " ", "123", "45"]),
]


@pytest.mark.parametrize(("pre", "text", "expected"), CUTS, ids=[pre for pre, _, _ in CUTS])
def test_text_is_cut_as_the_models_makers_cut_it(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def test_a_word_that_is_a_token_needs_no_merges_in_llama_3() -> None:
    tokens = {**bpe_tokens("llama-bpe"), "tokenizer.ggml.merges": []}
    assert built(**tokens).tokenizer.encode("the", add_special_tokens=False).tokens == ["the"]
    plain = {**bpe_tokens("qwen2"), "tokenizer.ggml.merges": []}
    assert built(**plain).tokenizer.encode("the", add_special_tokens=False).tokens == ["t", "h", "e"]


def test_sentencepiece_joins_by_score_spells_bytes_and_keeps_spaces() -> None:
    made = built(**spm_tokens()).tokenizer
    encoded = made.encode("hello é", add_special_tokens=False)
    assert encoded.tokens == ["▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert made.encode("hell", add_special_tokens=False).tokens == ["▁", "hell"]
    # Put in by hand: found before anything is joined.
    assert made.encode("h  e", add_special_tokens=False).tokens[2:3] == ["  "]
    # What follows a token put in by hand begins as a text does, with a space: as these models were published.
    for text in [text for text in TEXTS if "  " not in text]:
        assert made.decode(made.encode(text, add_special_tokens=False).ids) == text
    assert made.encode("hello").tokens[0] == "<s>"


def test_sentencepiece_without_a_space_in_front() -> None:
    made = built(**spm_tokens(), **{"tokenizer.ggml.add_space_prefix": False}).tokenizer
    assert made.encode("hello", add_special_tokens=False).tokens == ["hello"]
    assert made.encode(" hello", add_special_tokens=False).tokens == ["▁hello"]
    for text in TEXTS:
        assert made.decode(made.encode(text, add_special_tokens=False).ids) == text


def test_merges_are_ranked_by_what_they_make() -> None:
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}
    assert spm.merges_of(scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def test_begin_and_end_tokens_are_added_where_the_file_says_so() -> None:
    asked = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    made = built(**bpe_tokens(), **asked)
    assert made.tokenizer.encode("t").tokens == ["<|im_start|>", "t", "<|im_end|>"]
    assert made.config["add_bos_token"] is True
    assert built(**bpe_tokens()).tokenizer.encode("t").tokens == ["t"]
    assert built(**bpe_tokens("llama-bpe")).tokenizer.encode("t").tokens == ["<|im_start|>", "t"]


def test_every_token_that_ends_an_answer_is_one() -> None:
    tokens = bpe_tokens()
    tokens["tokenizer.ggml.eos_token_id"] = 258
    assert built(**tokens, **{"tokenizer.ggml.eot_token_id": 259}).end_ids == [258, 259, 260]
    assert built(**bpe_tokens()).end_ids == [260]
    # One that stands for what is unknown as well is no end.
    tokens = bpe_tokens()
    tokens["tokenizer.ggml.tokens"][258] = "<|endoftext|>"
    assert built(**tokens).end_ids == [260, 258]
    assert built(**tokens, **{"tokenizer.ggml.unknown_token_id": 258}).end_ids == [260]


def test_template_and_special_tokens_are_in_the_config() -> None:
    config = built(**bpe_tokens()).config
    assert config["chat_template"].startswith("{% for m in messages %}")
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|pad|>",
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; this import knows gpt2, llama"),
    ({"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre is 'odd'; of gpt2's kind this import knows default,"),
    ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens has 2 (1 different) with 261 kinds"),
    ({"tokenizer.ggml.tokens": [f"t{at}" for at in range(513)]}, "for 512 rows of the embedding"),
    ({"tokenizer.ggml.merges": ["t zz"]}, "tokenizer.ggml.merges has 't zz', which joins no two tokens"),
    ({"tokenizer.ggml.merges": ["tz"]}, "tokenizer.ggml.merges has 'tz', which joins no two tokens"),
    ({"tokenizer.ggml.merges": None}, "the GGUF has no tokenizer.ggml.merges of the kind str"),
    ({"tokenizer.ggml.bos_token_id": 261}, "tokenizer.ggml.bos_token_id is 261, and no token of 261"),
    ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; true or false"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_a_tokenizer_that_is_not_known_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(GgufError) as caught:
        built(**{**bpe_tokens(), **changed})
    assert said in str(caught.value)


def test_the_files_own_types_are_those_that_are_expected(tmp_path: Path) -> None:
    model = gguf_files.Model("llama", {}, spm_tokens() | {"tokenizer.ggml.pre": None})
    path = gguf_files.write(tmp_path / "m.gguf", model)
    made = tokenizer.build(header.read(path, with_long_lists=True), ROWS)
    assert made.tokenizer.encode("hello").tokens == ["<s>", "▁hello"]


@pytest.mark.starter
def test_the_starters_tokens_are_known_ones(starter_folder: Path) -> None:
    made = Tokenizer.from_file(str(starter_folder / "tokenizer.json"))
    assert made.encode("<|im_start|>user\nHello world 12<|im_end|>").ids == [
        1, 4093, 198, 19556, 905, 216, 33, 34, 2,
    ]  # fmt: skip
    for text in TEXTS:
        assert made.decode(made.encode(text).ids) == text
