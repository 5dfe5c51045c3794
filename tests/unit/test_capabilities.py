"""What is claimed of a model: what its template, its tokens and its settings let it do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.parent.edge.capabilities import anthropic_capabilities, capabilities
from mlxpool.parent.library import LibraryModel
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.config import ModelSettings
from mlxpool.shared.prompt.families import families
from tests.tools.scripted_script import make_scripted_model

PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
THINKS = PLAIN + "{% if enable_thinking %}<think>{% endif %}</think>"
DEEP = THINKS + "{{ reasoning_effort }}"
# Nothing of these is built.
NEVER = ("vision", "audio", "embeddings", "speculation", "streamed_experts", "dsa", "mtp")


def model(
    tmp_path: Path, template: str | None = PLAIN, tokens: tuple[str, ...] = (), **own: Any
) -> LibraryModel:
    """A model with this template and these added tokens beside its bytes."""
    folder = tmp_path / "m"
    if not folder.exists():
        make_scripted_model(tmp_path, "m")
    write_template(folder, template)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    size = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": size + place, "content": token}
        for place, token in enumerate(tokens)
    ]
    file.write_text(json.dumps(tokenizer))
    return LibraryModel("m", folder, "home", ModelSettings(**own))


def write_template(folder: Path, template: str | None) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def claims(made: LibraryModel) -> dict[str, bool]:
    told: dict[str, bool] = msgspec.to_builtins(capabilities(made))
    return told


def test_a_model_that_does_not_reason_is_not_said_to(tmp_path: Path) -> None:
    made = model(tmp_path)
    assert {name for name, can in claims(made).items() if not can} == {"reasoning", *NEVER}
    theirs = anthropic_capabilities(made, capabilities(made))
    assert theirs["thinking"]["supported"] is theirs["thinking"]["types"]["enabled"]["supported"] is False
    assert theirs["effort"]["supported"] is theirs["effort"]["high"]["supported"] is False
    assert theirs["structured_outputs"] == {"supported": True}


def test_a_model_without_a_chat_template_completes_and_nothing_more(tmp_path: Path) -> None:
    made = model(tmp_path, None, ("<think>", "</think>"))
    lacks = {"chat", "messages", "responses", "tools", "reasoning", *NEVER}
    assert {name for name, can in claims(made).items() if not can} == lacks
    assert anthropic_capabilities(made, capabilities(made))["structured_outputs"] == {"supported": False}


@pytest.mark.parametrize(("template", "effort"), [(THINKS, False), (DEEP, True)])
def test_effort_is_what_a_template_that_reasons_reads(tmp_path: Path, template: str, effort: bool) -> None:
    made = model(tmp_path, template)
    assert claims(made)["reasoning"]
    theirs = anthropic_capabilities(made, capabilities(made))
    assert theirs["thinking"]["types"]["adaptive"]["supported"] is True
    assert (theirs["effort"]["supported"], theirs["effort"]["max"]["supported"]) == (effort, effort)


def test_settings_name_what_a_folder_does_not_show_and_switch_off_what_it_does(tmp_path: Path) -> None:
    assert claims(model(tmp_path, reasoning_parser="think"))["reasoning"]
    assert not claims(model(tmp_path, THINKS, reasoning_parser="none"))["reasoning"]
    assert not claims(model(tmp_path, tool_parser="none"))["tools"]
    assert not claims(model(tmp_path, batch=1))["batch"]


def test_what_was_told_is_told_anew_when_the_files_change(tmp_path: Path) -> None:
    made = model(tmp_path)
    assert not claims(made)["reasoning"]
    write_template(made.path, THINKS)
    assert claims(made)["reasoning"]


@pytest.mark.parametrize(
    "broken", ["", "[", "[]", '{"chat_template": 5}', '{"chat_template": [{"name": 1}]}']
)
def test_of_files_that_cannot_be_read_nothing_is_claimed(tmp_path: Path, broken: str) -> None:
    made = model(tmp_path)
    (made.path / "tokenizer_config.json").write_text(broken)
    assert not claims(made)["chat"]
    assert not claims(LibraryModel("n", tmp_path / "nowhere", "home", ModelSettings()))["chat"]


@pytest.mark.parametrize(
    "broken", ["", '{"added_tokens": [', '{"added_tokens": [1]}', '{"added_tokens": 1}', "\x00"]
)
def test_a_vocabulary_that_cannot_be_read_shows_nothing(tmp_path: Path, broken: str) -> None:
    made = model(tmp_path)
    (made.path / "tokenizer.json").write_text(broken)
    assert (claims(made)["chat"], claims(made)["reasoning"]) == (True, False)


@pytest.mark.parametrize("template", [PLAIN, THINKS, DEEP, "[THINK]", "<|channel|>analysis"])
@pytest.mark.parametrize(
    "tokens", [(), ("<think>", "</think>"), ("<think>",), ("<|start|>", "<|channel|>", "<|message|>")]
)
def test_reasoning_is_what_the_whole_vocabulary_would_say(
    tmp_path: Path, template: str, tokens: tuple[str, ...]
) -> None:
    made = model(tmp_path, template, tokens)
    known = families(ChatTokenizer.open(made.path))
    assert claims(made)["reasoning"] == (known.reasoning is not None)


def test_the_starter_chats_and_does_not_reason(starter_folder: Path) -> None:
    told = claims(LibraryModel("s", starter_folder, "home", ModelSettings()))
    assert (told["chat"], told["tools"], told["reasoning"]) == (True, True, False)
