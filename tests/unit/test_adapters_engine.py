"""Adapters in the engine: the text that mlx-lm gives, the model as it was without one, and who makes room."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

from mlxpool.shared import adapters as names
from mlxpool.shared.control import AdaptersLaunch
from mlxpool.shared.errors import ApiError
from mlxpool.worker.adapters import mounted as mounted_module
from mlxpool.worker.adapters.layers import (
    Adapted,
    AdaptedExperts,
    AdaptedLinear,
    AdapterSet,
    Switch,
    Term,
    find,
    mount,
)
from mlxpool.worker.adapters.mounted import Adapters
from mlxpool.worker.adapters.reading import read
from tests.tools import tiny_adapters
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Running, plan
from tests.tools.tiny_fixture import TinyModels

PROMPTS = [[*b"tell me"], [*b"a longer prompt than that"]]
TOKENS = 16
ROOM_BYTES = 1 << 30


def plain_tokens(model: Any, prompt: Sequence[int]) -> list[int]:
    """What a loop of mlx-lm's own generates."""
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS)
    return [int(token) for token, _ in steps]


def text(tokens: Sequence[int]) -> str:
    return bytes(token % 256 for token in tokens).decode(errors="replace")


class Mounting:
    """A running engine and its adapters, over a folder of some."""

    def __init__(self, running: Running, folder: Path, memory_bytes: int = ROOM_BYTES) -> None:
        self.running, self.folder = running, folder
        # The engine's model counts its passes; adapters are for the one inside.
        inner = running.model._model

        class Inside:
            switch = Switch(inner)
            call = running.engine.call

        made = cache_maker(inner)
        self.adapters = Adapters(Inside(), made, AdaptersLaunch(str(folder)), memory_bytes)

    async def ask(self, adapter: str, prompt: Sequence[int]) -> str:
        held = await self.adapters.of(adapter)
        client = await self.running.ask(plan(prompt, TOKENS), adapters=held)
        return client.text


def cache_maker(model: Any) -> Callable[[], list[Any]]:
    return lambda: list(make_prompt_cache(model))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b", "c"), 1):
        tiny_adapters.make(tmp_path / name, seed)
    return tmp_path


async def test_an_adapters_text_is_that_of_mlx_lms_own_loading(
    start: Start, shelf: Path, tiny: TinyModels
) -> None:
    mounting = Mounting(await start("llama"), shelf)
    seen = set()
    for name in ("a", "b"):
        model, _ = load_model(tiny("llama"))
        load_adapters(model, str(shelf / name))
        for prompt in PROMPTS:
            wanted = text(plain_tokens(model, prompt))
            assert await mounting.ask(name, prompt) == wanted
            seen.add(wanted)
    assert len(seen) == 4


async def test_two_adapters_are_the_weights_with_both_added(
    start: Start, shelf: Path, tiny: TinyModels
) -> None:
    mounting = Mounting(await start("llama"), shelf)
    model, _ = load_model(tiny("llama"))
    for name in ("a", "b"):
        weights: Any = mx.load(str(shelf / name / "adapters.safetensors"))
        for layer in tiny_adapters.LAYERS:
            spot = find(model, layer)
            delta = 2.0 * (weights[f"{layer}.lora_a"] @ weights[f"{layer}.lora_b"])
            spot.layer.weight = spot.layer.weight + delta.T
    for prompt in PROMPTS:
        assert await mounting.ask("b+a", prompt) == text(plain_tokens(model, prompt))


async def test_a_quantised_model_takes_the_same_adapter(start: Start, shelf: Path, tiny: TinyModels) -> None:
    mounting = Mounting(await start("quantised"), shelf)
    model, _ = load_model(tiny("dequantised"))
    load_adapters(model, str(shelf / "a"))
    assert await mounting.ask("a", PROMPTS[0]) == text(plain_tokens(model, PROMPTS[0]))


