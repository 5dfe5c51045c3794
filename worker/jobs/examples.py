"""Lines of training data as ids, each with how many of them are its prompt: the model's own template."""

from __future__ import annotations

from mlxpool.shared.chat import ChatTokenizer, ChatTokenizerError
from mlxpool.shared.errors import ApiError
from mlxpool.shared.training_lines import Example
from mlxpool.worker.jobs.process import JobError

# Ids of a line, and where those begin that are learnt or predicted.
Tokens = tuple[list[int], int]


def tokens_of(tokenizer: ChatTokenizer, example: Example, *, mask_prompt: bool) -> Tokens:
    """A conversation as the template renders it, a plain text with its end. mask_prompt: the last answer
    alone counts, where a conversation ends with one. Raises JobError."""
    if example.messages is None:
        ids = tokenizer.encode(example.text, add_special_tokens=True)
        if tokenizer.eos_ids and ids[-1:] and ids[-1] not in tokenizer.eos_ids:
            ids = [*ids, min(tokenizer.eos_ids)]
        return ids, 0
    try:
        variables = {} if example.tools is None else {"tools": example.tools}
        text = tokenizer.render(example.messages, add_generation_prompt=False, **variables)
        ids = tokenizer.encode(text)
        is_answered = len(example.messages) > 1 and example.messages[-1]["role"] == "assistant"
        if not mask_prompt or not is_answered:
            return ids, 0
        prompt = tokenizer.render(example.messages[:-1], add_generation_prompt=True, **variables)
    except (ApiError, ChatTokenizerError) as problem:
        raise JobError(f"the model's template can't render a line of the data: {problem}") from None
    prompt_ids = tokenizer.encode(prompt)
    shared = next(
        (at for at, (one, other) in enumerate(zip(ids, prompt_ids, strict=False)) if one != other),
        min(len(ids), len(prompt_ids)),
    )
    # A template may close a thought in an answer that the prompt leaves open: what differs is the answer's.
    return ids, shared
