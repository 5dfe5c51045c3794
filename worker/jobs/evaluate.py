"""Evaluating: loss and perplexity of a text, or of the answers of training data."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from mlxpool.shared import training_lines
from mlxpool.shared.files import open_regular
from mlxpool.shared.job_tasks import EvaluateTask
from mlxpool.shared.job_teller import REPORT_INTERVAL_S, Teller
from mlxpool.worker import load
from mlxpool.worker.jobs.examples import Tokens, tokens_of
from mlxpool.worker.jobs.model import add_adapter, evaluate, open_to_compute
from mlxpool.worker.jobs.process import JobError
from mlxpool.worker.jobs.scoring import loss_of, windows

TASK = EvaluateTask

_LOADED = 0.1
# Metrics are kept for good; progress says the rest.
_METRIC_INTERVAL_S = 5 * REPORT_INTERVAL_S


def work(task: EvaluateTask, teller: Teller) -> dict[str, Any]:
    """The result: {model, adapter, perplexity, loss, tokens, seconds}."""
    began_s = time.monotonic()
    folder = Path(task.folder)
    texts = _texts(task, folder)
    plan = [
        (ids, window)
        for ids, first in texts
        for window in windows(len(ids), first, task.context, task.stride)
    ]
    total = sum(window.end - window.first for _, window in plan)
    if total == 0:
        raise JobError("there is nothing to predict: the text has fewer than two tokens")
    total = min(total, task.limit_tokens or total)
    teller.progress(0.0, "load", "the model")
    opened = open_to_compute(folder)
    if task.adapter is not None:
        add_adapter(opened.model, task.adapter)
    evaluate(opened.model.parameters(), teller, 0.0, _LOADED, "load")
    loss, tokens, told_s = 0.0, 0, 0.0
    for ids, window in plan:
        if tokens >= total:
            break
        within = window._replace(end=min(window.end, window.first + total - tokens))
        loss += loss_of(opened.model, ids, within)
        tokens += within.end - within.first
        teller.progress(_LOADED + (1 - _LOADED) * tokens / total, "evaluate", f"{tokens} of {total} tokens")
        if not math.isfinite(loss):
            raise JobError(f"the loss is no number after {tokens} tokens; the weights may be damaged")
        if time.monotonic() - told_s > _METRIC_INTERVAL_S or tokens >= total:
            told_s = time.monotonic()
            teller.metric(tokens=tokens, loss=loss / tokens, perplexity=_perplexity(loss / tokens))
    teller.progress(1.0, "done")
    return {
        "model": task.model,
        "adapter": None if task.adapter is None else task.adapter.id,
        "perplexity": _perplexity(loss / tokens),
        "loss": loss / tokens,
        "tokens": tokens,
        "seconds": round(time.monotonic() - began_s, 2),
    }


def _perplexity(loss: float) -> float:
    # A float can't hold the exponential of more.
    return math.exp(min(loss, 700.0))


def _texts(task: EvaluateTask, folder: Path) -> list[Tokens]:
    """Ids, and the first of them that is to be predicted. Raises JobError, LinesError."""
    tokenizer = load.load_tokenizer(folder)
    path = Path(task.file)
    if task.is_lines:
        return [tokens_of(tokenizer, line, mask_prompt=True) for line in training_lines.read(path)]
    with open_regular(path) as file:
        raw = file.read(training_lines.MAX_FILE_BYTES + 1)
    if len(raw) > training_lines.MAX_FILE_BYTES:
        raise JobError(f"{path.name} is too large to be evaluated whole")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise JobError(f"{path.name} is no text in UTF-8") from None
    return [(tokenizer.encode(text, add_special_tokens=True), 1)]
