"""[history] changed while the server serves."""

from __future__ import annotations

from pathlib import Path

from tests.tools.responses_client import fetch, post, respond
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served, serve, until


def write(home: Path, history: str) -> None:
    (config,) = home.rglob("config.toml")
    config.write_text(f"[history]\n{history}\n")


async def reload(served: Served, home: Path, history: str) -> list[str]:
    write(home, history)
    return list((await served.request("POST", "/api/config/reload")).body["changed"])


async def test_history_that_a_reload_switches_off_is_forgotten_and_stays_so(tmp_path: Path) -> None:
    make_scripted_model(tmp_path / "m", "a", tokens=3)
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, config='[history]\nmax_bytes = "512MiB"\n'
    ) as served:
        one = await respond(served)

        async def has(entries: int) -> bool:
            return bool((await served.request("GET", "/api/history")).body["entries"] == entries)

        await until(lambda: has(1))
        assert await reload(served, tmp_path, "max_bytes = 0") == ["history.max_bytes"]
        assert (await fetch(served, one["id"])).status == 404
        assert (await post(served, previous_response_id=one["id"])).status == 404
        assert (await respond(served))["store"] is False
        await until(lambda: has(0))
        await reload(served, tmp_path, 'max_bytes = "512MiB"')
        assert (await fetch(served, one["id"])).status == 404
        two = await respond(served)
        assert (await fetch(served, two["id"])).status == 200
