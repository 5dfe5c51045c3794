"""What computing jobs make of tiny models: quantised, fused, evaluated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model, quantize_model, save_config

from mlxpool.parent.jobs.kinds.fuse import Fuse, _result_bytes
from mlxpool.shared import checkpoint, staging
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.worker.jobs import evaluate, fuse, output, quantize
from mlxpool.worker.jobs.process import JobError, LogLines
from mlxpool.worker.jobs.scoring import windows
from tests.tools.tiny_fixture import TinyModels
from tests.unit.job_world import Home, home  # noqa: F401  # a fixture

IDS = mx.array([[66, 67, 68, 69, 70, 71, 72]])


@pytest.fixture
def m(home: Home, tiny: TinyModels) -> Home:  # noqa: F811
    home.add(tiny("llama"), "m")
    return home


def weights_of(folder: Path) -> dict[str, mx.array]:
    loaded: Any = [mx.load(str(file)) for file in sorted(folder.glob("model*.safetensors"))]
    return {name: value for part in loaded for name, value in part.items()}


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    return one.keys() == other.keys() and all(bool(mx.array_equal(one[name], other[name])) for name in one)


def add_adapter(home: Home, model: str, adapter: str = "a", rank: int = 4) -> Path:  # noqa: F811
    """A random adapter of the model's last block."""
    folder = home.root / "adapters" / adapter
    folder.mkdir(parents=True)
    loaded, _ = load_model(home.root / "models" / model)
    loaded.freeze()
    lora = {"rank": rank, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(loaded, 1, lora)
    mx.random.seed(3)
    trained = tree_flatten(loaded.trainable_parameters())
    random = {name: mx.random.normal(value.shape) * 0.2 for name, value in trained}
    mx.save_safetensors(str(folder / "adapters.safetensors"), random)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": lora}
    save_config(config, folder / "adapter_config.json")
    return folder


def test_a_quantised_model_is_whole_and_says_what_it_weighs(m: Home) -> None:
    result = m.work(quantize, "quantize", model="m", bits=4, group_size=32)
    folder = m.root / "models" / "m-4bit"
    model, config = load_model(folder)
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    size_bytes = sum(value.nbytes for value in weights_of(folder).values())
    assert (result["model"], result["path"], result["was_bytes"]) == ("m-4bit", str(folder), 369_920)
    assert result["weights_bytes"] == size_bytes == 70_400
    assert result["bits_per_weight"] == pytest.approx(size_bytes * 8 / 92_480, abs=0.001)
    assert (folder / "tokenizer.json").read_bytes() == (m.root / "models/m/tokenizer.json").read_bytes()
    assert ChatTokenizer.open(folder).has_template
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 258
    manifest = staging.read_manifest(folder)
    assert manifest is not None
    assert manifest.source == "quantize of m"
    assert manifest.files["model.safetensors"].sha256 == staging.sha256_of(folder / "model.safetensors")
    plain, _ = load_model(m.root / "models" / "m")
    assert 0 < float(mx.abs(model(IDS) - plain(IDS)).mean()) < 1.5
    assert m.hidden() == []
    assert m.told.shares == sorted(m.told.shares)
    assert m.here.library.find("m-4bit") is not None


@pytest.mark.parametrize(
    ("config", "name", "quantization"),
    [
        ({"mode": "mxfp4"}, "m-mxfp4", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        ({"mode": "nvfp4"}, "m-nvfp4", {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
        ({"bits": 3, "name": "three"}, "three", {"group_size": 64, "bits": 3, "mode": "affine"}),
    ],
)
def test_every_format_is_made_as_it_is_asked_for(
    m: Home, config: dict[str, Any], name: str, quantization: dict[str, Any]
) -> None:
    m.work(quantize, "quantize", model="m", **config)
    assert load_model(m.root / "models" / name)[1]["quantization"] == quantization


def test_what_stays_unquantised_has_the_type_asked_for(m: Home) -> None:
    m.work(quantize, "quantize", model="m", bits=8, dtype="bfloat16")
    written = weights_of(m.root / "models" / "m-8bit")
    assert {value.dtype for name, value in written.items() if "norm" in name} == {mx.bfloat16}
    assert written["model.embed_tokens.scales"].dtype == mx.bfloat16


def test_a_recipe_is_mlx_lms_own(m: Home) -> None:
    m.work(quantize, "quantize", model="m", recipe="mixed_3_6", group_size=32)
    model, config = load_model(m.root / "models" / "m")
    predicate = mixed_quant_predicate_builder("mixed_3_6", model, 32)
    model, _ = quantize_model(model, config, 32, None, quant_predicate=predicate)
    assert same(weights_of(m.root / "models" / "m-mixed_3_6"), dict(tree_flatten(model.parameters())))


@pytest.mark.parametrize("target", [3.9, 5.0, 7.3])
def test_a_target_is_met_by_the_files(m: Home, target: float) -> None:
    result = m.work(quantize, "quantize", model="m", target_bpw=target, name="t")
    size_bytes = sum(value.nbytes for value in weights_of(m.root / "models" / "t").values())
    assert abs(size_bytes * 8 / 92_480 - target) <= 0.1
    assert result["bits_per_weight"] == pytest.approx(size_bytes * 8 / 92_480, abs=0.001)
    config = load_model(m.root / "models" / "t")[1]["quantization"]
    assert len({chosen["bits"] for chosen in config.values() if isinstance(chosen, dict)}) > 1


def test_a_large_model_is_written_in_several_files(m: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    m.work(quantize, "quantize", model="m", bits=4, group_size=32, name="one")
    monkeypatch.setattr(output, "SHARD_BYTES", 20_000)
    m.work(quantize, "quantize", model="m", bits=4, group_size=32, name="many")
    files = sorted(path.name for path in (m.root / "models" / "many").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    assert same(weights_of(m.root / "models" / "one"), weights_of(m.root / "models" / "many"))
    load_model(m.root / "models" / "many")


def short(path: str, *_: Any, **__: Any) -> None:
    Path(path).write_bytes((1000).to_bytes(8, "little") + b"{")


def refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("[write] Unable to write 65536 bytes to file.")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (short, "what was written is not whole, so it was not published: model.safetensors: no safetensors"),
        (refused, "m-4bit can't be made under "),
    ],
)
def test_a_disk_that_fills_up_leaves_nothing(
    m: Home, monkeypatch: pytest.MonkeyPatch, write: Any, message: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(mx, "save_safetensors", write)
        with pytest.raises(JobError) as failed:
            m.work(quantize, "quantize", model="m", bits=4)
    assert str(failed.value).startswith(message)
    assert "\n" not in str(failed.value)
    assert m.hidden() == []
    assert not (m.root / "models" / "m-4bit").exists()
    m.work(quantize, "quantize", model="m", bits=4)


def test_a_name_that_was_taken_meanwhile_is_not_written_over(m: Home) -> None:
    task = m.task("quantize", quantize.TASK, model="m", bits=4)
    (m.root / "models" / "m-4bit").mkdir()
    with pytest.raises(JobError, match="choose another name"):
        quantize.work(task, m.told)  # type: ignore[arg-type]
    assert list((m.root / "models" / "m-4bit").iterdir()) == []


def test_what_a_killed_job_has_staged_is_no_part_of_the_next_ones_output(m: Home) -> None:
    stage = m.root / "models" / ".staging-m-4bit"
    stage.mkdir()
    (stage / "model-00001-of-00009.safetensors").write_bytes(b"half")
    m.work(quantize, "quantize", model="m", bits=4)
    assert len(list((m.root / "models" / "m-4bit").glob("*.safetensors"))) == 1


@pytest.mark.parametrize("base", ["m", "q"])
def test_a_fused_model_says_what_its_adapter_says(m: Home, tiny: TinyModels, base: str) -> None:
    m.add(tiny("quantised"), "q")
    adapter = add_adapter(m, base)
    result = m.work(fuse, "fuse", model=base, adapter="a", dequantize=base == "q")
    assert (result["model"], result["layers"]) == (f"{base}-a", 7)
    fused, config = load_model(m.root / "models" / f"{base}-a")
    assert "quantization" not in config
    # What was taken to be needed on the disk is about what was written.
    task = msgspec.convert({"model": base, "adapter": "a", "dequantize": base == "q"}, Fuse.config)
    assumed = _result_bytes(task, checkpoint.read(m.root / "models" / base))
    assert 0.8 < assumed / result["weights_bytes"] < 1.2
    plain, _ = load_model(m.root / "models" / base)
    adapted = load_adapters(load_model(m.root / "models" / base)[0], str(adapter))
    assert float(mx.abs(fused(IDS) - adapted(IDS)).max()) < 1e-3
    assert float(mx.abs(fused(IDS) - plain(IDS)).max()) > 0.1


def test_a_quantised_model_stays_quantised_when_it_is_fused(m: Home, tiny: TinyModels) -> None:
    m.add(tiny("quantised"), "q")
    add_adapter(m, "q")
    m.work(fuse, "fuse", model="q", adapter="a", name="f")
    before, after = weights_of(m.root / "models" / "q"), weights_of(m.root / "models" / "f")
    assert {name: value.shape for name, value in before.items()} == {
        name: value.shape for name, value in after.items()
    }
    assert m.faults("fuse", model="m", adapter="a", dequantize=True, name="g") == [
        "dequantize: m is not quantised; leave it out"
    ]


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_every_id_is_predicted_once_from_at_most_the_context(stride: int) -> None:
    seen = []
    for window in windows(30, 4, 8, stride):
        assert window.first - window.begin >= 1
        assert window.end - 1 - window.begin <= 8
        seen += range(window.first, window.end)
    assert seen == list(range(4, 30))
    assert list(windows(1, 0, 8, 8)) == []


def plain_loss(model: Any, ids: list[int], first: int, context: int, stride: int) -> tuple[float, int]:
    """Each window in one forward pass, without a cache."""
    total, count = 0.0, 0
    for window in windows(len(ids), first, context, stride):
        logits = model(mx.array([ids[window.begin : window.end - 1]]))[0]
        wanted = mx.array(ids[window.first : window.end])
        picked = logits[-(window.end - window.first) :]
        total += float(nn.losses.cross_entropy(picked, wanted, reduction="sum"))
        count += window.end - window.first
    return total / count, count


@pytest.mark.parametrize("how", [{}, {"context": 50}, {"context": 700, "stride": 300}])
def test_a_texts_loss_equals_a_plain_loops(m: Home, tmp_path: Path, how: dict[str, int]) -> None:
    text = "The otter sleeps by the river. " * 40
    (tmp_path / "t.txt").write_text(text)
    result = m.work(evaluate, "evaluate", model="m", file=str(tmp_path / "t.txt"), **how)
    model, _ = load_model(m.root / "models" / "m")
    ids = ChatTokenizer.open(m.root / "models" / "m").encode(text, add_special_tokens=True)
    context = how.get("context", 2048)
    loss, count = plain_loss(model, ids, 1, context, how.get("stride", context))
    assert result["tokens"] == count == len(ids) - 1
    assert result["loss"] == pytest.approx(loss, abs=1e-4)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    last = m.told.metrics[-1]
    assert (last["tokens"], last["loss"]) == (count, result["loss"])


def test_of_training_data_the_answers_are_predicted(m: Home, tmp_path: Path) -> None:
    lines = [
        {"prompt": "Hi", "completion": "ho"},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]},
    ]
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = m.work(evaluate, "evaluate", model="m", file=str(file))
    model, _ = load_model(m.root / "models" / "m")
    tokenizer = ChatTokenizer.open(m.root / "models" / "m")
    total, count = 0.0, 0
    for asked, answer in (("Hi", "ho"), ("x", "yes")):
        prompt = tokenizer.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        answered = tokenizer.encode(f"{answer}<|im_end|>\n")
        loss, tokens = plain_loss(model, prompt + answered, len(prompt), 2048, 2048)
        total, count = total + loss * tokens, count + tokens
    # Two letters and three, and for each the end of the turn and the template's newline.
    assert result["tokens"] == count == 9
    assert result["loss"] == pytest.approx(total / count, abs=1e-4)


def test_an_evaluation_ends_at_its_limit_and_uses_its_adapter(m: Home, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcdefgh" * 20)
    add_adapter(m, "m")
    asked = {"model": "m", "file": str(tmp_path / "t.txt"), "context": 16, "limit_tokens": 40}
    plain = m.work(evaluate, "evaluate", **asked)
    adapted = m.work(evaluate, "evaluate", adapter="a", **asked)
    assert (plain["tokens"], adapted["tokens"], adapted["adapter"]) == (40, 40, "a")
    assert abs(plain["loss"] - adapted["loss"]) > 0.01


@pytest.mark.parametrize(
    ("raw", "message"), [(b"a", "fewer than two tokens"), (b"\xff\xfe\x00", "is no text in UTF-8")]
)
def test_a_file_without_a_text_is_refused(m: Home, tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "t.txt").write_bytes(raw)
    with pytest.raises(JobError, match=message):
        m.work(evaluate, "evaluate", model="m", file=str(tmp_path / "t.txt"))


def test_what_libraries_print_becomes_plain_lines() -> None:
    lines: list[str] = []
    out = LogLines(lines.append)
    print("\x1b[1;32mgreen\x1b[0m and\tbold", "50%|██\r100%|████\n", "half", end="", file=out)
    print(" line\n\n", end="", file=out)
    assert lines == ["green and\tbold 50%|██", "100%|████", " half line"]


@pytest.fixture(autouse=True)
def _default_device() -> Iterator[None]:
    yield
    mx.clear_cache()
