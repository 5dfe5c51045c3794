"""Writes the reference pages that are made from the code: configuration.md, cli.md, fields.md, and the tables
of jobs.md.

`make docs` runs it; a test compares its output with the files, so a page can't fall behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import msgspec

from mlxpool.parent.cli import COMMANDS, cli
from mlxpool.parent.jobs.kinds import KINDS
from mlxpool.parent.jobs.kinds.kind import Kind
from mlxpool.parent.jobs.shape import describe, shape_of
from mlxpool.shared.api import (
    anthropic_fields,
    chat_fields,
    completion_fields,
    read,
    response_fields,
)
from mlxpool.shared.api.structure import CHOICES_LIMIT
from mlxpool.shared.api.table import Field
from mlxpool.shared.api.template_kwargs import RESERVED
from mlxpool.shared.api.tools import TOOLS_LIMIT
from mlxpool.shared.config import SECTIONS, ModelSettings, keys_of, seconds_text
from mlxpool.shared.config_values import SIZE, Key
from mlxpool.shared.units import size_text

DOCS = Path(__file__).parent
_MADE = "<!-- made by `make docs`; change the code it is made from -->"
_KINDS_MARK = "<!-- from here on made by `make docs`; change the code it is made from -->"

_CONFIGURATION_HEAD = """# Configuration

{made}

Settings come from four places, later ones win: the defaults below, a TOML file, environment variables,
flags of `mlxpool up`. `mlxpool config` shows what is in effect and where each value comes from;
`mlxpool config --schema` prints the file's JSON schema.

- The file is `config.toml` in the home folder (`MLXPOOL_HOME`, else `~/.mlxpool`), or what `--config` names.
- A variable is named `MLXPOOL_<SECTION>_<KEY>`, like `MLXPOOL_POOL_IDLE_TTL=5m`; lists are separated by
  commas. `[aliases]` and `[models]` have none.
- A size is bytes or has a unit (`48GB`, `32GiB`). A duration is seconds or has a unit (`500ms`, `90s`,
  `15m`, `1h`, `1d`).
- An unknown section, key or variable is an error, as is one that belongs to a later version. The exit code
  is then 2, with one line that names the key, its value and what is allowed.

```toml
[server]
port = 8420

[pool]
memory_budget = "48GB"
idle_ttl = "15m"

[aliases]
"gpt-*" = "smollm2-135m"       # * stands for any text; the longest matching pattern wins

[defaults]
model = "smollm2-135m"         # serves requests without a model

[models."smollm2-135m"]
pin = true
context = 4096
```
"""

_ALIASES = """## [aliases]

Each key is a name or a pattern with `*`, each value the name of a model. A request's `model` is looked up
as a model's exact name, then as an exact alias, then as the pattern with the most literal characters.
Anything else is a 404 that names what is near. An alias never leads to another alias.
"""

_CLI_HEAD = """# Command line

{made}

Every command finds its server by the home folder: `--home`, else `MLXPOOL_HOME`, else `~/.mlxpool`.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | the command could not do it; one line on stderr says why |
| 2 | bad usage or bad settings; one line on stderr names what and what would work |
| 130 | interrupted |
"""


_FIELDS_HEAD = """# Fields of a request

{made}

