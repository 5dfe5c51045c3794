"""What a scripted worker shall do, and the model folders that say so.

A scripted model is a folder that every reader of checkpoints accepts (a llama of a few kilobytes, or of
any size on paper: its file is sparse) plus `script.json`, a `Script`. The text it answers is a function of
the model's name and the question, so that an answer that reached the wrong client can be told by reading
it: `expected_text` is that function, for tests to compare with.

The folder belongs to the test that made it; the worker only appends to its `life/events.jsonl`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Literal

import msgspec

SCRIPT_FILE = "script.json"
# In a folder of its own: a model whose own files change is loaded anew.
EVENTS_FILE = "life/events.jsonl"

# Every token of the default text repeats the question: a long one must not make a token of a megabyte.
PROMPT_ECHO_CHARS = 64

Lie = Literal[
    "",
    "ready_before_go",
    "ready_without_socket",
    "garbage",
    "huge_line",
    "unknown_type",
    "loading_after_ready",
]


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The behaviour of one scripted model; the defaults are a healthy worker that answers at once.

    Life. import_s, load_s: seconds until `Imported`, and from go to `Ready`. load_lines: `Loading` messages
    over that time; load_progress false sends none. stderr: lines printed first. fail_load: the reason of a
    `Failed` at the load's end. ignore_sigterm: only SIGKILL ends it. stop_heartbeats: none once ready.
    lie: what it says wrongly on the status pipe (garbage, huge_line and unknown_type come between go and
    the load's end, and the worker then goes on as if nothing were).

    Faults in time. crash_at, hang_at: the moment; in decode it comes after fault_after_tokens tokens.
    crash_signal: a name or number; exit_code, when given, is how it dies instead. A hang leaves the process
    and its heartbeats alive, with pending rows and a progress that stands still. half_event_then_crash:
    after fault_after_tokens tokens half an event is sent, then it dies. no_end: a stream is over without the
    events that end it. fault_on: faults of a request hit only requests whose last message contains this.
    faulty_runs: faults are for the first N processes of this folder, later ones are healthy; 0 means all of
    them.

    Answers. prefill_s: seconds before the first token. tokens: how many an answer has. tokens_per_s: 0 is
    as fast as possible. events_per_write: stream events that share one write. text: a list of tokens, used
    in a cycle, or a template of one token with {model}, {prompt} and {i}. slow_headers_s: seconds before
    the answer's head. keepalive_s: seconds of silence in prefill before an empty delta is sent. status:
    answer every request with this error status. health_fails: /health answers 503. events: a worker's own
    events (`scripted_events.told`) that answers are made of instead, by the product's writers; each counts as
    a token, and max_tokens cuts none. Prefilled, Usage and Finish may be left out.

    Drain. drain_s: seconds it takes once no request runs. never_drain: it is never answered.

    Prompt cache. prompt_bytes: of memory and disk for each different prompt. cache_missing: records that a
    drain or a flush can't write. cache_off: why nothing is written. cache_says: fields of CacheSummary that
    heartbeats say instead of what is so. share_s: seconds that taking another share takes; never_share: it
    is never answered. never_flush: neither is a flush.

    Leases. never_lease: none is answered. ends_lease: each is over once it is held.
    """

    import_s: float = 0.0
    load_s: float = 0.0
    load_lines: int = 4
    load_progress: bool = True
    stderr: tuple[str, ...] = ()
    fail_load: str = ""
    ignore_sigterm: bool = False
    stop_heartbeats: bool = False
    lie: Lie = ""

    crash_at: Literal["", "import", "load", "ready", "prefill", "decode"] = ""
    crash_signal: int | str = "SIGABRT"
    exit_code: int | None = None
    hang_at: Literal["", "load", "prefill", "decode"] = ""
    half_event_then_crash: bool = False
    no_end: bool = False
    fault_after_tokens: int = 3
    fault_on: str = ""
    faulty_runs: int = 0

    prefill_s: float = 0.0
    tokens: int = 8
    tokens_per_s: float = 0.0
    events_per_write: int = 1
    text: str | tuple[str, ...] = "{model}:{prompt}:{i} "
    slow_headers_s: float = 0.0
    keepalive_s: float = 10.0
    status: int = 0
    health_fails: bool = False
    events: tuple[dict[str, Any], ...] = ()

    drain_s: float = 0.0
    never_drain: bool = False

    prompt_bytes: int = 1_000_000
    cache_missing: int = 0
    cache_off: str = ""
    cache_says: dict[str, int | float | str] = {}
    share_s: float = 0.0
    never_share: bool = False
    never_flush: bool = False
    never_lease: bool = False
    ends_lease: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.crash_signal, str) and self.crash_signal not in signal.Signals.__members__:
            raise ValueError(f"crash_signal: no signal is called {self.crash_signal!r}; use one like SIGKILL")
        if self.events_per_write < 1 or self.load_lines < 1:
            raise ValueError("events_per_write and load_lines must be at least 1")
        if not self.text:
            raise ValueError("text: an answer needs at least one token; use tokens: 0 for an empty answer")

    def needs_name(self) -> list[str]:
        """Keys in use that act before go, when only the worker's --name can tell its folder."""
        early = {
            "import_s": self.import_s > 0,
            "stderr": bool(self.stderr),
            "crash_at": self.crash_at == "import",
            "lie": self.lie == "ready_before_go",
        }
        return [key for key, used in early.items() if used]

    def healthy(self) -> Script:
        """This script without its faults; speeds and sizes stay."""
        return msgspec.structs.replace(
            self,
            fail_load="",
            ignore_sigterm=False,
            stop_heartbeats=False,
            lie="",
            crash_at="",
            hang_at="",
            half_event_then_crash=False,
            no_end=False,
            status=0,
            health_fails=False,
            never_drain=False,
            cache_missing=0,
            cache_off="",
            never_share=False,
            never_flush=False,
        )


