"""Chat templates and tokenizers of model folders, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxpool.shared import template
from mlxpool.shared.chat import ChatTokenizer, ChatTokenizerError
from mlxpool.shared.errors import ApiError
from mlxpool.shared.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<é & 'x'>"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(MESSAGES, **variables)


def test_templates_render_as_hugging_face_renders_them() -> None:
    # trim_blocks and lstrip_blocks: a block's own line leaves nothing behind.
    assert render(
        "{% if true %}\n  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n{% endif %}\n"
    ) == ("user\n")
    assert render("{{ messages[0].content | tojson }}") == "\"<é & 'x'>\""
    assert (
        render("{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  1,\n  2\n ]\n}'
    )
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ missing is defined }}{{ given }}", given=1) == "False1"


def refusal(source: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        render(source)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "invalid_request",
        "messages",
    )
    return caught.value


def test_a_templates_own_refusal_reaches_the_client() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}").message


def test_a_template_that_fails_is_a_refusal_not_a_traceback() -> None:
    assert "no element 3" in refusal("{{ messages[3].content.x }}").message


def test_a_template_may_nest_its_macros_and_is_stopped_when_that_has_no_end() -> None:
    nest = "{% macro m(n) %}{% if n %}({{ m(n - 1) }}){% endif %}{% endmacro %}"
    assert ChatTemplate(nest + "{{ m(50) }}").render([]) == "(" * 50 + ")" * 50
    assert ChatTemplate(nest + "{% for i in range(100) %}{{ m(3) }}{% endfor %}").render([]) == "((()))" * 100
    assert "levels deep" in refusal("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").message


def test_no_global_runs_out_of_sight_of_the_deadline() -> None:
    assert "'lipsum' is undefined" in refusal("{{ lipsum(n=1000000000) }}").message


def test_the_sandbox_holds() -> None:
    assert "unsafe" in refusal("{{ ''.__class__.__mro__ }}").message
    assert "unsafe" in refusal("{{ messages.append(1) }}").message


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for a in range(9999) %}{% set n.x = n.x ~ 'a' %}"
        "{% for b in n.x %}{% endfor %}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_TIME_LIMIT_S", 0.2)
    assert "it ran longer than" in refusal(source).message


def test_a_template_cant_make_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "RENDER_SIZE_LIMIT_CHARS", 1000)
    assert "more than 1000 characters" in refusal("{% for i in range(500) %}xyz{{ i }}{% endfor %}").message
    assert "repeats" in refusal("{{ 'x' * 1000000000 }}").message
    assert "power" in refusal("{{ 9 ** 999999 }}").message


def test_a_template_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("ok\n{% for %}")


def write_folder(folder: Path, config: dict[str, Any], special: tuple[str, ...] = ("<s>", "</s>")) -> Path:
    """A byte-level tokenizer (no merges) with these special tokens, from id 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}cfg"}


def test_the_folders_own_template_file_comes_first(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIG)
    assert ChatTokenizer.open(tmp_path).render(MESSAGES) == "<s>cfg"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTokenizer.open(tmp_path).render(MESSAGES) == "file </s>"


def test_named_templates_and_the_older_file_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_folder(tmp_path, {**CONFIG, "chat_template": named})
    assert ChatTokenizer.open(tmp_path).render(MESSAGES) == "d"
    write_folder(tmp_path, {"bos_token": "<s>"})
    assert not ChatTokenizer.open(tmp_path).has_template
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
    assert ChatTokenizer.open(tmp_path).render(MESSAGES) == "older"


def test_a_doubled_bos_is_trimmed_to_one(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(write_folder(tmp_path, CONFIG))
    assert tokenizer.encode("<s>") == [256]
    assert tokenizer.encode("<s><s></s>") == [256, 257]


def test_a_files_truncation_and_padding_are_not_ours(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIG)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = ChatTokenizer.open(tmp_path)
    assert [len(opened.encode(text)) for text in ("a", "a" * 20)] == [1, 20]


def test_every_end_of_a_turn_is_an_eos(tmp_path: Path) -> None:
    special = ("<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<extra>")
    write_folder(tmp_path, CONFIG, special)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8], "text_config": {"eos_token_id": 9}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 10}')
    assert ChatTokenizer.open(tmp_path).eos_ids == {7, 8, 9, 10, 257, 258, 259}


def test_harmonys_end_of_a_message_ends_no_turn(tmp_path: Path) -> None:
    # gpt-oss closes its reasoning with <|end|>, and answers after it.
    write_folder(tmp_path, {}, ("<|channel|>", "<|end|>", "<|return|>", "<|call|>"))
    assert ChatTokenizer.open(tmp_path).eos_ids == {258, 259}
    write_folder(tmp_path, {}, ("<|user|>", "<|end|>"))
    assert ChatTokenizer.open(tmp_path).eos_ids == {257}


def test_token_bytes_are_the_tokens_text_and_nothing_for_special_ones(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.open(write_folder(tmp_path, CONFIG))
    assert tokenizer.is_byte_level
    for text in ("é€😀 \n\t\x00", "<tool é>"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(256) == b""
    assert tokenizer.token_bytes(99_999) == b""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json can't be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json can't be read"),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
        ("chat_template.jinja", "{% if %}", "can't be compiled"),
    ],
)
def test_a_folder_that_cant_be_used_names_the_file(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    write_folder(tmp_path, CONFIG)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ChatTokenizerError, match=says):
        ChatTokenizer.open(tmp_path)


def test_a_template_says_which_names_it_reads_from_outside() -> None:
    template = ChatTemplate(
        "{% set x = 1 %}{% for m in messages %}{{ m.role }}"
        "{% if enable_thinking is defined %}{{ x }}{% endif %}"
        "{% endfor %}{{ tools | tojson if tools }}"
    )
    assert template.variables == {"messages", "enable_thinking", "tools"}
