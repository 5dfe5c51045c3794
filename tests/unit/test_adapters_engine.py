"""Adapters in the engine: the text that mlx-lm gives, the model as it was without one, and who makes room."""

from __future__ import annotations

import asyncio
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