class TokenText:
    """The text of each token of one answer: a function of model, question and position alone."""

    def __init__(self, text: str | tuple[str, ...], model: str, prompt: str) -> None:
        self._cycle = text if isinstance(text, tuple) else ()
        # The question is filled in last: braces in it are text.
        self._pieces = [
            piece.replace("{model}", model).replace("{prompt}", prompt[:PROMPT_ECHO_CHARS])
            for piece in (text.split("{i}") if isinstance(text, str) else ())
        ]

    def __call__(self, index: int) -> str:
        if self._cycle:
            return self._cycle[index % len(self._cycle)]
        return str(index).join(self._pieces)


def expected_text(
    model: str, prompt: str, tokens: int = 8, text: str | tuple[str, ...] = Script().text
) -> str:
    """What a scripted worker answers to a chat whose last message is `prompt`."""
    token = TokenText(text, model, prompt)
    return "".join(token(i) for i in range(tokens))


def read_script(folder: Path) -> Script:
    """The folder's script. Raises ValueError naming the file and what is wrong in it."""
    path = folder / SCRIPT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except (OSError, msgspec.DecodeError) as err:
        raise ValueError(f"{path}: {err}") from err


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The life events of every worker of this folder, oldest first; none yet is an empty list."""
    path = folder / EVENTS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


# A llama that is as small as the shape allows, so that a plan is nothing but what a test asks for.
_HIDDEN, _HEADS, _VOCAB, _FFN = 16, 2, 259, 32
_SPECIALS = ("<s>", "</s>", "<|user|>")


def make_scripted_model(
    parent_dir: Path, name: str, *, weights_bytes: int = 0, context: int = 2048, **script: Any
) -> Path:
    """Writes the scripted model `parent_dir/name` and returns its folder.

    weights_bytes: what the safetensors header adds up to (float32, the file is sparse and takes no disk);
    0 is the smallest, some 10 kB. context: tokens of its config. script: keys of `Script`.
    Raises ValueError for a key that `Script` doesn't have, or a value it refuses.
    """
    folder = parent_dir / name
    folder.mkdir(parents=True)
    write_script(folder, **script)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "vocab_size": _VOCAB,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer()))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    _write_weights(folder / "model.safetensors", weights_bytes)
    return folder


def write_script(folder: Path, **script: Any) -> None:
    """Gives the folder another script; workers started from now on follow it. Raises ValueError."""
    try:
        msgspec.convert(script, Script, strict=True)
    except msgspec.ValidationError as err:
        raise ValueError(f"script of {folder.name}: {err}") from err
    (folder / SCRIPT_FILE).write_text(json.dumps(script))


def _write_weights(path: Path, weights_bytes: int) -> None:
    shapes = {
        "model.embed_tokens.weight": [_VOCAB, _HIDDEN],
        "model.norm.weight": [_HIDDEN],
        "model.layers.0.input_layernorm.weight": [_HIDDEN],
        "model.layers.0.post_attention_layernorm.weight": [_HIDDEN],
        "model.layers.0.mlp.gate_proj.weight": [_FFN, _HIDDEN],
        "model.layers.0.mlp.up_proj.weight": [_FFN, _HIDDEN],
        "model.layers.0.mlp.down_proj.weight": [_HIDDEN, _FFN],
    } | {f"model.layers.0.self_attn.{p}_proj.weight": [_HIDDEN, _HIDDEN] for p in "qkvo"}
    own_bytes = sum(4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    if weights_bytes > own_bytes:
        shapes["model.ballast.weight"] = [(weights_bytes - own_bytes) // 4]
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor, shape in shapes.items():
        end = offset + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)


def _byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are the 256 bytes, written as byte-level BPE writes them."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(hidden))]
    vocab = {token: n for n, token in enumerate((*_SPECIALS, *letters))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": token, **flags} for n, token in enumerate(_SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }
