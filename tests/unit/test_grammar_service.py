"""The whole way with the real compiler: a form asked for, a constraint that a row carries."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import ApiError
from mlxpool.worker.engine.constraint import Constraint
from mlxpool.worker.grammar import runtime
from mlxpool.worker.grammar import service as service_module
from mlxpool.worker.grammar.helper import COMMAND
from mlxpool.worker.grammar.matcher import OpenCount
from mlxpool.worker.grammar.queue import LIMITS, Limits, Refused
from mlxpool.worker.grammar.service import Compiled, GrammarService, Held
from mlxpool.worker.grammar.spec import Demand, GrammarSpec
from tests.tools import tiny_models

# More than the tokenizer's ids, as a padded model's logits are.
WIDTH = tiny_models.VOCAB_SIZE
SCRIPTED = (sys.executable, "-m", "tests.tools.scripted_compiler")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tiny_models.EOS_ID}))
    return ChatTokenizer.with_tokenizer(folder, tiny_models.tokenizer())


def schema(value: Any, strict: bool = False) -> Demand:
    return Demand(Structure("json_schema", "response_format", value, strict))


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def with_service(
    tokenizer: ChatTokenizer,
    use: Callable[[GrammarService], Awaitable[None]],
    limits: Limits = LIMITS,
    command: Sequence[str] = COMMAND,
) -> None:
    async def run() -> None:
        service = GrammarService(tokenizer, WIDTH, 4, limits=limits, command=command)
        try:
            await use(service)
        finally:
            await service.close()

    asyncio.run(run())


def allowed(constraint: Constraint) -> set[int] | None:
    mask = np.zeros(WIDTH // 32, dtype=np.int32)
    if not constraint.fill(mask):
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def letters(tokenizer: ChatTokenizer, text: str) -> set[int]:
    return {tokenizer.encode(letter)[0] for letter in text}


def test_a_row_is_led_to_an_answer_of_its_form(tokenizer: ChatTokenizer) -> None:
    async def use(service: GrammarService) -> None:
        held = await service.hold(schema(SCHEMA))
        assert (held.family, held.instruction, held.warnings) == (None, None, ())
        assert held.compiled is not None
        row, other = held.compiled.constraint(), held.compiled.constraint()
        assert service.open_constraints == 2
        assert allowed(row) == letters(tokenizer, "{")
        for token in tokenizer.encode('{"a": 12, "b": '):
            assert row.accept(token)
        assert allowed(row) == letters(tokenizer, " \n\t\rtf")
        assert not row.accept(tokenizer.encode("x")[0])
        for token in tokenizer.encode("true}"):
            assert row.accept(token)
        # Only the end, and nothing after it.
        assert allowed(row) == {tiny_models.EOS_ID}
        assert row.accept(tiny_models.EOS_ID)
        assert allowed(row) == {tiny_models.EOS_ID}
        # Each row has a place of its own.
        assert allowed(other) == letters(tokenizer, "{")
        row.release()
        other.release()
        assert service.open_constraints == 0

        await forms(service, tokenizer)

    with_service(tokenizer, use)


@pytest.mark.parametrize("quick_s", ["0", "60"], ids=["read back", "compiled again"])
def test_a_grammar_is_the_same_whether_it_is_read_back_or_compiled_again(
    tokenizer: ChatTokenizer, quick_s: str
) -> None:
    async def use(service: GrammarService) -> None:
        held = await service.hold(schema(nested(3)))
        assert held.compiled is not None
        row = held.compiled.constraint()
        for token in tokenizer.encode('{"a":{"a":{"a":12'):
            assert row.accept(token)
        assert allowed(row) == letters(tokenizer, "0123456789,} \n\t\r")
        row.release()

    with_service(tokenizer, use, command=(*COMMAND, "--quick-s", quick_s))


async def forms(service: GrammarService, tokenizer: ChatTokenizer) -> None:
    """More of the same service: starting the compiler takes seconds."""
    # Text is any text, but no special token and none of the logits' padding.
    held = await service.hold(Demand(Structure("regex", "guided_regex", "(.|\n)*")))
    assert held.compiled is not None
    free = allowed(held.compiled.constraint())
    assert free is not None
    assert letters(tokenizer, "aé\n") <= free
    assert tiny_models.BOS_ID not in free
    assert free <= set(range(256)) | {tiny_models.EOS_ID}

    # A grammar that leads nowhere ends its row with an error: what was said by then is not of the form.
    held = await service.hold(Demand(Structure("grammar", "guided_grammar", 'root ::= "a" root')))
    assert held.compiled is not None
    dead = held.compiled.constraint()
    assert allowed(dead) == letters(tokenizer, "a")
    held = await service.hold(Demand(Structure("grammar", "guided_grammar", "root ::= root")))
    assert held.compiled is not None
    with pytest.raises(ApiError, match="leads nowhere: after 0 tokens"):
        allowed(held.compiled.constraint())
    held = await service.hold(Demand(Structure("grammar", "guided_grammar", 'root ::= "a" x\nx ::= x')))
    assert held.compiled is not None
    dead = held.compiled.constraint()
    assert allowed(dead) == letters(tokenizer, "a")
    assert dead.accept(tokenizer.encode("a")[0])
    with pytest.raises(ApiError, match="leads nowhere: after 1 tokens"):
        allowed(dead)

    with pytest.raises(ApiError) as caught:
        await service.hold(Demand(Structure("grammar", "guided_grammar", "root ::= (")))
    assert (caught.value.code, caught.value.param) == ("invalid_request", "guided_grammar")
    assert "EBNF" in caught.value.message
    assert ".cc" not in caught.value.message

    # Valid, but nothing fits it: the compiler says so.
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    held = await service.hold(schema(impossible))
    assert held.compiled is None
    assert held.instruction is not None
    assert held.warnings[0].startswith("grammar not enforced: ")
    with pytest.raises(ApiError) as caught:
        await service.hold(schema(impossible, strict=True))
    assert caught.value.code == "unsupported_schema"

    held = await service.hold(Demand(tools=(Tool("f", SCHEMA, {}),), choice=ToolChoice("required")))
    assert (held.family, held.warnings) == ("json_tools", ())
    assert held.compiled is not None
    assert allowed(held.compiled.constraint()) == letters(tokenizer, "<")
    assert (await service.hold(Demand())).compiled is None


def test_a_grammar_is_compiled_once_and_kept(tokenizer: ChatTokenizer) -> None:
    async def use(service: GrammarService) -> None:
        together = await asyncio.gather(*(service.hold(schema(SCHEMA)) for _ in range(20)))
        assert len({id(held.compiled) for held in together}) == 1
        assert service.helper_pid is not None
        psutil.Process(service.helper_pid).kill()
        again = await service.hold(schema(SCHEMA))
        assert again.compiled is together[0].compiled

        spec = GrammarSpec('{"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}')
        for _ in range(2):
            with pytest.raises(Refused) as caught:
                await service.compile(spec)
            assert caught.value.unread
        # The second time without asking.
        assert service.preparing == 0

        left = asyncio.ensure_future(service.hold(schema({"const": "left"})))
        stays = asyncio.ensure_future(service.hold(schema({"const": "left"})))
        await asyncio.sleep(0)
        left.cancel()
        held = await stays
        assert held.compiled is not None

    with_service(tokenizer, use)


def test_a_schema_too_deep_and_an_enum_too_long_are_words_in_time_and_hurt_no_other(
    tokenizer: ChatTokenizer,
) -> None:
    # The bytes of this vocabulary compile faster than a real one's tokens: deeper makes up for it.
    slow = [schema(nested(450)), schema({"enum": [f"value number {place}" for place in range(45_000)]})]

    async def use(service: GrammarService) -> None:
        await service.hold(schema({"const": "ready"}))
        loop = asyncio.get_running_loop()
        began = loop.time()
        waits = [asyncio.ensure_future(service.hold(demand)) for demand in slow]
        held = await service.hold(schema(SCHEMA))
        assert held.compiled is not None
        deep, long = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(deep, Held)
        assert deep.compiled is None
        assert deep.warnings == ("grammar not enforced: it takes more than 1 s to compile",)
        # Too long for words.
        assert isinstance(long, ApiError)
        assert (long.status, long.param) == (400, "response_format")
        assert "it takes more than 1 s to compile" in long.message
        with pytest.raises(ApiError) as caught:
            await service.hold(schema(nested(450), strict=True))
        assert caught.value.code == "unsupported_schema"
        # Remembered: not tried again.
        assert loop.time() - began < 20

    with_service(tokenizer, use, Limits(compile_s=1.0))


def test_where_the_compiler_does_not_start_a_form_is_words_and_a_forced_call_a_400(
    tokenizer: ChatTokenizer,
) -> None:
    async def use(service: GrammarService) -> None:
        held = await service.hold(schema(SCHEMA))
        assert held.warnings == ("grammar not enforced: it breaks the grammar compiler",)
        with pytest.raises(ApiError) as caught:
            await service.hold(Demand(tools=(Tool("f", SCHEMA, {}),), choice=ToolChoice("required")))
        assert (caught.value.code, caught.value.param) == ("unsupported_schema", "tool_choice")

    with_service(tokenizer, use, command=("/nonexistent/python",))


WORKER = """
import asyncio, sys
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.worker.grammar.service import Compiled, GrammarService, Held
from mlxpool.worker.grammar.spec import GrammarSpec
from tests.tools import tiny_models
from pathlib import Path

