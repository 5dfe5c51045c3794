"""Families are told from template and vocabulary; a prompt that opened the block is seen."""

from __future__ import annotations

import pytest

from mlxpool.shared.prompt.choose import choose_reasoning, choose_tools, opens_block
from mlxpool.shared.prompt.reasoning_families import REASONING_FAMILIES
from mlxpool.worker.text.tools.families import TOOL_FAMILY_NAMES


def vocabulary(*tokens: str) -> object:
    return set(tokens).__contains__


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{%- for tool in tools %}<tool_call>\n{{ tool_call.name }}</tool_call>", "json_tools"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>k</arg_key><arg_value>", "glm47"),
        ('<function name="f"><param name="p">', "minicpm5"),
        ("<minimax:tool_call><invoke name=", "minimax_m2"),
        ("<|tool_call>call:{{ name }}<tool_call|>", "gemma4"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][ARGS]", "mistral"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>commentary to=functions.x<|message|>", "harmony"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ("List of tools: <|tool_list_start|>", "pythonic"),
        ("{{ message.content }}", None),
        (None, None),
    ],
)
def test_a_template_names_its_tool_family(template: str | None, family: str | None) -> None:
    assert choose_tools(template, vocabulary()) == family  # type: ignore[arg-type]
    assert family is None or family in TOOL_FAMILY_NAMES


@pytest.mark.parametrize(
    ("tokens", "family"),
    [
        (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3"),
        (("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
        (("<tool_call>", "</tool_call>"), "json_tools"),
        (("<|im_start|>",), None),
    ],
)
def test_a_vocabulary_decides_where_the_template_is_silent(
    tokens: tuple[str, ...], family: str | None
) -> None:
    assert choose_tools("{{ messages }}", vocabulary(*tokens)) == family  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "tokens", "family"),
    [
        ("{{ content.split('</think>')[-1] }}", (), "think"),
        ("", ("<think>", "</think>"), "think"),
        ("{{ '<think>' }}</think>", ("<longcat_think>", "</longcat_think>"), "think"),
        ("", ("<|channel>", "<channel|>"), "gemma4"),
        ("", ("<|start|>", "<|channel|>", "<|message|>"), "harmony"),
        ("", ("[THINK]", "[/THINK]"), "mistral"),
        ("", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3"),
        ("{{ content }}", ("<s>",), None),
    ],
)
def test_a_models_reasoning_family(template: str, tokens: tuple[str, ...], family: str | None) -> None:
    assert choose_reasoning(template, vocabulary(*tokens)) == family  # type: ignore[arg-type]
    assert family is None or family == "harmony" or family in REASONING_FAMILIES


@pytest.mark.parametrize(
    ("family", "prompt", "inside"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("think", "<|im_start|>assistant\n", False),
        ("think", "user\nwhat is <think>?\nassistant\n", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("harmony", "<|start|>assistant", False),
        ("kimi_k3", "<|open|>think<|sep|>", True),
    ],
)
def test_a_prompt_that_has_opened_the_block(family: str, prompt: str, inside: bool) -> None:
    assert opens_block(family, prompt) is inside