def test_a_packed_layer_and_one_of_experts_add_what_mlx_lms_add() -> None:
    mx.random.seed(3)
    packed = nn.QuantizedLinear.from_linear(nn.Linear(64, 32), 32, 4)
    theirs = LoRALinear.from_base(packed, r=4, scale=2.0)
    theirs.lora_b = mx.random.normal((4, 32))
    x = mx.random.normal((2, 5, 64))
    ours = AdaptedLinear(packed, [Term(theirs.lora_a, 2.0 * theirs.lora_b)])
    assert mx.allclose(ours(x), theirs(x), atol=1e-5).item()
    experts = SwitchLinear(64, 32, 3, bias=False)
    theirs = LoRASwitchLinear.from_base(experts, r=4, scale=2.0)
    theirs.lora_b = mx.random.normal((3, 32, 4))
    x, which = mx.random.normal((2, 1, 1, 64)), mx.array([[0, 2], [1, 0]])
    ours = AdaptedExperts(experts, [Term(theirs.lora_a, 2.0 * theirs.lora_b)])
    assert mx.allclose(ours(x, which), theirs(x, which), atol=1e-5).item()
    assert not mx.allclose(ours(x, which), experts(x, which), atol=1e-2).item()


def test_with_no_adapter_on_the_model_is_what_was_loaded(tiny: TinyModels, shelf: Path) -> None:
    model, _ = load_model(tiny("llama"))
    tokens = mx.array([PROMPTS[1]])
    before, layers = model(tokens), dict(model.named_modules())
    one, two = (AdapterSet((name,), [mount(model, read(shelf / name, ROOM_BYTES))]) for name in ("a", "b"))
    switch = Switch(model)
    first = switch.under(one)(tokens)
    assert any(isinstance(module, Adapted) for _, module in model.named_modules())
    second = switch.under(two)(tokens)
    assert not mx.array_equal(first, second).item()
    assert mx.array_equal(switch.under(one)(tokens), first).item()
    assert mx.array_equal(switch.under(None)(tokens), before).item()
    assert dict(model.named_modules()) == layers


async def test_rows_of_four_sets_share_the_engine_and_not_a_pass(start: Start, shelf: Path) -> None:
    running = await start("llama", batch=8, width=64)
    mounting = Mounting(running, shelf)
    sets = [await mounting.adapters.of(name) for name in ("none", "a", "b", "a+b")]
    alone = [
        [(await running.ask(plan(prompt, TOKENS), adapters=held)).text for held in sets] for prompt in PROMPTS
    ]
    running.model.shapes.clear()
    rows = [[running.row(plan(prompt, TOKENS), adapters=held) for held in sets] for prompt in PROMPTS]
    running.engine.submit_all([row for line in rows for _, row in line])
    clients = [[client for client, _ in line] for line in rows]
    await asyncio.wait_for(asyncio.gather(*(client.ended.wait() for line in clients for client in line)), 60)
    assert [[client.text for client in line] for line in clients] == alone
    assert {client.usage.lane for line in clients for client in line} == {"turns"}
    # Both prompts of a set decode together, those of two sets never.
    decoding = [rows for rows, width in running.model.shapes if width == 1]
    assert max(decoding) == 2


