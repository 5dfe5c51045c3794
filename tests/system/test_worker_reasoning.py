"""A model that reasons, over a real worker's socket: what is thought and what is said stay apart."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.served import serve
from tests.tools.tiny_fixture import TinyModels
from tests.tools.tiny_models import CHAT_TEMPLATE
from tests.tools.worker_process import WorkerProcess, streamed_text

# As Qwen's: the block is opened in the prompt, and closed there too where reasoning is switched off.
TEMPLATE = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and not enable_thinking %}"
    "\n</think>\n\n{% endif %}{% endif %}",
)


@pytest.fixture(scope="module")
def folder(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("models") / "thinker")
    config = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(folder, thinking=True).ready() as worker:
        yield worker


def reasoned(chunks: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"])


def test_a_block_that_the_prompt_opened_is_reasoning_streamed_as_whole(thinker: WorkerProcess) -> None:
    message = thinker.chat("hello", max_tokens=40, temperature=0)["choices"][0]["message"]
    assert len(message["reasoning"]) > 20
    assert message["reasoning_content"] == message["reasoning"]
    assert message["content"] == ""
    chunks = list(thinker.stream("hello", max_tokens=40, temperature=0))
    assert streamed_text(chunks) == ""
    assert reasoned(chunks, "reasoning") == reasoned(chunks, "reasoning_content") == message["reasoning"]


@pytest.mark.parametrize(
    "off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_reasoning_that_is_switched_off_leaves_the_answer(thinker: WorkerProcess, off: Any) -> None:
    message = thinker.chat("hello", max_tokens=40, temperature=0, **off)["choices"][0]["message"]
    assert len(message["content"]) > 20
    assert "reasoning" not in message


def test_a_form_begins_after_the_reasoning_or_at_once_without(thinker: WorkerProcess) -> None:
    form = {"guided_choice": ["yes", "no"], "temperature": 0, "max_tokens": 40}
    off = thinker.chat("hello", reasoning_effort="none", **form)["choices"][0]
    assert off["message"]["content"] in ("yes", "no")
    assert off["finish_reason"] == "stop"
    # Random thoughts never close their block: what is asked of the answer is not asked of them.
    on = thinker.chat("hello", **form)["choices"][0]
    assert len(on["message"]["reasoning"]) > 20
    assert (on["message"]["content"], on["finish_reason"]) == ("", "length")


def test_a_stop_string_ends_no_reasoning(thinker: WorkerProcess) -> None:
    plain = thinker.chat("hello", max_tokens=40, temperature=0)["choices"][0]["message"]["reasoning"]
    stopped = thinker.chat("hello", max_tokens=40, temperature=0, stop=[plain[5:8]])["choices"][0]
    assert stopped["message"]["reasoning"] == plain
    assert stopped["finish_reason"] == "length"


async def test_run_writes_the_answer_to_its_output_and_the_thoughts_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    async with serve(tmp_path, models=folder.parent) as served:

        def run(*more: str) -> subprocess.CompletedProcess[str]:
            command = "from mlxpool.parent.cli import main; main()"
            asked = ["run", "thinker", "hello", "--temperature", "0", "--max-tokens", "40", *more]
            return subprocess.run(
                [sys.executable, "-c", command, *asked, "--home", str(served.home)],
                capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip

        answer = await served.chat("thinker", "hello", temperature=0, max_tokens=40)
        said = await asyncio.to_thread(run)
        assert said.stdout == ""
        assert said.stderr == answer.body["choices"][0]["message"]["reasoning"] + "\n"
