"""Configurations: every fault at once, in words that say what would work; and the shape of it all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from mlxpool.parent.cli import COMMANDS
from mlxpool.parent.jobs.kinds import KINDS
from mlxpool.parent.jobs.kinds.kind import Fault, Kind, source
from mlxpool.parent.jobs.reading import MAX_CONFIG_BYTES, MAX_FAULTS, read_config, refusal
from mlxpool.parent.jobs.shape import describe, shape_of
from mlxpool.parent.jobs.store import Job


class Inner(msgspec.Struct, frozen=True):
    """A part."""

    depth: Annotated[int, Meta(ge=1)] = 1


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that a field can be."""

    model: Annotated[str, Meta(description="The model."), source("model")]
    bits: Annotated[Literal[2, 3, 4], Meta(description="Bits.")] = 4
    mode: Annotated[Literal["a", "b"] | None, Meta(description="Mode.")] = None
    share: Annotated[Annotated[float, Meta(ge=0, lt=1)] | None, Meta(description="A share.")] = None
    steps: Annotated[int, Meta(description="Steps.", ge=1, le=9)] = 5
    file: Annotated[Annotated[str, Meta(max_length=9)] | None, Meta(description="F."), source("file")] = None
    words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(description="Words.")] = []
    fast: Annotated[bool, Meta(description="Fast.")] = False
    inner: Inner = msgspec.field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.model == "m" and self.bits == 3:
            raise ValueError("bits: 3 are not for m")
        if self.model == "m" and self.bits == 2:
            raise ValueError("it can't be")


def faults(raw: dict[str, Any]) -> dict[str, str]:
    read = read_config(Config, raw)
    assert isinstance(read, list)
    return {fault.field: fault.message for fault in read}


def test_every_fault_is_named_with_what_would_work() -> None:
    raw = {
        "modell": "m", "bits": 7, "mode": "c", "share": 1, "steps": True, "file": "much too long",
        "words": ["x", ""], "fast": "yes", "inner": {"depth": 0},
    }  # fmt: skip
    assert faults(raw) == {
        "modell": "unknown, did you mean model?",
        "model": "missing",
        "bits": "7 is not one of 2, 3, 4",
        "mode": '"c" is not one of a, b, or null',
        "share": "1 is not a number, at least 0 and below 1, or null",
        "steps": "true is not a whole number from 1 to 9",
        "file": '"much too long" is not a text of 0 to 9 characters, or null',
        "words": '["x",""] is not a list (Expected `str` of length >= 1 - at `$[1]`)',
        "fast": '"yes" is not true or false',
        "inner": '{"depth":0} is not an object (Expected `int` >= 1 - at `$.depth`)',
    }


def test_a_refusal_lists_them_all_and_blames_the_first() -> None:
    said = refusal([Fault("bits", "7 is not one"), Fault("", "it can't be")])
    assert (said.status, said.code, said.param) == (400, "invalid_request", "config.bits")
    assert said.message == "config.bits: 7 is not one; config: it can't be"
    many = refusal([Fault(f"f{n}", "x" * 5000) for n in range(MAX_FAULTS + 7)])
    assert many.message.endswith("; and 7 more")
    assert len(many.message) < 25_000


def test_what_a_struct_says_of_all_its_fields_comes_when_each_is_right() -> None:
    assert faults({"model": "m", "bits": 3}) == {"bits": "3 are not for m"}
    assert faults({"model": "m", "bits": 2}) == {"": "it can't be"}
    assert faults({"model": "m", "bits": 3, "steps": 0}) == {"steps": "0 is not a whole number from 1 to 9"}


def test_texts_that_no_command_line_takes_are_refused() -> None:
    assert list(faults({"model": "a\0b"})) == ["model"]
    assert faults({"model": "x" * MAX_CONFIG_BYTES})[""].startswith("it has more than 65536 bytes")


def test_so_many_unknown_fields_are_refused_without_delay() -> None:
    raw = {f"n{number}" + "x" * 60: 1 for number in range(20_000)}
    begun = time.process_time()
    said = refusal(read_config(Config, raw)).message  # type: ignore[arg-type]
    assert said.endswith("; and 19981 more")
    # Half a minute where each is compared with all there are.
    assert time.process_time() - begun < 5


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("value", [nested(900), {"a": nested(900)}, 10**30, float("nan")])
def test_a_value_of_any_form_is_a_fault_and_no_crash(value: object) -> None:
    for field in Config.__struct_fields__[1:]:
        raw = {"model": "n", field: value}
        read = read_config(Config, raw)
        if field not in ("share", "inner"):
            assert [fault.field for fault in read] == [field]  # type: ignore[union-attr]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Config.__struct_fields__, "other"]), JSON))
