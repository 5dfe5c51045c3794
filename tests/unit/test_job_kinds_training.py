"""Fine-tuning a tiny model: what is trained, told and published."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlxpool.shared import adapters, checkpoint
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.job_lines import Failed, read_line
from mlxpool.shared.training_lines import example
from mlxpool.worker.jobs import finetune, quantize
from mlxpool.worker.jobs.examples import tokens_of
from mlxpool.worker.jobs.process import JobError
from tests.tools.tiny_fixture import TinyModels
from tests.unit.job_world import Home, home  # noqa: F401  # a fixture

TRAINING: dict[str, Any] = {
    "model": "m", "data": "songs", "name": "a", "iters": 8, "learning_rate": 0.01, "steps_per_report": 2,
    "steps_per_eval": 4, "rank": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    mx.enable_compile()


@pytest.fixture
def m(home: Home, tiny: TinyModels) -> Home:  # noqa: F811
    home.add(tiny("llama"), "m")
    datasets = home.root / "datasets"
    datasets.mkdir()
    lines = [{"prompt": f"Song {number}?", "completion": "la la la"} for number in range(20)]
    (datasets / "songs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def trained(m: Home, adapter: str = "a") -> dict[str, mx.array]:
    loaded: Any = mx.load(str(m.root / "adapters" / adapter / "adapters.safetensors"))
    return dict(loaded)


def test_losses_fall_and_are_told_from_the_first_step_to_the_last(m: Home) -> None:
    longer = {**TRAINING, "iters": 31, "steps_per_report": 10, "steps_per_eval": 20}
    result = m.work(finetune, "finetune", **longer)
    losses, validations = m.told.series("train_loss"), m.told.series("val_loss")
    assert [step for step, _ in losses] == [10, 20, 30, 31]
    assert losses[-2][1] < losses[0][1]
    assert [step for step, _ in validations] == [0, 20, 31]
    assert result["val_loss_first"] == validations[0][1]
    assert result["val_loss_last"] == validations[-1][1] < validations[0][1]
    assert result["train_loss"] == losses[-1][1]
    assert m.told.metrics[1]["learning_rate"] == pytest.approx(0.01)
    assert m.told.shares == sorted(m.told.shares)
    assert m.hidden("adapters") == []


def test_the_adapter_is_mlx_lms_and_says_whose_it_is(m: Home) -> None:
    m.work(finetune, "finetune", **TRAINING)
    folder = m.root / "adapters" / "a"
    found = adapters.read(folder)
    assert (found.rank, found.scale, found.base, len(found.layers)) == (4, 20.0, "m", 14)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["fine_tune_type"], config["num_layers"]) == ("lora", 2)
    assert len(config["mlxpool_base_config"]) == 64
    ids = mx.array([[66, 67, 68]])
    plain, _ = load_model(m.root / "models" / "m")
    before = plain(ids)
    adapted = load_adapters(plain, str(folder))
    assert float(mx.abs(adapted(ids) - before).max()) > 0.1


def test_a_seed_makes_the_same_adapter_and_another_one_another(m: Home) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        m.work(finetune, "finetune", **{**TRAINING, "iters": 2, "name": name, "seed": seed})
    one, same, other = trained(m, "a"), trained(m, "b"), trained(m, "c")
    assert all(bool(mx.array_equal(one[name], same[name])) for name in one)
    assert any(not bool(mx.array_equal(one[name], other[name])) for name in one)


def test_a_resumed_training_goes_on_where_the_adapter_was(m: Home) -> None:
    first = m.work(finetune, "finetune", **TRAINING)
    again = m.work(finetune, "finetune", **{**TRAINING, "name": "b", "resume_adapter": "a"})
    assert again["val_loss_first"] == pytest.approx(first["val_loss_last"], abs=1e-5)
    assert m.faults("finetune", **{**TRAINING, "name": "c", "resume_adapter": "a", "rank": 8}) == [
        "rank: 8, but a has rank 4; use that"
    ]
    with pytest.raises(JobError, match="a was trained on other layers than these"):
        m.work(finetune, "finetune", **{**TRAINING, "name": "c", "resume_adapter": "a", "layers": 1})


def test_only_the_layers_and_keys_asked_for_are_trained(m: Home) -> None:
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    m.work(finetune, "finetune", **{**TRAINING, "iters": 1, "layers": 1, "keys": keys})
    assert set(trained(m)) == {
        f"model.layers.1.{key}.{half}" for key in keys for half in ("lora_a", "lora_b")
    }
    with pytest.raises(JobError, match="no trained block has 'self_attn.down_proj'"):
        m.work(finetune, "finetune", **{**TRAINING, "name": "b", "keys": ["self_attn.down_proj", *keys]})


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_learning_rate_follows_its_schedule(m: Home, schedule: str) -> None:
    m.work(
        finetune,
        "finetune",
        **{**TRAINING, "schedule": schedule, "warmup": 2, "steps_per_report": 1, "iters": 6},
    )
    rates = [one["learning_rate"] for one in m.told.metrics if "learning_rate" in one]
    assert rates[0] < rates[1]
    assert max(rates) == pytest.approx(0.01)
    if schedule == "cosine":
        assert rates[-1] < 0.006
    else:
        assert rates[-1] == pytest.approx(0.01)


def test_a_loss_that_is_no_number_ends_the_job_and_leaves_no_adapter(m: Home) -> None:
    weights: Any = mx.load(str(m.root / "models" / "m" / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    mx.save_safetensors(str(m.root / "models" / "m" / "model.safetensors"), weights)
    with pytest.raises(JobError, match="the validation loss is no number after step 0"):
        m.work(finetune, "finetune", **TRAINING)
    assert list((m.root / "adapters").glob("[!.]*")) == []
    assert m.hidden("adapters") == []


def test_a_quantised_model_is_trained_as_it_is_served(m: Home) -> None:
    m.work(quantize, "quantize", model="m", bits=4, group_size=32, name="q")
    result = m.work(finetune, "finetune", **{**TRAINING, "model": "q"})
    assert result["val_loss_last"] < result["val_loss_first"]
    found = adapters.read(m.root / "adapters" / "a")
    assert adapters.fit(found, checkpoint.read(m.root / "models" / "q").tensors).fits is True


def test_gradients_gathered_and_computed_again_train_as_well(m: Home) -> None:
    more = {"grad_checkpoint": True, "grad_accumulation": 2, "mask_prompt": True, "dropout": 0.1}
    result = m.work(finetune, "finetune", **{**TRAINING, **more})
    assert result["val_loss_last"] < result["val_loss_first"]


def test_lines_that_are_cut_before_their_answer_are_left_out_aloud(
    m: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JobError, match="batch_size is 4, but only 0 lines can be learnt from"):
        m.work(finetune, "finetune", **{**TRAINING, "mask_prompt": True, "max_seq_length": 8})
    assert "20 lines left out: nothing to learn within the cut" in capsys.readouterr().out


def test_a_masked_prompt_is_what_the_template_puts_before_the_answer(m: Home) -> None:
    tokenizer = ChatTokenizer.open(m.root / "models" / "m")
    line = example(b'{"prompt": "Hi", "completion": "ho"}')
    ids, at = tokens_of(tokenizer, line, mask_prompt=True)
    assert tokenizer.decode(ids[at:]) == "ho\n"
    assert tokens_of(tokenizer, line, mask_prompt=False) == (ids, 0)
    text, begin = tokens_of(tokenizer, example(b'{"text": "ab"}'), mask_prompt=False)
    assert (text[-1], begin, tokenizer.decode(text)) == (258, 0, "ab")


def test_what_a_template_puts_otherwise_before_an_answer_counts_as_the_answers(m: Home) -> None:
    config = m.root / "models" / "m" / "tokenizer_config.json"
    body = json.loads(config.read_text())
    body["chat_template"] = (
        "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:<open>{% endif %}"
    )
    config.write_text(json.dumps(body))
    tokenizer = ChatTokenizer.open(m.root / "models" / "m")
    ids, at = tokens_of(tokenizer, example(b'{"prompt": "Hi", "completion": "ho"}'), mask_prompt=True)
    assert (tokenizer.decode(ids[:at]), tokenizer.decode(ids[at:])) == ("user:Hi;assistant:", "ho;")


@contextlib.contextmanager
def running(kind: str, task: msgspec.Struct) -> Iterator[subprocess.Popen[bytes]]:
    """The job's process, with a tether that is held until the end."""
    read, write = os.pipe()
    told = msgspec.json.encode(task).decode()
    command = [sys.executable, "-m", "mlxpool.worker.jobs", kind, "--task", told, "--tether-fd", str(read)]
    child = subprocess.Popen(command, pass_fds=(read,), stdout=subprocess.PIPE, start_new_session=True)
    os.close(read)
    try:
        yield child
    finally:
        os.close(write)
        child.communicate(timeout=60)


def test_a_process_that_is_ended_leaves_no_adapter_and_the_next_one_makes_it(m: Home) -> None:
    task = m.task("finetune", finetune.TASK, **{**TRAINING, "iters": 1_000_000})
    with running("finetune", task) as child:
        assert child.stdout is not None
        assert any(b'"name":"train"' in line for line in child.stdout)
        child.send_signal(signal.SIGTERM)
    assert child.returncode == -signal.SIGTERM
    assert [path.name for path in (m.root / "adapters").glob("[!.]*")] == []
    m.work(finetune, "finetune", **{**TRAINING, "iters": 1})
    assert m.hidden("adapters") == []


def test_a_process_says_in_one_line_why_it_failed(m: Home) -> None:
    task = m.task("finetune", finetune.TASK, **TRAINING)
    (m.root / "datasets" / "songs.jsonl").write_text("{}\n")
    with running("finetune", task) as child:
        out, _ = child.communicate(timeout=60)
    last = read_line(out.splitlines()[-1])
    assert child.returncode == 1
    assert isinstance(last, Failed)
    assert last.error.startswith("songs.jsonl: line 1 has no text. A line is ")
    assert b"Traceback" not in out
