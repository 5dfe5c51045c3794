"""Real streamed models in a real engine: loading, faults of the disk, prompts that come back, memory given
back. What a pass computes is compared elsewhere; here it must be the same before and after."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.launch import StreamLaunch, WriteMode
from mlxpool.shared.control import CacheLaunch
from mlxpool.worker.cache.durability import flush
from mlxpool.worker.colibri import serving
from mlxpool.worker.colibri.contract import ExpertSource, Filling
from mlxpool.worker.colibri.serving import load_streamed
from mlxpool.worker.colibri.sources import FileSource
from mlxpool.worker.engine.terms import Loaded
from mlxpool.worker.load import LoadError
from mlxpool.worker.text.events import Failure, Finish
from tests import tiny_glm
from tests.tools.running_engine import Client, Running, plan, until

LAUNCH = StreamLaunch(slots=4, working_slots=16, chunk=64, prefetch=False)
PROMPT = [place * 7 % 250 for place in range(150)]
WAIT_S = 60
# The CPU backend's kernels for packed numbers are scalar: what is tested here is the same with plain ones.
PLAIN: dict[str, Any] = {"bits": None, "dtype": "F32"}

Folders = Callable[[str], Path]
StartStreamed = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("glm")
    config = tiny_glm.config()
    numbers = tiny_glm.weights(config)
    writers: dict[str, Callable[..., Path]] = {
        "stacked": tiny_glm.write_stacked,
        "container": tiny_glm.write_container,
        "records": tiny_glm.write_records,
    }

    def folder(form: str) -> Path:
        made = root / form
        plain = {} if form == "container" else PLAIN
        return made if made.exists() else writers[form](made, config, numbers, **plain)

    return folder


@pytest.fixture
def own(folders: Folders, tmp_path: Path) -> Path:
    """A folder to break."""
    config = tiny_glm.config()
    return tiny_glm.write_stacked(tmp_path / "own", config, tiny_glm.weights(config), **PLAIN)


@pytest.fixture
def start_streamed() -> Iterator[StartStreamed]:
    started: list[Running] = []

    async def running(folder: Path, launch: StreamLaunch = LAUNCH, **settings: Any) -> Running:
        def loaded() -> Loaded:
            return load_streamed(folder, launch, lambda _done, _total: None)

        started.append(Running(folder, batch=1, width=launch.chunk, loaded=loaded, **settings))
        return await started[-1].ready()

    yield running
    for one in started:
        one.stop()
        one.engine.join(WAIT_S)


@pytest.mark.parametrize(("write", "copied"), [("direct", True), ("assign", False)])
def test_the_device_copies_into_slots_and_not_into_what_they_are_assigned_from(
    write: WriteMode, copied: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ExpertSource] = []

    def with_copies(source: ExpertSource, _: Backend) -> ExpertSource:
        asked.append(source)
        return source

    monkeypatch.setattr(serving, "with_device_copies", with_copies)
    launch = msgspec.structs.replace(LAUNCH, write=write)
    load_streamed(folders("stacked"), launch, lambda _done, _total: None).stream.close()
    assert bool(asked) == copied


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("*.safetensors")}


def largest(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("form", ["stacked", "container", "records"])
async def test_an_answer_comes_back_from_disk_after_a_restart(
    folders: Folders, start_streamed: StartStreamed, form: str, tmp_path: Path
) -> None:
    cache = CacheLaunch(1 << 28, str(tmp_path / "kv"), 1 << 30, None, spill_queue_bytes=1 << 28)
    wanted = plan(PROMPT, max_tokens=12)
    running = await start_streamed(folders(form), cache=cache)
    first = await running.ask(wanted)
    assert first.usage.cached_tokens == 0
    assert (await flush(running.engine, WAIT_S)).durable
    running.stop()
    running.engine.join(WAIT_S)
    running = await start_streamed(folders(form), cache=cache)
    again = await running.ask(wanted)
    assert again.usage.cached_tokens >= 0.95 * len(PROMPT)
    assert again.text == first.text
    turn = running.engine.streamed.last_turn
    assert turn is not None
    assert turn.cached_tokens == again.usage.cached_tokens


async def test_progress_is_told_while_experts_are_read(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxpool.worker.colibri.serving._TELL_S", 0.0)
    told: list[tuple[int, int]] = []
    loaded = load_streamed(folders("stacked"), LAUNCH, lambda done, total: told.append((done, total)))
    assert loaded.stream is not None
    loaded.stream.close()
    assert told[0] == (0, loaded.weights_bytes)
    assert told.count((loaded.weights_bytes, loaded.weights_bytes)) > 6
    assert loaded.stream.stats().main.misses > 0


def test_a_short_shard_is_refused_with_layer_and_expert_before_weights_are_read(own: Path) -> None:
    shard = largest(own)
    os.truncate(shard, shard.stat().st_size - 1000)
    told: list[int] = []
    with pytest.raises(LoadError, match=shard.name):
        load_streamed(own, LAUNCH, lambda done, _total: told.append(done))
    assert told == []


def failure(client: Client) -> str:
    told = client.events[-1]
    assert isinstance(told, Failure)
    assert told.error.status == 500
    return told.error.message


async def test_a_shard_that_is_cut_while_it_is_served_ends_requests_until_the_model_is_loaded_again(
    own: Path, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(own)
    expected = await running.ask(plan(PROMPT, max_tokens=6))
    shards = contents(own)
    for path in shards:
        os.truncate(path, 100_000)
    broken = failure(await running.ask(plan(PROMPT, max_tokens=6)))
    assert "layer " in broken
    assert "expert " in broken
    for path, content in shards.items():
        path.write_bytes(content)
    for message in (broken, failure(await running.ask(plan(PROMPT, max_tokens=6)))):
        assert ".safetensors was overwritten" in message
        assert "reload the model" in message
    running = await start_streamed(own)
    again = await running.ask(plan(PROMPT, max_tokens=6))
    assert again.text == expected.text
    assert again.events[-1] == Finish("length")


async def test_weights_that_are_overwritten_while_they_are_served_give_no_answer_and_no_record(
    own: Path, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(own, cache=CacheLaunch(1 << 28))
    expected = await running.ask(plan(PROMPT, max_tokens=6))
    shard = largest(own)
    content = shard.read_bytes()
    held = running.engine.cache.stats().entries
    with shard.open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes(len(content) // 2))
    for first in (1, 2):
        message = failure(await running.ask(plan([first, *PROMPT], max_tokens=6)))
        assert f"{shard.name} was overwritten" in message
        assert "reload the model" in message
    assert running.engine.cache.stats().entries == held > 0
    shard.write_bytes(content)
    # What was written may have been read, whatever is there now.
    assert "reload the model" in failure(await running.ask(plan(PROMPT, max_tokens=6)))
    running = await start_streamed(own)
    assert (await running.ask(plan(PROMPT, max_tokens=6))).text == expected.text


async def test_weights_that_others_take_the_place_of_are_served_as_they_were(
    own: Path, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(own)
    expected = await running.ask(plan(PROMPT, max_tokens=6))
    for path, content in contents(own).items():
        other = path.with_suffix(".new")
        other.write_bytes(bytes(len(content)))
        other.replace(path)
    again = await running.ask(plan(PROMPT, max_tokens=6))
    assert (again.text, again.events[-1]) == (expected.text, Finish("length"))


async def test_a_model_that_is_all_in_memory_is_served_whatever_is_written_over_its_files(
    own: Path, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(own, StreamLaunch(slots=16, working_slots=0, chunk=64, prefetch=False))
    expected = await running.ask(plan(PROMPT, max_tokens=6))
    for path, content in contents(own).items():
        path.write_bytes(bytes(len(content)))
    again = await running.ask(plan(PROMPT, max_tokens=6))
    assert (again.text, again.events[-1]) == (expected.text, Finish("length"))


async def test_a_client_that_leaves_in_mid_prefill_stops_the_reading(
    folders: Folders, start_streamed: StartStreamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_streamed(folders("stacked"))
    expected = await running.ask(plan(PROMPT, max_tokens=6))
    reading, go = threading.Event(), threading.Event()
    begin = FileSource.begin

    def slow(self: FileSource, layer: int, expert: int, rows: Any) -> Filling:
        reading.set()
        assert go.wait(WAIT_S)
        return begin(self, layer, expert, rows)

    monkeypatch.setattr(FileSource, "begin", slow)
    before = running.engine.streamed.stats().main.loads
    _, row = running.submit(plan([*PROMPT, *PROMPT], max_tokens=6))
    assert await asyncio.to_thread(reading.wait, WAIT_S)
    running.engine.cancel(row)
    go.set()
    await until(lambda: running.engine.pending == 0)
    monkeypatch.setattr(FileSource, "begin", begin)
    # The first group of the first layer, not six layers of sixteen.
    assert running.engine.streamed.stats().main.loads - before <= 16
    assert running.engine.counters.kv_used_bytes == 0
    assert (await running.ask(plan(PROMPT, max_tokens=6))).text == expected.text


async def test_slots_that_were_given_back_change_no_answer(
    folders: Folders, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(folders("records"))
    stream = running.engine.streamed
    expected = await running.ask(plan(PROMPT, max_tokens=6))
    held = stream.stats().slab_bytes
    for slots in (1, 4):
        await running.engine.call(lambda slots=slots: stream._stream.resize(slots))
        assert stream.stats().main.slots == slots
        assert (await running.ask(plan(PROMPT, max_tokens=6))).text == expected.text
    assert stream.stats().slab_bytes == held


async def test_what_was_learned_is_there_after_a_restart(
    folders: Folders, start_streamed: StartStreamed, tmp_path: Path
) -> None:
    launch = StreamLaunch(slots=4, working_slots=16, chunk=64, usage_folder=str(tmp_path / "usage"))
    running = await start_streamed(folders("stacked"), launch)
    await running.ask(plan(PROMPT, max_tokens=6))
    heat = running.engine.streamed._stream.heat()
    running.stop()
    running.engine.join(WAIT_S)
    assert len(list((tmp_path / "usage").iterdir())) == 1
    running = await start_streamed(folders("stacked"), launch)
    now = running.engine.streamed._stream.heat()
    assert [layer.layer for layer in now.layers] == [1, 2, 3, 4, 5, 6]
    for then, layer in zip(heat.layers, now.layers, strict=True):
        # The pass that warms it up is learned from as well.
        assert all(later >= 0.9 * earlier for earlier, later in zip(then.counts, layer.counts, strict=True))
        # Prompts ask nothing of the last layer.
        assert sum(layer.counts) >= (6 * 4 if layer.layer == 6 else 100)
        assert len(layer.resident) == 4


async def test_a_model_that_fits_is_held_and_reads_nothing_more(
    folders: Folders, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(
        folders("stacked"), StreamLaunch(slots=16, working_slots=0, chunk=64, prefetch=False)
    )
    before = running.engine.streamed.stats().main
    assert before.resident == 6 * 16
    few = await start_streamed(folders("stacked"))
    wanted = plan(PROMPT, max_tokens=8)
    assert (await running.ask(wanted)).text == (await few.ask(wanted)).text
    assert running.engine.streamed.stats().main.read_bytes == before.read_bytes


async def test_a_prompt_reads_nothing_for_the_last_layer(
    folders: Folders, start_streamed: StartStreamed
) -> None:
    running = await start_streamed(folders("stacked"))
    layers = running.engine.streamed._stream._main.layers
    before = [layer.hits + layer.misses for layer in layers]
    await running.ask(plan(PROMPT, max_tokens=1))
    asked = [layer.hits + layer.misses - one for layer, one in zip(layers, before, strict=True)]
    # The one pass that gives a token asks for its four.
    assert asked[-1] == 4
    assert all(count > 3 * 8 for count in asked[:-1])


async def test_stats_count_what_was_read(folders: Folders, start_streamed: StartStreamed) -> None:
    running = await start_streamed(folders("records"))
    before = running.engine.streamed.stats().main
    await running.ask(plan(PROMPT, max_tokens=6))
    after = running.engine.streamed.stats()
    record = 3 * 256 * 128 * 4
    assert after.main.misses - before.misses > 50
    assert after.main.read_bytes - before.read_bytes == (after.main.misses - before.misses) * record
    assert after.last_turn is not None
    assert after.last_turn.read_bytes == after.main.read_bytes - before.read_bytes
    assert after.last_turn.misses == after.main.misses - before.misses
    assert (after.io, after.form) != ("", "")