def test_faults_are_found_just_where_the_struct_itself_would_refuse(raw: dict[str, Any]) -> None:
    try:
        expected: object = msgspec.convert(raw, Config)
    except msgspec.ValidationError:
        expected = None
    read = read_config(Config, raw)
    if isinstance(read, list):
        # A text that holds a zero is refused here alone.
        assert expected is None or any("code 0" in fault.message for fault in read)
        assert {fault.field for fault in read} <= {*Config.__struct_fields__, "other", ""}
    else:
        assert read == expected


def test_a_shape_says_of_each_field_what_a_form_needs() -> None:
    shape = shape_of(Config)
    assert shape["required"] == ["model"]
    properties = shape["properties"]
    assert properties["model"] == {"type": "string", "description": "The model.", "x-source": "model"}
    assert properties["bits"] == {"type": "integer", "enum": [2, 3, 4], "description": "Bits.", "default": 4}
    assert properties["mode"] == {
        "type": "string", "enum": ["a", "b"], "description": "Mode.", "default": None, "nullable": True,
    }  # fmt: skip
    assert properties["share"] == {
        "type": "number", "minimum": 0, "exclusiveMaximum": 1, "description": "A share.", "default": None,
        "nullable": True,
    }  # fmt: skip
    assert properties["inner"]["properties"] == {"depth": {"type": "integer", "minimum": 1, "default": 1}}
    assert "$ref" not in str(shape)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_has_a_shape_and_a_command_with_its_words(kind: Kind) -> None:
    shape = shape_of(kind.config)
    assert set(kind.positional) <= set(shape["properties"])
    assert shape["additionalProperties"] is False
    for values in shape["properties"].values():
        assert values["description"]
        assert values["type"] in ("string", "integer", "number", "boolean", "array")
        assert describe(values) != "a value"
    # These work without a server too, so their commands are written by hand.
    module, summary = COMMANDS[{"colibri-convert": "colibri"}.get(kind.name, kind.name)]
    if kind.name not in ("pull", "colibri-convert"):
        assert (module, summary) == ("job_kinds", kind.summary)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a command of `Config` would send for these words."""
    from click.testing import CliRunner

    from mlxpool.parent.cli import job_kinds

    class Demo:
        name, summary, gpu, positional, config = "demo", "Do it.", False, ("model", "file"), Config

    class Server:
        def post(self, _path: str, body: dict[str, Any], _kind: type) -> Any:
            asked.update(body)
            raise click.ClickException("enough")

    asked: dict[str, Any] = {}
    monkeypatch.setattr(job_kinds.client, "need", lambda _: Server())
    command = job_kinds.make_command(Demo())  # type: ignore[arg-type]

    def send(*words: str) -> dict[str, Any]:
        asked.clear()
        said = CliRunner().invoke(command, [*words, "--detach"]).output
        return dict(asked["config"]) if asked else {"refused": said}

    return send


def test_a_command_sends_what_was_given_and_nothing_else(
    sent: Callable[..., dict[str, Any]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sent("m") == {"model": "m"}
    flags = ["--bits", "3", "--mode", "b", "--share", "0.5", "--steps", "7", "--words", "x", "--words", "y"]
    assert sent("m", "f", *flags, "--no-fast") == {
        "model": "m", "file": str(tmp_path / "f"), "bits": 3, "mode": "b", "share": 0.5, "steps": 7,
        "words": ["x", "y"], "fast": False,
    }  # fmt: skip
    assert "'5' is not one of '2', '3', '4'" in sent("m", "--bits", "5")["refused"]
    assert "1.0 is not in the range 0<=x<1" in sent("m", "--share", "1")["refused"]
    assert "nan" in sent("m", "--share", "nan")["refused"]
    assert "Missing argument" in sent()["refused"]


def test_a_command_names_data_by_its_name_or_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlxpool.parent.cli import job_kinds

    posted: list[Any] = []

    class Server:
        def post(self, _path: str, body: Any, _type: object) -> Job:
            posted.append(body["config"])
            return Job("job_0", "evaluate", {}, "queued", 0.0, "", None, None, 0.0, None, None)

    monkeypatch.setattr(job_kinds.client, "need", lambda _: Server())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").touch()
    evaluate = next(kind for kind in KINDS if kind.name == "evaluate")
    for data in ("songs", "here.txt", "a/b.jsonl"):
        arguments = ["m", data, "--detach"]
        job_kinds.make_command(evaluate).main(arguments, standalone_mode=False)
    told = [config["file"] for config in posted]
    assert told == ["songs", str(tmp_path / "here.txt"), str(tmp_path / "a" / "b.jsonl")]


def test_a_choice_of_null_among_others_is_one_that_may_be_null() -> None:
    class Tone(msgspec.Struct, frozen=True):
        tone: Literal["high", "low", None] = None

    assert shape_of(Tone)["properties"]["tone"] == {
        "type": "string", "enum": ["high", "low"], "nullable": True, "default": None,
    }  # fmt: skip
