"""What shows a running server: events, metrics, logs, stats, traces; and settings that change under it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.tools.scripted_script import expected_text, make_scripted_model, read_events
from tests.tools.served import Answer, Served, chat_body, serve, until


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, tokens=30, tokens_per_s=100.0)
    return tmp_path / "m"


class Viewer:
    """A page that watches: every event it was sent, in order."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.events: list[tuple[str, Any]] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        name = ""
        async for raw in self.answer.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                self.events.append((name, json.loads(line[6:])))

    def all(self, name: str) -> list[Any]:
        return [data for kind, data in self.events if kind == name]

    def close(self) -> None:
        self._task.cancel()


@contextlib.asynccontextmanager
async def watching(served: Served, query: str = "", **headers: str) -> AsyncIterator[Viewer]:
    async with served.client.get(f"{served.url}/api/events{query}", headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        viewer = Viewer(answer)
        try:
            yield viewer
        finally:
            viewer.close()


async def test_a_viewer_sees_what_is_and_then_every_change(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served, watching(served) as viewer:
        await until(lambda: len(viewer.events) >= 3)
        assert [name for name, _ in viewer.events[:3]] == ["hello", "pool", "models"]
        assert viewer.all("pool")[0]["workers"] == []
        assert [(m["id"], m["state"]) for m in viewer.all("models")[0]] == [("a", "absent"), ("b", "absent")]
        await served.chat("a")
        await until(
            lambda: (
                viewer.all("pool")[-1]["workers"] != []
                and viewer.all("pool")[-1]["workers"][0]["active"] == 0
            )
        )
        assert viewer.all("pool")[-1]["workers"][0]["state"] == "ready"
        await until(lambda: [m["state"] for m in viewer.all("models")[-1]] == ["ready", "absent"])
        assert [e["event"] for e in viewer.all("event")] == ["load", "ready"]
        await served.request("POST", "/api/models/a/unload")
        await until(lambda: "gone" in [e["event"] for e in viewer.all("event")])
        await until(lambda: viewer.all("pool")[-1]["workers"] == [])


async def test_a_new_model_folder_is_told_to_viewers_without_a_question(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served, watching(served) as viewer:
        await until(lambda: viewer.all("models") != [])
        make_scripted_model(models, "c")
        await until(lambda: [m["id"] for m in viewer.all("models")[-1]] == ["a", "b", "c"], 8.0)


async def test_the_pool_is_told_at_most_five_times_a_second(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served, watching(served) as viewer:
        await served.chat("a")
        before = len(viewer.all("pool"))
        begun = asyncio.get_running_loop().time()
        for _ in range(3):
            await asyncio.gather(*(served.chat("a", max_tokens=2) for _ in range(30)))
        took = asyncio.get_running_loop().time() - begun
        assert len(viewer.all("pool")) - before <= 5 * took + 2


async def test_a_log_is_told_line_by_line_to_those_who_asked_for_it(tmp_path: Path, models: Path):
    make_scripted_model(models, "loud", stderr=["first words", "<b>second</b>"])
    async with (
        serve(tmp_path, models=models, scripted=True) as served,
        watching(served, "?logs=loud") as viewer,
        watching(served) as other,
    ):
        await served.chat("loud")
        await until(lambda: any("<b>second</b>" in log["lines"] for log in viewer.all("log")))
        assert {log["model"] for log in viewer.all("log")} == {"loud"}
        assert other.all("log") == []
        async with watching(served, "?logs=*") as late:  # a later viewer gets what was written before
            await until(lambda: any("first words" in log["lines"] for log in late.all("log")))
        assert (await served.request("GET", "/api/events?logs=none")).status == 404
        told = await served.request("GET", "/api/models/loud/logs?n=500")
        assert "first words" in told.body["lines"]
        assert (await served.request("GET", "/api/models/loud/logs?n=1")).body["lines"] == told.body["lines"][
            -1:
        ]
        for n in ("0", "-1", "x", "99999"):
            assert (await served.request("GET", f"/api/models/loud/logs?n={n}")).body["error"]["param"] == "n"


async def test_a_viewer_that_does_not_read_costs_nobody_anything(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(b"GET /api/events?logs=* HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for i in range(30):
            assert (await served.chat("a", f"q{i}", max_tokens=1)).status == 200
        writer.close()
        del reader


async def test_viewers_beyond_the_limit_are_refused(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(64):
            await stack.enter_async_context(watching(served))
        assert (await served.request("GET", "/api/events")).code == "queue_full"


async def test_events_need_a_key_where_keys_are_set(tmp_path: Path, models: Path):
    config = '[server]\napi_keys = ["k"]\n'
    async with serve(tmp_path, models=models, scripted=True, config=config) as served:
        for path in ("/api/events", "/metrics", "/api/models/a/logs", "/api/models/a/stats"):
            assert (await served.request("GET", path)).status == 401
        assert (await served.request("POST", "/api/config/reload")).status == 401
        async with watching(served, Authorization="Bearer k") as viewer:
            await until(lambda: viewer.all("hello") != [])


async def test_metrics_count_what_happened(tmp_path: Path, models: Path):
    make_scripted_model(models, "bad", fail_load="no")
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a")
        await served.stream("a")
        await served.chat("bad")
        await served.chat('x"\n{evil}')  # no model: no label
        body = chat_body("a", stream=True)
        async with served.client.post(f"{served.url}/v1/chat/completions", json=body) as leaver:
            await leaver.content.readuntil(b"\n\n")
            leaver.close()
        await until(lambda: bool([e for e in read_events(models / "a") if e["event"] == "cancelled"]))
        answer = await served.request("GET", "/metrics")
        text = answer.body.decode()
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = dict(re.findall(r"^(\S+?(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
        assert found['mlxpool_requests_total{model="a",outcome="ok"}'] == "2.0"
        assert found['mlxpool_requests_total{model="a",outcome="cancelled"}'] == "1.0"
        assert found['mlxpool_requests_total{model="bad",outcome="error"}'] == "1.0"
        assert found["mlxpool_loads_total"] == "2.0"
        assert found['mlxpool_worker_state{model="a",state="ready"}'] == "1.0"
        assert found['mlxpool_first_byte_seconds_count{model="a"}'] == "3.0"
        assert found['mlxpool_request_seconds_bucket{le="+Inf",model="a"}'] == "3.0"
        assert float(found["mlxpool_reserved_bytes"]) > 0
        assert "evil" not in text


async def test_stats_say_what_a_worker_counts_and_of_others_the_state(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        assert (await served.request("GET", "/api/models/a/stats")).body == {"model": "a", "state": "absent"}
        await served.chat("a")
        stats = (await served.request("GET", "/api/models/a/stats")).body
        assert (stats["state"], stats["requests"], stats["tokens"]) == ("ready", 1, 30)
        assert stats["batch"]["configured"] == 8
        assert stats["admission"]["enforced_context"] == 2048
        assert (await served.request("GET", "/api/models/none/stats")).status == 404


async def test_a_trace_has_a_line_per_request_with_its_phases(tmp_path: Path, models: Path):
    config = "[server]\ntrace = true\n"
    async with serve(tmp_path, models=models, scripted=True, config=config) as served:
        await served.request("POST", "/v1/chat/completions", chat_body("a"), X_Request_Id="one")
        await served.stream("a")

        def parents_lines() -> list[Any]:
            written = (served.home / "logs" / "trace.jsonl").read_text().splitlines()
            return [line for line in map(json.loads, written) if line["process"] == "parent"]

        # A request's line is written after its last byte, which its client may have read by then.
        await until(lambda: len(parents_lines()) >= 2)
        ours = parents_lines()
        assert [(line["model"], line["outcome"]) for line in ours] == [("a", "ok")] * 2
        assert ours[0]["request"] == "one"
        phases = ours[0]["phases_ms"]
        assert list(phases) == ["parse", "queue", "first_write", "last_write"]
        assert sorted(phases.values()) == list(phases.values())


async def reload(served: Served, config: str, by: str) -> Any:
    (served.home / "config.toml").write_text(config)
    if by == "http":
        return (await served.request("POST", "/api/config/reload")).body
    count = served.log().count("config:")
    served.process.send_signal(signal.SIGHUP)
    await until(lambda: served.log().count("config:") > count)
    return None


@pytest.mark.parametrize("by", ["http", "signal"])
async def test_aliases_keys_and_limits_change_without_a_restart(tmp_path: Path, models: Path, by: str):
    async with serve(tmp_path, models=models, scripted=True, config="") as served:
        assert (await served.chat("gpt-4")).status == 404
        told = await reload(served, '[aliases]\n"gpt-*" = "b"\n[defaults]\nmodel = "a"\n', by)
        if told is not None:
            assert told == {"changed": ["aliases.gpt-*", "defaults.model"], "needs_restart": []}
        assert (await served.chat("gpt-4", "q")).text == expected_text("b", "q", tokens=30)
        assert (await served.chat(None, "q")).text == expected_text("a", "q", tokens=30)
        await reload(served, '[server]\napi_keys = ["k"]\n', by)
        assert (await served.request("GET", "/v1/models")).status == 401
        assert (await served.request("GET", "/v1/models", Authorization="Bearer k")).status == 200


async def test_what_needs_a_restart_is_named_and_a_bad_config_changes_nothing(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, config='[aliases]\n"x" = "a"\n') as served:
        told = await reload(served, '[server]\nallowed_hosts = ["h.example"]\nhost = "127.0.0.2"\n', "http")
        assert told == {"changed": ["aliases.x", "server.allowed_hosts"], "needs_restart": ["server.host"]}
        refused = await reload(served, "[pool]\nidle_ttl = 'soon'\n", "http")
        assert "idle_ttl" in refused["error"]["message"]
        assert "nothing was changed" in refused["error"]["message"]
        await reload(served, "[pool\n", "signal")
        assert (await served.request("GET", "/health", Host="h.example")).status == 200


async def test_a_model_that_is_to_be_served_differently_is_loaded_anew_after_its_requests(
    tmp_path: Path, models: Path
):
    async with serve(tmp_path, models=models, scripted=True, config="") as served:
        stream = asyncio.create_task(served.stream("a", "q"))
        await served.until_state("a", "ready")
        pid = (await served.worker("a"))["pid"]
        await asyncio.sleep(0.1)
        told = await reload(served, '[models."a"]\ncontext = 512\n', "http")
        assert told["changed"] == ["models.a.context"]
        assert (await stream).text == expected_text("a", "q", tokens=30)
        assert (await served.chat("a", "q")).status == 200
        assert (await served.worker("a"))["pid"] != pid
        assert (await served.request("GET", "/api/models/a/stats")).body["admission"][
            "enforced_context"
        ] == 512


async def test_a_reload_while_a_model_loads_loses_no_request_and_no_process(tmp_path: Path, models: Path):
    make_scripted_model(models, "slow", load_s=1.0)
    async with serve(tmp_path, models=models, scripted=True, config="") as served:
        waiting = [asyncio.create_task(served.chat("slow", str(i))) for i in range(3)]
        await served.until_state("slow", "loading")
        await reload(served, '[models."slow"]\ncontext = 1024\n[pool]\nqueue_limit = 9\n', "http")
        answers = await asyncio.gather(*waiting)
        assert [a.text for a in answers] == [expected_text("slow", str(i)) for i in range(3)]
        await served.until_state("slow", "absent", "ready")
        pool = await served.pool()
        live = [w["pid"] for w in pool["workers"] if w["pid"] is not None]
        assert sorted(live) == sorted(served.worker_pids())


# Holds one of two models of 400 MB.
ROOM_FOR_ONE = '[pool]\nmemory_budget = "1400MB"\n'


@contextlib.asynccontextmanager
async def one_waits_for_room(
    tmp_path: Path, config: str = ROOM_FOR_ONE, b_in: str = "m"
) -> AsyncIterator[tuple[Served, asyncio.Task[Answer]]]:
    """b's request waits while a, which holds the room, drains for a second."""
    make_scripted_model(tmp_path / "m", "a", weights_bytes=400_000_000, drain_s=1.0)
    make_scripted_model(tmp_path / b_in, "b", weights_bytes=400_000_000)
    settings = {"cache.ram": "0"}
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, config=config, settings=settings
    ) as served:
        await served.chat("a")
        waiting = asyncio.create_task(served.chat("b", "q"))
        await served.until_state("b", "starting")
        yield served, waiting


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(ROOM_FOR_ONE, id="nothing"),
        pytest.param(ROOM_FOR_ONE + "[cache]\nverify = false\n", id="how prompts are kept"),
        pytest.param('[pool]\nmemory_budget = "3GB"\n', id="more memory"),
        pytest.param(ROOM_FOR_ONE + '[models."b"]\ncontext = 512\n', id="its context"),
    ],
)
async def test_a_reload_while_a_model_waits_for_room_is_what_it_is_then_loaded_by(tmp_path: Path, later: str):
    async with one_waits_for_room(tmp_path) as (served, waiting):
        assert await served.state("a") == "draining"
        assert "changed" in await reload(served, later, "http")
        assert (await waiting).text == expected_text("b", "q")
        stats = (await served.request("GET", "/api/models/b/stats")).body
        assert stats["admission"]["enforced_context"] == (512 if "512" in later else 2048)
        # It was launched under the settings of now: there is nothing to load it anew for.
        starts = [event for event in read_events(tmp_path / "m" / "b") if event["event"] == "started"]
        assert len(starts) == 1
        assert "Traceback" not in served.log()


async def test_who_waits_for_a_model_that_the_new_budget_can_not_hold_hears_so(tmp_path: Path):
    async with one_waits_for_room(tmp_path) as (served, waiting):
        await reload(served, '[pool]\nmemory_budget = "500MB"\n', "http")
        refused = await waiting
        assert (refused.status, refused.code) == (400, "model_too_large")


async def test_who_waits_for_a_model_that_a_reload_takes_away_is_served_once_more(tmp_path: Path):
    named = f'[models."b"]\npath = "{tmp_path}/elsewhere/b"\n'
    async with one_waits_for_room(tmp_path, ROOM_FOR_ONE + named, "elsewhere") as (served, waiting):
        await reload(served, ROOM_FOR_ONE, "http")
        assert (await waiting).text == expected_text("b", "q")
        assert (await served.chat("b", "q")).status == 404


async def test_who_waits_for_a_model_whose_files_break_meanwhile_hears_what_is_wrong(tmp_path: Path):
    async with one_waits_for_room(tmp_path) as (served, waiting):
        (tmp_path / "m" / "b" / "config.json").write_text("{")
        assert "changed" in await reload(served, ROOM_FOR_ONE, "http")
        refused = await waiting
        assert (refused.status, refused.code) == (503, "load_failed")
        assert "config.json" in refused.body["error"]["message"]
        await served.until_state("a", "absent")
        assert (await served.chat("a", "q")).text == expected_text("a", "q")
        assert "Traceback" not in served.log()


async def test_a_lowered_budget_lets_idle_models_go(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, config="") as served:
        await served.chat("a")
        await served.chat("b")
        await reload(served, '[cache]\nram = 0\n[pool]\nmemory_budget = "700MB"\n', "http")
        await served.until_state("a", "absent")
        assert await served.state("b") == "ready"
        await reload(served, '[models."b"]\npin = true\n', "http")
        assert (await served.worker("b"))["pinned"] is True


async def test_a_budget_that_was_lowered_and_raised_again_holds_nobody(tmp_path: Path, models: Path):
    make_scripted_model(models, "long", tokens=3000, tokens_per_s=100.0)
    async with serve(tmp_path, models=models, scripted=True, config="") as served:
        stream = asyncio.create_task(served.stream("long"))
        await served.until_state("long", "ready")
        await reload(served, '[pool]\nmemory_budget = "100MB"\n', "http")
        await reload(served, "", "http")
        async with asyncio.timeout(60):
            assert (await served.chat("long", max_tokens=2)).status == 200
        stream.cancel()