async def test_the_least_recently_used_that_nobody_uses_makes_room(
    start: Start, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start("llama")
    probe = Mounting(running, shelf)
    size = (await probe.adapters.mount("a", None)).bytes
    file = (shelf / "a" / "adapters.safetensors").stat().st_size
    monkeypatch.setattr(mounted_module, "MAX_BYTES", 2 * size + (file - size) + size // 2)
    mounting = Mounting(running, shelf)

    def names() -> list[str]:
        return [one.id for one in mounting.adapters.listed()]

    for name in ("a", "b", "a", "c"):
        await mounting.adapters.of(name)
    assert names() == ["a", "c"]
    held = await mounting.adapters.of("a")
    with mounting.adapters.in_use(held):
        await mounting.adapters.of("b")
        assert names() == ["a", "b"]
        with mounting.adapters.in_use(await mounting.adapters.of("b")):
            with pytest.raises(ApiError, match=r"takes [\d,]+ bytes; [\d,]+ of the [\d,]+") as refused:
                await mounting.adapters.of("c")
            assert refused.value.param == "adapter"
            # What is unmounted under a request is held until its end.
            mounting.adapters.unmount("a")
            with pytest.raises(ApiError, match="are in use"):
                await mounting.adapters.of("c")
        # All three at once never fit.
        with pytest.raises(ApiError, match="are in use"):
            await mounting.adapters.of("a+b+c")
    await mounting.adapters.of("c")
    assert "c" in names()


async def test_a_file_larger_than_all_may_be_is_not_read(
    start: Start, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted_module, "MAX_BYTES", 1000)
    mounting = Mounting(await start("llama"), shelf)
    with pytest.raises(ApiError, match="may take 1,000"):
        await mounting.adapters.of("a")


async def test_one_that_the_model_can_not_run_with_is_refused_and_leaves_it_as_it_was(
    start: Start, tmp_path: Path
) -> None:
    running = await start("llama")
    inner = running.model._model
    mounting = Mounting(running, tmp_path)
    before = await mounting.ask("none", PROMPTS[0])
    file = tiny_adapters.make(tmp_path / "broken", scale=20000.0) / "adapters.safetensors"
    save_file({name: value * 1e30 for name, value in load_file(file).items()}, file)
    with pytest.raises(ApiError, match="logits are no numbers"):
        await mounting.adapters.of("broken")
    assert await mounting.ask("none", PROMPTS[0]) == before
    assert not any(isinstance(module, Adapted) for _, module in inner.named_modules())


async def test_half_precision_files_are_read_for_what_they_are(start: Start, shelf: Path) -> None:
    mounting = Mounting(await start("llama"), shelf)
    weights: Any = mx.load(str(shelf / "a" / "adapters.safetensors"))
    for dtype in (mx.bfloat16, mx.float16):
        file = str(shelf / "b" / "adapters.safetensors")
        mx.save_safetensors(file, {name: value.astype(dtype) for name, value in weights.items()})
        held = await mounting.adapters.of("b")
        assert held is not None
        ((_, adapted), *_) = held._changes
        term = adapted._terms[0]
        assert term.a.dtype == term.b.dtype == mx.float32
        assert mx.allclose(term.a, weights[f"{next(iter(held.mounts[0].terms))}.lora_a"], atol=1e-2).item()


async def test_a_layer_that_the_model_reads_instead_of_calling_is_found_out(tmp_path: Path) -> None:
    class Peeking(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:  # noqa: ARG002
            return mx.zeros((*tokens.shape, 8)) @ self.proj.weight

    class Idle:
        switch = Switch(Peeking())

        async def call(self, function: Callable[[], Any]) -> Any:
            return function()

    tiny_adapters.make(tmp_path / "a", layers={"proj": (8, 8)})
    adapters = Adapters(Idle(), list, AdaptersLaunch(str(tmp_path)), ROOM_BYTES)
    with pytest.raises(ApiError, match="does not run with it: AttributeError"):
        await adapters.of("a")
    assert isinstance(Idle.switch.under(None).proj, nn.Linear)


async def test_a_folder_mounted_by_its_path_is_not_followed_elsewhere_later(
    start: Start, shelf: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mounting = Mounting(await start("llama"), shelf)
    elsewhere = tiny_adapters.make(tmp_path_factory.mktemp("elsewhere") / "mine", 7)
    models = tmp_path_factory.mktemp("models").resolve()
    folder = tiny_adapters.make(models / "beside" / "mine", 8)
    assert (await mounting.adapters.mount("mine", folder)).path == str(folder)
    # The folder itself, and one that it lies in.
    for moved, target in ((folder, elsewhere), (folder.parent, elsewhere.parent)):
        await mounting.adapters.mount("mine", folder)
        moved.rename(models / "aside")
        moved.symlink_to(target)
        with pytest.raises(ApiError, match="its path leads elsewhere now") as refused:
            await mounting.adapters.of("mine")
        assert refused.value.param == "adapter"
        assert mounting.adapters.listed() == []
        moved.unlink()
        (models / "aside").rename(moved)


async def test_the_same_weights_under_two_names_are_held_once(start: Start, shelf: Path) -> None:
    mounting = Mounting(await start("llama"), shelf)
    for name in ("same", "too"):
        shutil.copytree(shelf / "a", shelf / name)
    (first,), (second,) = [
        held.mounts for held in [await mounting.adapters.of(name) for name in ("a", "same")] if held
    ]
    assert first is second
    held = await mounting.adapters.of("a")
    for name in ("a", "same"):
        mounting.adapters.unmount(name)
    with mounting.adapters.in_use(held):
        again = await mounting.adapters.of("too")
        assert again is not None
        assert again.mounts == (first,)
    both = await mounting.adapters.of("too+same")
    assert both is not None
    assert both.mounts == (first, first)
    assert both.namespace != again.namespace


async def test_what_is_kept_ready_is_bounded_however_many_sets_are_asked_for(
    start: Start, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted_module, "_SETS_KEPT", 2)
    mounting = Mounting(await start("llama"), shelf)
    made = {name: await mounting.adapters.of(name) for name in ("a", "b", "a", "a+b", "c", "a+b+c")}
    assert len(mounting.adapters._sets) == 2
    assert await mounting.adapters.of("a+b+c") is made["a+b+c"]
    assert await mounting.adapters.of("a") is not made["a"]


async def test_layers_that_are_wider_than_the_files_are_counted_as_they_are(
    start: Start, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shelf / "a" / "adapters.safetensors"
    weights: Any = mx.load(str(file))
    mx.save_safetensors(str(file), {name: value.astype(mx.float16) for name, value in weights.items()})
    monkeypatch.setattr(mounted_module, "MAX_BYTES", file.stat().st_size * 3 // 2)
    mounting = Mounting(await start("llama"), shelf)
    with pytest.raises(ApiError, match=r"it takes [\d,]+ bytes; 0 of the"):
        await mounting.adapters.of("a")
    assert mounting.adapters.listed() == []


async def test_files_that_were_refused_are_read_again_once_they_change_or_on_request(
    start: Start, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounting = Mounting(await start("llama"), shelf)
    read: list[Path] = []
    whole = mounted_module.reading.read
    monkeypatch.setattr(
        mounted_module.reading, "read", lambda folder, most: read.append(folder) or whole(folder, most)
    )
    tiny_adapters.make(shelf / "a", layers={"model.layers.0.self_attn.q_proj": (64, 32)})
    for _ in range(3):
        with pytest.raises(ApiError, match=r"^adapter 'a' can't be mounted: .* a layer of \[32, 64\]"):
            await mounting.adapters.of("a")
    assert len(read) == 1
    with pytest.raises(ApiError, match="a layer of"):
        await mounting.adapters.mount("a", None)
    assert len(read) == 2
    tiny_adapters.make(shelf / "a")
    assert await mounting.adapters.of("a") is not None


def test_one_adapters_config_never_meets_another_ones_numbers(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = names.read_config

    def replaced(folder: Path) -> bytes:
        config = whole(folder)
        fresh = tiny_adapters.make(shelf / ".fresh", 9, scale=1.0)
        for name in (names.WEIGHTS_FILE, names.CONFIG_FILE):
            (fresh / name).replace(folder / name)
        return config

    monkeypatch.setattr(names, "read_config", replaced)
    with pytest.raises(names.AdapterError, match="replaced while they were read"):
        read(shelf / "a", ROOM_BYTES)
    monkeypatch.undo()
    assert read(shelf / "a", ROOM_BYTES).facts.scale == 1.0


def test_a_layer_has_one_name(tiny: TinyModels) -> None:
    model, _ = load_model(tiny("llama"))
    assert find(model, "model.layers.1.self_attn.q_proj").layer is model.layers[1].self_attn.q_proj
    for number in ("01", "-1", "2", "\u0661", "1" * 5000):
        with pytest.raises(names.AdapterError, match="has no layer"):
            find(model, f"model.layers.{number}.self_attn.q_proj")
