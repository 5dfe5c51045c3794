"""A model folder's tokenizer and chat template without transformers: text and ids of a request.

`ChatTokenizer.open(folder)` reads what the folder itself says: tokenizer.json through `tokenizers`, the
template from chat_template.jinja, tokenizer_config.json or chat_template.json, the ids that end a turn
from the configs. It is immutable once opened and safe to share between threads: `encode` goes through
`encode_batch_fast`, which releases the GIL, because one long prompt would otherwise freeze the event loop
beside it. The edge that shaped it: a template writes its own BOS and a tokenizer may add one too, so a
rendered chat is encoded without added special tokens, and a doubled BOS is trimmed to one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders

from mlxpool.shared.template import ChatTemplate

# Special tokens that end a turn in the template families in use. A base model's folder often names only
# its document end as eos while its chat template closes turns with one of these.
TURN_TERMINATORS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endofturn|>",
    "<｜end▁of▁sentence｜>",
)

# Harmony (gpt-oss) closes every message with <|end|>, the reasoning before the answer too; its turns end with
# <|return|> or <|call|>. Elsewhere (Phi) <|end|> does end a turn.
_HARMONY_MARK, _HARMONY_MESSAGE_END = "<|channel|>", "<|end|>"

# Names under which templates find the folder's special tokens.
_TEMPLATE_TOKENS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


# How much of a long text is encoded at once to count it: 20 to 40 ms.
_PIECE_CHARS = 128 * 1024
_CUT_TOKENS = 64

# A byte that SentencePiece had no token for.
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class ChatTokenizerError(ValueError):
    """The folder's tokenizer or template can't be used; the message names the file and says why."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder, {} where there is none. Raises ChatTokenizerError."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, OSError, RecursionError) as err:
        raise ChatTokenizerError(f"{path.name} can't be read: {err}") from err
    if not isinstance(value, dict):
        raise ChatTokenizerError(f"{path.name} holds no JSON object")
    return value


def _token_text(value: object) -> str | None:
    """A token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's chat template: its own file first, then the config, then the older JSON file."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    value = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What the tokenizer's decoder does to tokens, step by step, as tokenizer.json writes it."""
    if tokenizer.decoder is None:
        return []
    # Its pickled state is its JSON; the object itself shows nothing of a sequence.
    step = msgspec.json.decode(tokenizer.decoder.__getstate__())
    return list(step["decoders"]) if step.get("type") == "Sequence" else [step]


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes are themselves, the others the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


