"""Which families a model's answers are written in, told from its chat template and its vocabulary.

The template is what the model was trained on and decides first; a vocabulary decides where the template is
silent. A model's configuration may name another family. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.shared.prompt.reasoning_families import HARMONY, HARMONY_OPENER, REASONING_FAMILIES

_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>")
_XTML_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

# Family, and what a template of it holds; the first whose strings are all there. The more particular first:
# several families write <tool_call>, and what they write into it differs.
_TEMPLATES = (
    (HARMONY, ("<|channel|>", "<|message|>", "functions.")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("json_tools", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters": dictionary of argument name and its value',)),
)

# Family, and tokens that no other family has all of.
_VOCABULARIES = (
    (HARMONY, (*_HARMONY_TOKENS, "<|call|>")),
    ("kimi_k3", _XTML_TOKENS),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>", "<end_function_call>")),
    ("longcat", ("<longcat_tool_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    ("glm47", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("json_tools", ("<tool_call>", "</tool_call>")),
    ("llama3", ("<|python_tag|>", "<|eom_id|>")),
)


def choose_tools(template_source: str | None, has_token: Callable[[str], bool]) -> str | None:
    """The tool family of a model; None when nothing shows that it calls tools. has_token: whether a text is
    one token of the vocabulary."""
    source = template_source or ""
    for name, strings in _TEMPLATES:
        if all(string in source for string in strings):
            return name
    return next((name for name, tokens in _VOCABULARIES if all(map(has_token, tokens))), None)


def choose_reasoning(template_source: str | None, has_token: Callable[[str], bool]) -> str | None:
    """The reasoning family of a model; None when it has none."""
    source = template_source or ""
    if all(map(has_token, _HARMONY_TOKENS)) or "<|channel|>analysis" in source:
        return HARMONY
    if all(map(has_token, _XTML_TOKENS)):
        return "kimi_k3"
    # A model may know the tokens of a family that its own template does not use.
    for family in REASONING_FAMILIES.values():
        if family.tags[0][1] in source:
            return family.name
    for family in REASONING_FAMILIES.values():
        if family.tokens and all(map(has_token, family.tokens)):
            return family.name
    return None


def opens_block(reasoning_family: str, prompt_tail: str) -> bool:
    """Whether a rendered prompt, which ends in `prompt_tail`, has opened the block and left it open, so that
    the answer begins inside."""
    if reasoning_family == HARMONY:
        opener = HARMONY_OPENER
    else:
        opener = REASONING_FAMILIES[reasoning_family].tags[0][0]
    # Behind an opener of its own a template writes blanks alone; anything more belongs to a message.
    return prompt_tail.rstrip().endswith(opener)
