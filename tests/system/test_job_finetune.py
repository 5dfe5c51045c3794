"""An adapter is trained on 200 lines, seen to have learnt them, and used at once."""

from __future__ import annotations

from pathlib import Path

from tests.tools.job_client import events, run, submit, until_done
from tests.tools.served import serve

DATA = Path(__file__).parents[1] / "data"
# How every answer of the data begins.
STYLE = "Harbour log, entry"
QUESTION = "What is a lamp for?"


async def test_the_loss_falls_and_with_the_adapter_the_held_out_lines_are_foreseen(
    tmp_path: Path, starter_folder: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "smollm2-135m").symlink_to(starter_folder)
    async with serve(tmp_path, models=models) as served:
        job = await submit(
            served, "finetune", model="smollm2-135m", data=str(DATA / "finetune.jsonl"), name="harbour",
            iters=8, batch_size=4, layers=4, learning_rate=1e-3, steps_per_report=2, valid_batches=1,
        )  # fmt: skip
        result = await until_done(served, job["id"])
        told = [event["values"] for event in await events(served, job["id"]) if event["type"] == "metric"]
        losses = [values["train_loss"] for values in told if "train_loss" in values]
        assert len(losses) == 4
        assert losses == sorted(losses, reverse=True)
        validations = [(values["iteration"], values["val_loss"]) for values in told if "val_loss" in values]
        assert [step for step, _ in validations] == [0, 8]
        assert (result["val_loss_first"], result["val_loss_last"]) == tuple(loss for _, loss in validations)
        assert result["val_loss_last"] < result["val_loss_first"] / 2

        held_out = {
            "model": "smollm2-135m",
            "file": str(DATA / "finetune_held_out.jsonl"),
            "limit_tokens": 150,
        }
        without = await run(served, "evaluate", **held_out)
        with_it = await run(served, "evaluate", adapter="harbour", **held_out)
        assert without["tokens"] == with_it["tokens"] == 150
        assert with_it["loss"] < without["loss"] / 2

        asked = {"max_tokens": 8, "temperature": 0}
        base = (await served.chat("smollm2-135m", QUESTION, **asked)).text
        assert STYLE not in base
        assert (await served.chat("smollm2-135m", QUESTION, adapter="harbour", **asked)).text.startswith(
            STYLE
        )
        assert (await served.chat("smollm2-135m", QUESTION, adapter="none", **asked)).text == base
