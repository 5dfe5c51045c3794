"""Which tokenizers the parent holds, and when it reads one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from mlxpool.parent.edge import tokenizers
from mlxpool.parent.edge.tokenizers import Tokenizers
from mlxpool.parent.library import LibraryModel
from mlxpool.shared.config import ModelSettings
from mlxpool.shared.errors import ApiError
from tests.tools.scripted_script import make_scripted_model


class Opened:
    """Stands before the real opening and notes what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        self._real = tokenizers._open
        monkeypatch.setattr(tokenizers, "_open", self)

    def __call__(self, model: LibraryModel) -> tokenizers.Counter:
        with self._lock:
            self.names.append(model.name)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return self._real(model)
        finally:
            with self._lock:
                self._running -= 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


def model(tmp_path: Path, name: str, **settings: object) -> LibraryModel:
    folder = tmp_path / name
    if not folder.exists():
        make_scripted_model(tmp_path, name)
    return LibraryModel(name, folder, "home", ModelSettings(**settings))  # type: ignore[arg-type]


async def test_many_who_ask_at_once_wait_for_one_reading(tmp_path: Path, opened: Opened) -> None:
    held, a = Tokenizers(), model(tmp_path, "a")
    counters = await asyncio.gather(*(held.of(a) for _ in range(10)))
    assert opened.names == ["a"]
    assert len(set(map(id, counters))) == 1


async def test_the_two_used_last_are_held(tmp_path: Path, opened: Opened) -> None:
    held = Tokenizers()
    for name in ("a", "b", "a", "c", "a", "b"):
        await held.of(model(tmp_path, name))
    assert opened.names == ["a", "b", "c", "b"]


async def test_of_many_models_asked_for_at_once_two_are_read_at_a_time_and_each_once(
    tmp_path: Path, opened: Opened
) -> None:
    held, names = Tokenizers(), ["a", "b", "c", "d", "e", "f"]
    models = [model(tmp_path, name) for name in names]
    await asyncio.gather(*(held.of(one) for one in [*models, *models]))
    assert sorted(opened.names) == names
    assert opened.most_at_once <= 2
    await asyncio.gather(*(held.of(one) for one in models[-2:]))
    assert opened.names[6:] == []


async def test_other_files_or_settings_are_another_tokenizer(tmp_path: Path, opened: Opened) -> None:
    held = Tokenizers()
    first = await held.of(model(tmp_path, "a"))
    thinking = await held.of(model(tmp_path, "a", thinking=True))
    assert thinking is not first
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert (await held.of(model(tmp_path, "a"))).tokenizer.template_source != first.tokenizer.template_source
    assert opened.names == ["a", "a", "a"]


async def test_who_leaves_does_not_end_the_reading_for_others(tmp_path: Path, opened: Opened) -> None:
    held, a = Tokenizers(), model(tmp_path, "a")
    leaves, stays = asyncio.create_task(held.of(a)), asyncio.create_task(held.of(a))
    await asyncio.sleep(0)
    leaves.cancel()
    assert (await stays).tokenizer.has_template
    assert opened.names == ["a"]


async def test_a_folder_that_failed_is_read_again(tmp_path: Path, opened: Opened) -> None:
    held, a = Tokenizers(), model(tmp_path, "a")
    file = tmp_path / "a" / "tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(b"{}")
    for _ in range(2):
        with pytest.raises(ApiError, match=r"tokenizer of model 'a' can't be used: tokenizer.json") as caught:
            await held.of(a)
        assert (caught.value.status, caught.value.code) == (503, "load_failed")
    file.write_bytes(whole)
    assert (await held.of(a)).tokenizer.has_template
    assert opened.names == ["a", "a", "a"]
