"""Names of the forms that models write their calls and their reasoning in, as settings name them. Pure.

The tables themselves are the worker's; a test compares the names.
"""

from __future__ import annotations

# A model without one.
NO_FAMILY = "none"

TOOL_FAMILY_NAMES = (
    "function_gemma",
    "gemma4",
    "glm47",
    "harmony",
    "json_tools",
    "kimi_k2",
    "kimi_k3",
    "laguna",
    "llama3",
    "longcat",
    "minicpm5",
    "minimax_m2",
    "mistral",
    "muse_spark",
    "pythonic",
    "qwen3_coder",
)
REASONING_FAMILY_NAMES = (
    "gemma4",
    "harmony",
    "kimi_k3",
    "longcat",
    "mistral",
    "seed",
    "think",
    "think_start",
    "thought",
)