async def main():
    tokenizer = ChatTokenizer.with_tokenizer(Path(sys.argv[1]), tiny_models.tokenizer())
    service = GrammarService(tokenizer, tiny_models.VOCAB_SIZE, 1)
    assert "torch" not in sys.modules and "xgrammar" not in sys.modules
    wait = asyncio.ensure_future(service.compile(GrammarSpec("{}")))
    while service.helper_pid is None:
        await asyncio.sleep(0.01)
    print(service.helper_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_worker_leaves_no_compiler_and_imports_none_before_it_is_asked(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert worker.stdout is not None
        helper = psutil.Process(int(worker.stdout.readline()))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        psutil.wait_procs([helper], timeout=60)
        assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
    finally:
        worker.kill()
        worker.wait()


def test_a_form_that_many_ask_for_at_once_is_read_once(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = GrammarService._read

    def counted(self: GrammarService, spec: GrammarSpec, serialised: str | None) -> Any:
        reads.append(spec.text)
        return read(self, spec, serialised)

    monkeypatch.setattr(GrammarService, "_read", counted)

    async def use(service: GrammarService) -> None:
        asked = [asyncio.ensure_future(service.hold(schema(SCHEMA))) for _ in range(8)]
        await asyncio.sleep(0)
        asked[3].cancel()
        held = await asyncio.gather(*asked, return_exceptions=True)
        assert len(reads) == 1
        assert len({id(one.compiled) for one in held if isinstance(one, Held)}) == 1
        assert isinstance(held[3], asyncio.CancelledError)

    with_service(tokenizer, use)


async def test_a_refusal_after_one_of_those_that_wait_has_left_is_no_complaint_in_the_log(
    tokenizer: ChatTokenizer,
) -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))
    service = GrammarService(tokenizer, WIDTH, 4, command=SCRIPTED)
    leaves, stays = (asyncio.ensure_future(service.compile(GrammarSpec("fail"))) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    with pytest.raises(Refused):
        await stays
    with pytest.raises(asyncio.CancelledError):
        await leaves
    hangs = asyncio.ensure_future(service.compile(GrammarSpec("hang")))
    await asyncio.sleep(0)
    await service.close()
    with pytest.raises(ApiError) as caught:
        await hangs
    assert caught.value.code == "shutting_down"
    del leaves, stays, hangs
    gc.collect()
    assert said == []


class Grammar:
    """A compiled grammar's outside."""

    memory_size_bytes = 1


async def test_rows_get_a_constraint_each_or_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenCount()
    main = threading.get_ident()
    made: list[int] = []

    def matcher(_grammar: Any) -> object:
        made.append(threading.get_ident())
        if len(made) == 6:
            raise RuntimeError("std::bad_alloc")
        return object()

    monkeypatch.setattr(runtime, "xgrammar", lambda: SimpleNamespace(GrammarMatcher=matcher))
    held = Held(Compiled(Grammar(), [0], opened), field="guided_regex")
    rows = await held.constraints(3)
    assert (len(rows), opened.count) == (3, 3)
    assert main not in made
    with pytest.raises(RuntimeError):
        await held.constraints(3)
    assert opened.count == 3
    assert await Held().constraints(2) == [None, None]


async def test_constraints_of_a_client_that_left_while_they_were_made_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = OpenCount()
    began, go = threading.Event(), threading.Event()

    def matcher(_grammar: Any) -> object:
        began.set()
        assert go.wait(60)
        return object()

    monkeypatch.setattr(runtime, "xgrammar", lambda: SimpleNamespace(GrammarMatcher=matcher))
    with ThreadPoolExecutor(1) as thread:
        asked = asyncio.ensure_future(Compiled(Grammar(), [0], opened, thread).constraints(2, "tools"))
        await asyncio.to_thread(began.wait)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        go.set()
        await asyncio.wrap_future(thread.submit(int))
        await asyncio.sleep(0)
    assert opened.count == 0


async def test_strictness_that_no_grammar_takes_up_is_a_warning_and_nothing_is_compiled(
    tokenizer: ChatTokenizer,
) -> None:
    service = GrammarService(tokenizer, WIDTH, 4, command=("/nonexistent/python",))
    strict = Demand(tools=(Tool("f", SCHEMA, {}), Tool("g", SCHEMA, {}, strict=True)), family="json_tools")
    assert await service.hold(strict) == Held(
        warnings=("grammar not enforced: strict of tools[1], whose calls no tool_choice forces",)
    )
    assert (service.preparing, service.helper_pid) == (0, None)
    await service.close()


async def test_a_refusal_is_forgotten_after_a_while_and_holds_no_text(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    service = GrammarService(tokenizer, WIDTH, 4, command=SCRIPTED)
    spec = GrammarSpec("fail " + "x" * 100_000)
    for _ in range(2):
        with pytest.raises(Refused):
            await service.compile(spec)
    (key,) = service._refusals
    assert len(key) < 100
    now_s[0] += service_module.REFUSAL_S + 1
    asked = asyncio.ensure_future(service.compile(GrammarSpec("hang")))
    await asyncio.sleep(0)
    assert not service._refusals
    asked.cancel()
    await service.close()


def chain(rules: int) -> str:
    """A grammar of rules that are each only the next one."""
    return "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(rules)) + f'r{rules} ::= "a"\n'


def test_a_grammar_that_is_too_much_to_begin_costs_the_worker_nothing(tokenizer: ChatTokenizer) -> None:
    async def use(service: GrammarService) -> None:
        await service.hold(schema({"const": "ready"}))
        before = psutil.Process().memory_info().rss
        with pytest.raises(ApiError, match="guided_grammar can't be enforced: following it takes"):
            await service.hold(Demand(Structure("grammar", "guided_grammar", chain(10_000))))
        assert psutil.Process().memory_info().rss - before < 100_000_000

    with_service(tokenizer, use)


def test_a_grammar_that_takes_all_memory_breaks_the_compiler_alone(tokenizer: ChatTokenizer) -> None:
    async def use(service: GrammarService) -> None:
        beside = asyncio.ensure_future(service.hold(schema(SCHEMA)))
        with pytest.raises(
            ApiError, match="guided_grammar can't be enforced: it breaks the grammar compiler"
        ):
            await service.hold(Demand(Structure("grammar", "guided_grammar", chain(20_000))))
        assert (await beside).compiled is not None

    with_service(tokenizer, use, command=(*COMMAND, "--addresses-bytes", str(512 * 1024**2)))
