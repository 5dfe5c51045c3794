"""A prompt that ends in the beginning of the answer: the client's text, whatever the template does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.api.anthropic import parse, parse_count
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import ApiError
from mlxpool.shared.prompt.families import families
from mlxpool.shared.prompt.rendering import Rendered, Renderer
from tests.tools import tiny_models

PLAIN = tiny_models.CHAT_TEMPLATE
# As Qwen 3's: the last answer has a block of reasoning, empty or not, and content is trimmed.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# As Gemma's: strict turns, no system, other names.
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('in turns') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DROPPING = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
USER = {"role": "user", "content": "hi"}


def rendered(folder: Path, template: str, *messages: object, **fields: Any) -> Rendered:
    tiny_models.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = ChatTokenizer.open(folder)
    asked = parse(json.dumps({"messages": messages, "max_tokens": 9, **fields}).encode())
    return Renderer(tokenizer, families(tokenizer)).render(asked.request)


def begun(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("text", ["The best is (", "ends in blanks \n ", "{", "<|im_end|>?", "x" * 5000])
def test_the_prompt_ends_in_the_text_and_nothing_else(tmp_path: Path, text: str) -> None:
    shown = rendered(tmp_path, PLAIN, USER, begun(text))
    assert shown.text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}"
    assert shown.continues


def test_a_block_of_reasoning_comes_before_the_text_and_is_closed(tmp_path: Path) -> None:
    shown = rendered(tmp_path, THINKING, USER, begun("Yes, "))
    assert shown.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nYes, ")
    assert not shown.opened
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    with_thoughts = rendered(tmp_path, THINKING, USER, begun([thought, {"type": "text", "text": "Yes"}]))
    assert with_thoughts.text.endswith("<think>\nHm.\n</think>\n\nYes")


def test_a_text_that_ends_in_the_mark_of_reasoning_opens_no_block(tmp_path: Path) -> None:
    shown = rendered(tmp_path, THINKING, USER, begun("Write <think>"))
    assert shown.text.endswith("Write <think>")
    assert not shown.opened


def test_a_template_that_wants_turns_is_given_them(tmp_path: Path) -> None:
    assert rendered(tmp_path, STRICT, USER, USER, begun("Yes ")).text == "[user]hi\n\nhi[end][assistant]Yes "


def test_a_template_that_does_not_write_the_text_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(tmp_path, DROPPING, USER, begun("Yes"))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "end with a user's message" in caught.value.message


def test_a_conversation_that_ends_with_the_user_has_its_primer(tmp_path: Path) -> None:
    shown = rendered(tmp_path, THINKING, USER, begun("Yes"), USER)
    assert shown.text.endswith("<|im_start|>assistant\n<think>\n")
    assert shown.opened
    assert not shown.continues


def test_a_count_sees_the_same_prompt(tmp_path: Path) -> None:
    shown = rendered(tmp_path, PLAIN, USER, begun("Yes, "))
    tokenizer = ChatTokenizer.open(tmp_path)
    counted = parse_count(json.dumps({"messages": [USER, begun("Yes, ")]}).encode())
    assert Renderer(tokenizer, families(tokenizer)).render(counted.request).text == shown.text