Every field of a protocol is in one of its three tables below; the server checks requests against the same
tables. Nothing is dropped silently: an unknown field, a refused one, a wrong type or value and fields that
contradict each other are a 400 that names the field (`param` in OpenAI's envelopes) and says its value and
what would work. `null` is as if the field were not there. Where no default is given, nothing happens without
the field. A body may be nested {nesting} levels deep.

- [`POST /v1/chat/completions`](#chat)
- [`POST /v1/completions`](#completions)
- [`POST /v1/messages`](#messages) and its count of tokens
- [`POST /v1/responses`](#responses)
"""

_HONOURED = """### Honoured

| field | values | default | meaning |
| --- | --- | --- | --- |
"""

_ACCEPTED = """### Accepted without effect

They can't change the text of a server on this machine.

| field | values | why |
| --- | --- | --- |
"""

_REFUSED = """### Refused

With a value that asks for nothing they pass; clients send those all the time.

| field | asks for nothing | why, and what works |
| --- | --- | --- |
"""

_ADVICE = """A field that others call by another name is refused with the name to send: {names}.
"""

_SAME = """As in chat: {names}.
"""

_CHAT = """## Chat

`POST /v1/chat/completions`
"""

_COMPLETIONS = """## Completions

`POST /v1/completions`: a prompt goes to the model as it is, without its chat template, and what the model
writes is all text: no reasoning or call is looked for. A word's space at the answer's beginning is kept.
"""

_COMPLETIONS_NOTES = """### Prompts and answers

- A prompt of text gets the special tokens that the tokenizer adds by itself; one of ids is taken as it is,
  and an id that the model has not is refused by its place, as `prompt[2]` or `prompt[1][2]`.
- Choices are numbered prompt by prompt: with `n` 2 the second prompt's are 2 and 3. `usage` counts each
  prompt once.
- `logprobs` of an answer are four lists: `tokens`, `token_logprobs`, `top_logprobs` (the sampled token is
  always among them) and `text_offset`, in characters from the answer's beginning, over the whole of a
  stream. A token that is no whole character is spelled `bytes:\\xf0\\x9f`.
- A form that can't be enforced leaves the text as it is and is told in the `Warning` header; with `strict:
  true` it is a 400.
"""

_MESSAGES_OF_ANTHROPIC = """## Messages

`POST /v1/messages`, and `POST /v1/messages/count_tokens`, which takes the same fields and needs `messages`
alone. The headers `anthropic-version` and `anthropic-beta` are ignored: what a beta changes is asked for in
its field.
"""

_MESSAGES_NOTES = """### Blocks

| role | blocks | |
| --- | --- | --- |
| `user` | `text`, `tool_result` | shown to the model in this order, each result as a message of its own |
| `assistant` | `text`, `thinking`, `tool_use` | one message; `signature` is ignored |
| `system` | `text` | stays where it is |

- Texts beside each other in a user's message, a result or `system` are put together with a line break
  between them, an assistant's with nothing. A result with `is_error` begins with `Error: `; one may also
  hold `tool_reference`.
- `image`, `document`, `search_result` and `container_upload` are refused: this model reads text only.
- `redacted_thinking` and the calls and results of hosted tools (`server_tool_use` and its like) are left
  out, and the `Warning` header says so. `cache_control` may stand anywhere; `citations` that are off may
  too.
- Where the last message is the assistant's, the answer goes on from its text, exactly: the prompt ends
  there. It goes with neither `thinking` nor a form of the answer. A model whose template does not write
  that text as it is refuses. A count takes a finished turn too.
- Ids of calls are letters, digits, `_` and `-` here, whatever the model writes; the model is shown its own
  again.

### Tools of messages

A tool has `name`, `input_schema`, and where wanted `description`, `strict`, `type: "custom"`;
`cache_control`, `eager_input_streaming`, `defer_loading`, `allowed_callers` and `input_examples` are
accepted without effect. Tools that Anthropic's servers run (`web_search_…`, `web_fetch_…`,
`code_execution_…`, `tool_search_tool_…`, `mcp_toolset`, `memory_…`, `advisor_…`) are left out, and the
`Warning` header says so. Those that a client runs by a schema of Anthropic's (`bash_…`, `text_editor_…`,
`computer_…`) are refused: declare them as `custom`.

### Answers

Blocks come in the order in which the model said them; text of blanks alone makes none. A block of
`thinking` ends with a signature that says nothing. `stop_reason` is `end_turn`, `max_tokens`,
`stop_sequence` or `tool_use`. In `usage`, `input_tokens`, `cache_read_input_tokens` and
`cache_creation_input_tokens` (always 0) make up the prompt. The input of a call that `max_tokens` cut is
`{{}}` in a whole message.
"""

_RESPONSES = """## Responses

`POST /v1/responses`
"""

_RESPONSES_NOTES = """### Items of the input

| `type` | becomes |
| --- | --- |
| `message`, or none | a message of a `user`, `assistant`, `system` or `developer`: text, or text parts |
| `reasoning` | what the assistant thought: `content`, else `encrypted_content`, else `summary` |
| `function_call`, `custom_tool_call` | a call that the assistant made |
| `function_call_output`, `custom_tool_call_output` | a call's result: text or a list of text parts |
| `compaction` | a user's message with the summary that `POST /v1/responses/compact` sealed in it |
| `additional_tools` | more tools, as if they stood in `tools` |
| `item_reference` | the item of a stored response |

- Reasoning, messages and calls of the assistant that follow each other are one turn. `instructions` and the
  `system` and `developer` messages right at the beginning are one system message.
- Reasoning that another server sealed can't be read, and calls of hosted tools say nothing here
  (`web_search_call`, `mcp_call`, `local_shell_call` and their like): they are left out, and the `Warning`
  header and the response's `warnings` say which. A `compaction` that another server made is refused.
- `input_image`, `input_file` and `input_audio` are refused: this model reads text only. So is an item of any
  other type, by its index.

### Tools of responses

- `function`: `strict` is false where it is not given.
- `custom`: the model is shown a function of one string and its call comes back as `custom_tool_call` with
  that text. A grammar in `format` is told to the model in words and not enforced.
- `namespace`: the model knows each tool as `namespace__name`; a call comes back with both.
- Any other type is left out, and `warnings` says so.

### Answers of responses

Each thing the model says is an item: `reasoning`, `message`, `function_call`, `custom_tool_call`. What is
thought is the item's `content`, or its `summary` where `reasoning.summary` asks for one: all of it, not a
shorter text. `status` is `completed`, `incomplete` (`max_output_tokens`), `failed` or `cancelled`; the stream
of a cancelled response ends with `response.incomplete`. `temperature`, `top_p` and the penalties are what
applied; a stream that was opened before a worker had the request says null of those at first. `error.code` is
one that the protocol's clients know, `error.type` is this server's own code.
"""

_THINKING = """### The budget of thinking

`thinking_budget` (in messages `thinking.budget_tokens`) counts the tokens inside the model's block of
reasoning. When they are spent the block is closed as the model's template closes it, up to four tokens
later where a character is not complete, and the answer follows. A form of the answer goes with it. A model
without a block of reasoning spends nothing.
"""

_MESSAGES = """### Messages of chat

| role | fields | |
| --- | --- | --- |
| `system`, `developer` | `content` | one role under two names, anywhere in the list |
| `user` | `content` | |
| `assistant` | `content`, `tool_calls`, `reasoning` | `content` may be null beside one of the others |
| `tool` | `content`, `tool_call_id` | the call may be cut away from the history |

- `content` is a string, or a list of `{{"type": "text", "text": "…"}}`, which are put together with nothing
  between them. A part of another type is refused: this model reads text only.
- `tool_calls` are as the server gave them. `arguments` is the JSON text of an object, or the object; text
  that holds no object is shown to the model as it is, or as the one argument `_` where its template goes
  through arguments.
- `reasoning` may be called `reasoning_content`; both together must be equal.
- `name` goes to the template. A `tool` message without one gets that of the function it answers.
- `refusal`, `annotations`, `audio` and `function_call`, which clients send back from answers, pass where they
  say nothing. `cache_control` on a message or a part is accepted without effect: prefixes are found by their
  tokens.
- A conversation is shown to the model as it stands. Where its template refuses that, neighbouring messages of
  one user or assistant are put together, and a later system message is a user's; a system message at the head
  that the template doesn't take is a 400. This goes for every protocol.
- A header at the very head of the first system text that changes with each request (billing, token counts) is
  left out, because it would make every prefix new.
"""

_TOOLS = """### Tools

`tools` holds at most {tools} of `{{"type": "function", "function": {{"name", "description", "parameters",
"strict"}}}}`. A name is 1 to 128 letters, digits or `_ . : -`, once in the list. `parameters` is the JSON
schema of an object; without it the function takes no arguments. `tool_choice` `"required"` and one function
need declared `tools`.
"""

_FORMS = """### The form of an answer

The first of these that is there decides; of the others the types are checked.

1. `guided_grammar`
2. `response_format` of type `json_schema`, with `{{"name", "description", "schema", "strict"}}` in
   `json_schema`. The schema, with the rest, may also lie in `response_format` itself. A `schema` beside type
   `json_object` means the same.
3. `response_format` of type `json_object`
4. `structured_outputs`: one of `json` (a schema, also as JSON text), `regex`, `choice`, `grammar`,
   `json_object: true`
5. `guided_json`
6. `guided_regex`
7. `guided_choice`, at most {choices} different strings
"""

_TEMPLATE = """### Variables of the template

`chat_template_kwargs` may hold any variable that the model's chat template reads, but not what the server
itself hands to it: {names}.
"""


def configuration() -> str:
    """docs/configuration.md."""
    parts = [_CONFIGURATION_HEAD.format(made=_MADE)]
    for name, section in SECTIONS.items():
        parts.append(f"## [{name}]\n\n{_table(section, f'MLXPOOL_{name.upper()}_')}")
    parts.insert(-1, _ALIASES)
    parts.append(f'## [models."name"]\n\n{_table(ModelSettings, None)}')
    return "\n".join(parts)


def _table(section: type[msgspec.Struct], prefix: str | None) -> str:
    """One row per key: what is allowed, the default, and why the default is what it is."""
    lines = ["| key | default | allowed | why |", "| --- | --- | --- | --- |"]
    empty = section()
    for name, key in keys_of(section).items():
        default = getattr(empty, name)
        variable = f"<br>`{prefix}{name.upper()}`" if prefix else ""
        lines.append(f"| `{name}`{variable} | {_default(key, default)} | {key.kind.allowed} | {key.why} |")
    return "\n".join(lines) + "\n"


def _default(key: Key, value: object) -> str:
    if key.kind is SIZE and isinstance(value, int):
        return f'`"{size_text(value)}"`'
    if value is None:
        return "unset"
    if value == ():
        return "`[]`"
    if isinstance(value, float):
        is_number = key.kind.schema["type"] == "number"
        return f"`{value:g}`" if is_number else f'`"{seconds_text(value)}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def command_line() -> str:
    """docs/cli.md."""
    parts = [_CLI_HEAD.format(made=_MADE)]
    context = click.Context(cli, info_name="mlxpool")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts.append("\n".join(_command(context, name, command)))
        if isinstance(command, click.Group):
            own = click.Context(command, info_name=name, parent=context)
            parts += ["\n".join(_command(own, *member)) for member in command.commands.items()]
    return "\n".join(parts)


def _command(context: click.Context, name: str, command: click.Command) -> Iterator[str]:
    own = click.Context(command, info_name=name, parent=context)
    usage = " ".join(command.collect_usage_pieces(own))
    yield f"## {own.command_path}\n\n`{own.command_path} {usage}`\n"
    yield " ".join((command.help or "").split()) + "\n"
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        yield "| option | what |\n| --- | --- |"
    for option in options:
        names = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
        shown = f" (default {option.default})" if option.show_default else ""
        yield f"| {names} | {option.help}{shown} |"
    yield ""


def fields() -> str:
    """docs/fields.md."""
    chat = chat_fields.FIELDS
    return "\n".join([
        _FIELDS_HEAD.format(made=_MADE, nesting=read.NESTING_LIMIT_LEVELS),
        _CHAT,
        *_field_tables(chat, chat_fields.ADVICE),
        _MESSAGES,
        _TOOLS.format(tools=TOOLS_LIMIT),
        _FORMS.format(choices=CHOICES_LIMIT),
        _TEMPLATE.format(names=", ".join(f"`{name}`" for name in sorted(RESERVED))),
        _THINKING,
        _COMPLETIONS,
        *_field_tables(completion_fields.FIELDS, completion_fields.ADVICE, chat),
        _COMPLETIONS_NOTES,
        _MESSAGES_OF_ANTHROPIC,
        *_field_tables(anthropic_fields.FIELDS, anthropic_fields.ADVICE, chat),
        _MESSAGES_NOTES.format(),
        _RESPONSES,
        *_field_tables(response_fields.FIELDS, response_fields.ADVICE, chat),
        _RESPONSES_NOTES,
    ])  # fmt: skip


def _field_tables(
    table: Mapping[str, Field], advice: Mapping[str, str], told: Mapping[str, Field] | None = None
) -> Iterator[str]:
    """The three tables of a protocol, and its advice. told: a table whose rows are not repeated."""
    rows: dict[str, list[str]] = {"honoured": [], "accepted": [], "refused": []}
    same: dict[str, list[str]] = {status: [] for status in rows}
    for name, field in table.items():
        if told is not None and told.get(name) is field:
            same[field.status].append(f"`{name}`")
            continue
        cells = [f"`{name}`", field.values]
        if field.status == "honoured":
            cells.append(field.default)
        why = f"{field.why}; {field.instead}" if field.instead else field.why
        rows[field.status].append("| " + " | ".join([*cells, why]).replace("\n", " ") + " |\n")
    for status, head in (("honoured", _HONOURED), ("accepted", _ACCEPTED), ("refused", _REFUSED)):
        # A heading and what it means, then the table.
        intro = head if rows[status] else head[: head.index("| ")]
        names = [_SAME.format(names=", ".join(same[status]))] if same[status] else []
        yield "\n".join([intro.rstrip("\n") + "\n" + "".join(rows[status]), *names])
    yield _ADVICE.format(names=", ".join(f"`{name}` ({known})" for name, known in advice.items()))


def jobs() -> str:
    """docs/jobs.md: what is written there by hand, and the kinds."""
    by_hand = (DOCS / "jobs.md").read_text(encoding="utf-8").partition(_KINDS_MARK)[0]
    return by_hand + _KINDS_MARK + "\n" + "".join(map(_kind, KINDS))


def _kind(kind: Kind) -> str:
    shape = shape_of(kind.config)
    lines = [
        f"\n### {kind.name}\n\n{kind.summary}{' Needs the GPU for itself.' if kind.gpu else ''}\n",
        "| field | values | default | meaning |\n| --- | --- | --- | --- |",
    ]
    for name, values in shape["properties"].items():
        is_needed, default = name in shape["required"], values.get("default")
        told = (
            "needed" if is_needed else "" if default is None else f"`{msgspec.json.encode(default).decode()}`"
        )
        allowed = describe({**values, "nullable": False}).replace("|", "\\|")
        source = f" ({values['x-source']})" if "x-source" in values else ""
        lines.append(f"| `{name}` | {allowed}{source} | {told} | {values.get('description', '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "jobs.md").write_text(jobs(), encoding="utf-8")
    (DOCS / "fields.md").write_text(fields(), encoding="utf-8")
    (DOCS / "configuration.md").write_text(configuration(), encoding="utf-8")
    (DOCS / "cli.md").write_text(command_line(), encoding="utf-8")