class ChatTokenizer:
    """Renders, encodes and decodes for one model. `vocab_size` counts added tokens too; `is_byte_level` says
    that every token is a known string of bytes (byte-level BPE), so that `token_bytes` holds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        special_text: Mapping[str, str],
        eos_ids: frozenset[int],
    ) -> None:
        # Settings of somebody's training run that some files carry: prompts are never cut or padded here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.eos_ids = eos_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._tokenizer = tokenizer
        self._template = template
        self._special_text = dict(special_text)
        self._bos_id: int | None = tokenizer.token_to_id(special_text.get("bos_token", ""))
        self._special_ids = {
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._letters = _byte_of_letter()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def open(cls, folder: str | Path) -> ChatTokenizer:
        """Read the folder. Raises ChatTokenizerError naming the file that is missing or wrong."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ChatTokenizerError(f"the folder {folder.name} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as err:  # tokenizers raises a bare Exception
            raise ChatTokenizerError(f"tokenizer.json can't be read: {err}") from err
        return cls.with_tokenizer(folder, tokenizer)

    @classmethod
    def with_tokenizer(cls, folder: Path, tokenizer: Tokenizer) -> ChatTokenizer:
        """`open` with a tokenizer that came from somewhere else than tokenizer.json."""
        config = read_json(folder / "tokenizer_config.json")
        source = template_of(folder, config)
        try:
            template = None if source is None else ChatTemplate(source)
        except ValueError as err:
            raise ChatTokenizerError(str(err)) from err
        special = {name: text for name in _TEMPLATE_TOKENS if (text := _token_text(config.get(name)))}
        return cls(tokenizer, template, special, _eos_ids(folder, tokenizer, special))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template's text, empty where there is none."""
        return "" if self._template is None else self._template.source

    @property
    def template_reads(self) -> frozenset[str]:
        """The variables that the chat template reads."""
        return frozenset() if self._template is None else self._template.variables

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, special tokens included."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the token has no text of its own."""
        return token_id in self._special_ids

    @property
    def special_tokens(self) -> dict[int, str]:
        """The tokens without a text of their own, as they are spelled, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: added[token_id].content for token_id in self._special_ids}

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt's text, generation prompt included unless `add_generation_prompt=False`.

        Raises ApiError 400 when the template refuses or fails, ChatTokenizerError when there is none.
        """
        if self._template is None:
            raise ChatTokenizerError("the model's folder has no chat template")
        variables.setdefault("add_generation_prompt", True)
        given = {"tools": None, "documents": None, **self._special_text, **variables}
        return self._template.render(messages, **given)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. Without added special tokens, as a rendered chat needs it; one BOS at most."""
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        if self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]:
            return ids[1:]
        return ids

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = False) -> list[int] | int:
        """`encode`, for a text that may be far longer than `limit` tokens: about how many it has, then.

        Encoding takes a kilobyte for every token, and nothing can stop it: of such a text only as much is
        read as shows that it is too long.
        """
        if len(text) <= 2 * _PIECE_CHARS:
            return self.encode(text, add_special_tokens)
        count = begun = 0
        while begun < len(text):
            piece = text[begun : begun + _PIECE_CHARS]
            begun += len(piece)
            # A cut may take a token apart, into as many as the longest word has letters at worst.
            count += max(0, len(self.encode(piece)) - _CUT_TOKENS)
            if count > limit:
                return count * len(text) // begun
        return self.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary, b"" for special tokens and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_token_bytes(token_id)
        return known

    def _read_token_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        try:
            return bytes(self._letters[letter] for letter in token)
        except KeyError:
            # An added token is plain text, outside of the byte alphabet.
            return token.encode()

    def vocabulary(self) -> list[bytes]:
        """What each token adds to a text, by id: b"" for special tokens and for ids that are none.

        A SentencePiece token that begins a word carries its space, also where it begins the text.
        """
        steps = _decoder_steps(self._tokenizer)
        kinds = {step.get("type") for step in steps}
        added = self._tokenizer.get_added_tokens_decoder()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        found = [b""] * (max(ids.values(), default=-1) + 1)
        for text, token_id in ids.items():
            if token_id in self._special_ids:
                continue
            if token_id in added:
                found[token_id] = added[token_id].content.encode()
            elif "ByteLevel" in kinds:
                found[token_id] = self._read_token_bytes(token_id)
            elif "ByteFallback" in kinds and _BYTE_TOKEN.fullmatch(text):
                found[token_id] = bytes([int(text[3:5], 16)])
            else:
                found[token_id] = _replaced(text, steps).encode(errors="replace")
        return found


def _replaced(text: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """A token's text as the decoder's replacing steps leave it."""
    for step in steps:
        if step.get("type") == "Metaspace":
            text = text.replace(step["replacement"], " ")
        elif step.get("type") == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
    return text


def _eos_ids(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """Every id that ends a turn: both configs', the tokenizer's, and the known turn terminators."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = read_json(folder / name)
        text_config = config.get("text_config")
        found.update(_ids(config.get("eos_token_id")))
        if isinstance(text_config, dict):
            found.update(_ids(text_config.get("eos_token_id")))
    eos_id = tokenizer.token_to_id(special.get("eos_token", ""))
    if eos_id is not None:
        found.add(eos_id)
    terminators = set(TURN_TERMINATORS)
    if tokenizer.token_to_id(_HARMONY_MARK) is not None:
        terminators.remove(_HARMONY_MESSAGE_END)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and token.content in terminators:
            found.add(token_id)
    return frozenset(found)
