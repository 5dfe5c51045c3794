"""The HTTP surface: what it refuses and how it says so, and what it passes on untouched."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.tools import sse
from tests.tools.scripted_script import expected_text, make_scripted_model, read_events
from tests.tools.served import chat_body, gone, serve, until
from tests.tools.tiny_fixture import TinyModels

KEYS = '[server]\napi_keys = ["first-key", "second-key"]\nallowed_origins = ["https://app.example"]\n'


@pytest.fixture
def models(tmp_path: Path) -> Path:
    make_scripted_model(tmp_path / "m", "a")
    return tmp_path / "m"


BAD_BODIES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b'"model"', "must be a JSON object"),
    (b"\xff\xfe{}", "not valid JSON"),
    (b"[" * 100_000, "JSON"),
    (b'{"model": 5}', "model is 5; use a string"),
    (b'{"model": ["a"]}', 'model is ["a"]; use a string'),
    (b'{"model": "a", "keep_alive": true}', "keep_alive is true"),
    (b'{"model": "a", "keep_alive": "soon"}', 'keep_alive is "soon"'),
    (b'{"model": "a", "keep_alive": {}}', "keep_alive is {}"),
    (b"{}", "no model was named"),
]


async def test_bad_bodies_get_a_400_that_names_the_fault(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        for data, said in BAD_BODIES:
            answer = await served.request("POST", "/v1/chat/completions", data=data)
            assert (answer.status, answer.code) == (400, "invalid_request"), data[:40]
            assert said in answer.body["error"]["message"]
            assert answer.body["error"]["type"] == "invalid_request_error"
            assert "x-request-id" in answer.headers
        assert read_events(models / "a") == []  # nothing was started for any of them


LONG = "x" * 5000
ECHOED = [
    ("POST", "/v1/chat/completions", {"model": LONG}, {}),
    ("POST", "/v1/chat/completions", {"model": [LONG]}, {}),
    ("POST", "/v1/chat/completions", {"model": "a", "keep_alive": LONG}, {}),
    ("GET", f"/v1/models/{LONG}", None, {}),
    ("GET", f"/{LONG}", None, {}),
    ("PUT", "/v1/models", None, {"Content_Encoding": LONG}),
    ("GET", f"/static/{LONG}", None, {}),
    ("GET", f"/api/models/a/logs?n={LONG}", None, {}),
    ("GET", f"/api/fit?{LONG}=1", None, {}),
    ("GET", f"/api/fit?model=a&context={LONG}", None, {}),
    ("GET", f"/api/events?logs={LONG}", None, {}),
    ("POST", f"/api/models/{LONG}/load", None, {}),
    ("POST", "/api/models/a/unload", {LONG: 1}, {}),
    ("DELETE", f"/api/library/{LONG}", None, {}),
    ("POST", "/api/jobs", {LONG: 1}, {}),
    ("POST", "/api/jobs", {"kind": LONG}, {}),
    ("POST", "/api/jobs", {"kind": "pull", "config": {LONG: 1}}, {}),
    ("POST", "/api/jobs", {"kind": "pull", "config": {"name": LONG}}, {}),
    ("POST", "/api/jobs", {"kind": "pull", "config": {"name": "a/b", "revision": f"{LONG}.."}}, {}),
    ("GET", f"/api/jobs/{LONG}", None, {}),
    ("GET", "/health", None, {"Host": LONG}),
    ("GET", "/health", None, {"Origin": LONG}),
]


async def test_what_a_client_sent_is_quoted_short(tmp_path: Path, models: Path):
    (tmp_path / "config.toml").write_text('[aliases]\n"x*" = "a"\n')
    async with serve(tmp_path, models=models, scripted=True) as served:
        for method, path, body, headers in ECHOED:
            answer = await served.request(method, path, body, **headers)
            assert 400 <= answer.status < 500, (method, path[:30])
            message = answer.body["error"]["message"]
            assert len(message) < 400, message
            assert "x" * 301 not in message
            assert len(answer.body["error"]["param"] or "") < 100


async def test_an_unknown_model_is_a_404_that_names_the_nearest(tmp_path: Path, models: Path):
    make_scripted_model(models, "qwen3-8b")
    async with serve(tmp_path, models=models, scripted=True) as served:
        for name in ("qwen3-8", "../m/a", "/etc/passwd", "a/", "", "a\x00b", "é" * 5000):
            answer = await served.chat(name)
            assert (answer.status, answer.code, answer.body["error"]["param"]) == (
                404,
                "model_not_found",
                "model",
            )
        assert "qwen3-8b" in (await served.chat("qwen3-8")).body["error"]["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_an_over_long_body_is_a_413_and_the_server_goes_on(
    tmp_path: Path, models: Path, declared: bool
):
    size = 64 * 2**20 + 1

    async def pieces():
        for _ in range(65):
            yield b" " * 2**20

    async with serve(tmp_path, models=models, scripted=True) as served:
        data = b" " * size if declared else pieces()
        async with served.client.post(f"{served.url}/v1/chat/completions", data=data) as answer:
            assert answer.status == 413
            assert json.loads(await answer.read())["error"]["code"] == "body_too_large"
        assert (await served.chat("a")).status == 200


async def test_a_large_body_within_the_limit_is_served(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        answer = await served.chat("a", "x" * (8 * 2**20))
        assert answer.text == expected_text("a", "x" * 64)


async def test_unknown_paths_and_methods_are_json_errors(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        answer = await served.request("GET", "/nope")
        assert (answer.status, answer.code) == (404, "not_found")
        answer = await served.request("GET", "/v1/chat/completions")
        assert (answer.status, answer.code) == (405, "method_not_allowed")
        assert "POST" in answer.body["error"]["message"]
        answer = await served.request("POST", "/v1/messages/nope", {})
        assert (answer.status, answer.body["type"]) == (404, "error")


@pytest.mark.parametrize(
    ("host", "ok"),
    [
        ("localhost", True),
        ("localhost:8420", True),
        ("127.0.0.1:1", True),
        ("127.1.2.3", True),
        ("[::1]:8420", True),
        ("app.localhost", True),
        ("LOCALHOST.", True),
        ("lan.example", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.evil.0.1", False),
        ("evil.example:8420", False),
        ("user@localhost", False),
        ("localhost:port", False),
        ("", False),
    ],
)
async def test_only_loopback_and_listed_hosts_are_served(tmp_path: Path, models: Path, host: str, ok: bool):
    config = '[server]\nallowed_hosts = ["lan.example"]\n'
    async with serve(tmp_path, models=models, scripted=True, config=config) as served:
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/api/models/a/load")):
            answer = await served.request(method, path, Host=host)
            if ok:
                assert answer.status in (200, 202)
            else:
                assert (answer.status, answer.code) == (403, "forbidden_host")


async def test_pages_of_other_origins_can_do_nothing(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, config=KEYS) as served:
        key = {"Authorization": "Bearer first-key"}
        for origin in (
            "https://evil.example",
            "null",
            "http://127.0.0.1:1",
            "file://",
            f"ftp://127.0.0.1:{served.port}",
        ):
            for method, path in (
                ("POST", "/api/models/a/load"),
                ("GET", "/v1/models"),
                ("OPTIONS", "/v1/models"),
            ):
                answer = await served.request(method, path, Origin=origin, **key)
                assert (answer.status, answer.code) == (403, "forbidden_origin")
                assert "access-control-allow-origin" not in answer.headers
        # A form's simple POST: no preflight would have stopped it.
        simple = await served.request(
            "POST",
            "/v1/chat/completions",
            chat_body("a"),
            Origin="https://evil.example",
            Content_Type="text/plain",
        )
        assert simple.status == 403
        assert read_events(models / "a") == []


async def test_listed_and_own_origins_are_served(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, config=KEYS) as served:
        key = {"Authorization": "Bearer first-key"}
        own = await served.request("GET", "/v1/models", Origin=f"http://127.0.0.1:{served.port}", **key)
        assert own.status == 200
        assert "access-control-allow-origin" not in own.headers
        preflight = await served.request(
            "OPTIONS",
            "/v1/chat/completions",
            Origin="https://app.example",
            Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization, content-type",
        )
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
        listed = await served.request("GET", "/v1/models", Origin="https://app.example", **key)
        assert listed.headers["access-control-allow-origin"] == "https://app.example"


async def test_with_keys_every_route_but_health_asks_for_one(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, config=KEYS) as served:
        assert (await served.request("GET", "/health")).status == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"x_api_key": "first-ke"},
            {"Authorization": "first-key"},
        ):
            for method, path in (("GET", "/v1/models"), ("GET", "/api/pool"), ("POST", "/api/models/a/load")):
                answer = await served.request(method, path, **headers)
                assert (answer.status, answer.code) == (401, "invalid_api_key")
        for headers in (
            {"Authorization": "Bearer second-key"},
            {"x_api_key": "first-key"},
            {"Authorization": "bearer first-key"},
        ):
            assert (await served.request("GET", "/v1/models", **headers)).status == 200


async def test_a_request_id_is_kept_where_it_is_harmless(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        mine = await served.request("POST", "/v1/chat/completions", chat_body("a"), X_Request_Id="my-id.7")
        assert mine.headers["x-request-id"] == "my-id.7"
        assert read_events(models / "a")[-1]["event"] in ("request", "done")
        odd = await served.request("GET", "/health", X_Request_Id="a b <script>")
        assert odd.headers["x-request-id"].startswith("req_")


async def test_answers_echo_the_name_that_was_asked_for(tmp_path: Path, models: Path):
    config = '[aliases]\n"claude-*" = "a"\n[defaults]\nmodel = "a"\n'
    async with serve(tmp_path, models=models, scripted=True, config=config) as served:
        assert (await served.chat("claude-opus-4")).body["model"] == "claude-opus-4"
        assert (await served.stream("claude-é")).models == {"claude-é"}
        assert (await served.chat(None)).body["model"] == "a"
        assert (await served.request("POST", "/api/models/claude-x/load")).code == "model_not_found"


async def test_a_workers_own_refusal_passes_through(tmp_path: Path, models: Path):
    make_scripted_model(models, "no", status=429)
    async with serve(tmp_path, models=models, scripted=True) as served:
        assert (await served.chat("no")).status == 429
        assert (await served.chat("no", stream=True)).status == 429


async def test_commands_refuse_bodies_they_do_not_know(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        for path, data in (
            ("load", b'{"x": 1}'),
            ("unload", b'{"force": "yes"}'),
            ("unload", b'{"forced": true}'),
            ("unload", b"{"),
            ("pin", b"5"),
        ):
            answer = await served.request("POST", f"/api/models/a/{path}", data=data)
            assert (answer.status, answer.code) == (400, "invalid_request")
        assert (await served.request("POST", "/api/models/none/load")).status == 404


async def test_health_and_pool_answer_while_a_worker_hangs(tmp_path: Path, models: Path):
    make_scripted_model(models, "hung", hang_at="prefill")
    # The end waits for a drain that never comes.
    settings = {"pool.drain_timeout": "1s"}
    async with serve(tmp_path, models=models, scripted=True, settings=settings) as served:
        stuck = asyncio.create_task(served.chat("hung"))
        await served.until_state("hung", "ready")
        assert (await served.request("GET", "/health")).body["status"] == "ok"
        assert (await served.worker("hung"))["active"] == 1
        stuck.cancel()


async def test_a_model_whose_folder_is_broken_is_listed_as_failed_with_the_reason(
    tmp_path: Path, models: Path
):
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text('{"model_type": "llama"}')
    async with serve(tmp_path, models=models, scripted=True) as served:
        listed = {m["id"]: m for m in (await served.request("GET", "/v1/models")).body["data"]}
        assert (listed["broken"]["state"], listed["a"]["state"]) == ("failed", "absent")
        assert "safetensors" in listed["broken"]["reason"]
        answer = await served.chat("broken")
        assert (answer.status, answer.code) == (503, "load_failed")
        assert "safetensors" in answer.body["error"]["message"]
        assert (await served.chat("a")).status == 200


async def test_a_model_whose_folder_is_gone_can_be_looked_at_and_sent_away(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        assert (await served.chat("a")).status == 200
        assert (await served.request("POST", "/api/models/a/pin")).body["pinned"]
        shutil.rmtree(models / "a")
        assert (await served.chat("a")).code == "model_not_found"
        assert (await served.request("GET", "/api/models/a/stats")).body["state"] == "ready"
        assert (await served.request("GET", "/api/models/a/logs")).status == 200
        assert (await served.request("POST", "/api/models/a/load")).code == "model_not_found"
        assert (await served.request("POST", "/api/models/a/unpin")).body["pinned"] is False
        worker = await served.worker("a")
        assert worker is not None
        assert worker["planned_bytes"] > 0
        assert (await served.request("POST", "/api/models/a/unload")).status == 202
        await gone([worker["pid"]])

        async def forgotten() -> bool:
            answer = await served.request("POST", "/api/models/a/unload")
            return answer.status == 404 and answer.code == "model_not_found"

        await until(forgotten)
        assert (await served.pool())["reserved_bytes"] == 0


async def test_the_pool_view_has_every_contracted_field(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a")
        pool = await served.pool()
        assert {"budget_bytes", "reserved_bytes", "workers", "queue", "leases", "counters"} <= set(pool)
        assert {
            "model", "state", "pid", "since", "planned_bytes", "footprint_bytes", "active", "queued",
            "restarts", "pinned", "last_used", "reason",
        } <= set(pool["workers"][0])  # fmt: skip
        assert set(pool["leases"]) == {"shared", "exclusive", "waiting", "holder"}
        assert pool["counters"] == {"loads": 1, "evictions": 0, "crashes": 0}
        assert pool["reserved_bytes"] == pool["workers"][0]["planned_bytes"] > 0


UNENFORCED: Any = {
    "type": "json_schema",
    "json_schema": {"name": "f", "schema": {"type": "array", "uniqueItems": True}, "strict": False},
}


async def test_what_was_not_enforced_is_said_in_the_header_and_in_the_answer(
    tmp_path: Path, tiny: TinyModels
):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "t").symlink_to(tiny("llama"))
    async with serve(tmp_path, models=tmp_path / "m") as served:
        answer = await served.chat("t", response_format=UNENFORCED, max_tokens=2)
        (warning,) = answer.body["warnings"]
        assert "uniqueItems" in warning
        assert answer.headers["warning"] == f'299 - "{warning}"'

        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", _strict_response_validation=True
        )
        asked: Any = {"model": "t", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        whole = await client.chat.completions.create(**asked, response_format=UNENFORCED)
        assert (whole.model_extra or {})["warnings"] == [warning]
        stream = await client.chat.completions.create(**asked, response_format=UNENFORCED, stream=True)
        chunks = [chunk async for chunk in stream]
        said = [chunk for chunk in chunks if "warnings" in (chunk.model_extra or {})]
        assert said == chunks[-1:]
        assert said[0].choices[0].finish_reason == "length"
        assert (said[0].model_extra or {})["warnings"] == [warning]
        assert "warnings" not in (await served.chat("t", max_tokens=2)).body


# A stream that waits is opened after 10 s; nobody needs to wait that long to see it.
QUICK = ["--open-after", "0.3", "--keep-alive", "0.2"]


async def test_a_stream_that_waits_is_opened_kept_alive_and_gone_on_with_under_one_id(
    tmp_path: Path, models: Path
):
    make_scripted_model(models, "slow", load_s=1.2)
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        body = await served.stream_bytes("slow", "q")
        stream = sse.read_chat(body)
        assert stream.text == expected_text("slow", "q")
        assert (len(stream.ids), len(stream.created), stream.models) == (1, 1, {"slow"})
        assert stream.roles == ["assistant"]
        assert silent_events(body) >= 2


async def test_a_load_that_fails_after_the_stream_was_opened_is_its_last_event(tmp_path: Path, models: Path):
    make_scripted_model(models, "bad", load_s=0.8, fail_load="no such tensor")
    make_scripted_model(models, "refuses", load_s=0.8, status=400)
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        failed, refused = await asyncio.gather(served.stream("bad"), served.stream("refuses"))
        assert failed.error is not None
        assert failed.error["code"] == "load_failed"
        assert "no such tensor" in failed.error["message"]
        assert refused.error is not None
        assert failed.roles == refused.roles == ["assistant"]


def silent_events(body: bytes) -> int:
    """How many keep-alives are in the stream."""
    return sum('"delta":{}' in e.data and '"finish_reason":null' in e.data for e in sse.read(body))


async def test_a_stream_hears_something_while_a_ready_worker_still_prepares(tmp_path: Path, models: Path):
    make_scripted_model(models, "thinks", slow_headers_s=1.0)
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        await served.request("POST", "/api/models/thinks/load")
        await served.until_state("thinks", "ready")
        body = await served.stream_bytes("thinks", "q")
        stream = sse.read_chat(body)
        assert stream.text == expected_text("thinks", "q")
        assert (len(stream.ids), len(stream.created), stream.models) == (1, 1, {"thinks"})
        assert stream.roles == ["assistant"]
        assert '"role":"assistant"' in sse.read(body)[0].data
        assert silent_events(body) >= 3
        assert (await served.chat("thinks", "q")).text == expected_text("thinks", "q")


async def test_a_worker_that_answers_at_once_opens_its_own_stream(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a")
        body = await served.stream_bytes("a", "q")
        assert sse.read_chat(body).roles == ["assistant"]
        assert silent_events(body) == 0


async def test_a_refusal_after_the_stream_was_opened_for_a_silent_worker_is_its_last_event(
    tmp_path: Path, models: Path
):
    for status in (400, 429):
        make_scripted_model(models, f"no-{status}", slow_headers_s=0.6, status=status)
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        refused = await asyncio.gather(*(served.stream(f"no-{status}") for status in (400, 429)))
        for status, stream in zip((400, 429), refused, strict=True):
            assert stream.error is not None
            assert f"scripted answer {status}" in stream.error["message"]
            assert stream.roles == ["assistant"]
            whole = await served.chat(f"no-{status}")
            assert whole.status == status
            assert whole.body["error"] == stream.error


async def test_a_worker_that_dies_after_the_stream_was_opened_for_it_is_the_streams_last_event(
    tmp_path: Path, models: Path
):
    make_scripted_model(models, "dies", slow_headers_s=0.6, crash_at="prefill")
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        stream = await served.stream("dies")
        assert stream.error is not None
        assert stream.error["code"] == "worker_crashed"
        assert stream.roles == ["assistant"]


async def test_a_forced_unload_ends_a_stream_that_was_opened_for_a_silent_worker(
    tmp_path: Path, models: Path
):
    make_scripted_model(models, "mute", slow_headers_s=60)
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        url, body = f"{served.url}/v1/chat/completions", chat_body("mute", stream=True)
        async with served.client.post(url, json=body) as answer:
            first = await answer.content.readuntil(b"\n\n")
            await served.request("POST", "/api/models/mute/unload", {"force": True})
            stream = sse.read_chat(first + await answer.read())
        assert stream.error is not None
        assert stream.roles == ["assistant"]
        assert await served.until_state("mute", "absent") == "absent"


async def test_a_client_that_leaves_an_opened_stream_takes_its_row_along(tmp_path: Path, models: Path):
    folder = make_scripted_model(models, "mute", slow_headers_s=60)
    async with serve(tmp_path, models=models, scripted=True, flags=QUICK) as served:
        await served.request("POST", "/api/models/mute/load")
        await served.until_state("mute", "ready")
        url, body = f"{served.url}/v1/chat/completions", chat_body("mute", stream=True)
        async with served.client.post(url, json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            answer.close()
        await until(lambda: read_events(folder)[-1]["event"] == "cancelled")
        assert "Traceback" not in served.log()
        assert "never retrieved" not in served.log()


async def raw(port: int, *pieces: bytes) -> bytes:
    """What the server sends back to these bytes until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


NO_HTTP = [
    b"GE T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET / HTTP/9.x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
]


async def test_what_is_no_http_is_refused_in_json_without_a_traceback(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        for data in NO_HTTP:
            head, _, body = (await raw(served.port, data)).partition(b"\r\n\r\n")
            assert head.split(b" ")[1] == b"400", data[:60]
            assert b"x-request-id: req_" in head.lower()
            assert json.loads(body)["error"]["code"] == "invalid_request"
            assert b"Python" not in head
        assert "Traceback" not in served.log()


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("gzip", "can't be read: Can not decode"),
        ("deflate", "can't be read: Can not decode"),
        ("br", "send gzip, deflate or none"),
        ("foo", "send gzip, deflate or none"),
    ],
)
async def test_a_body_that_is_not_encoded_as_it_says_is_a_400(
    tmp_path: Path, models: Path, encoding: str, words: str
):
    async with serve(tmp_path, models=models, scripted=True) as served:
        data = json.dumps(chat_body("a")).encode()
        answer = await served.request("POST", "/v1/chat/completions", data=data, Content_Encoding=encoding)
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert words in answer.body["error"]["message"]
        assert "Traceback" not in served.log()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/nowhere"])
async def test_an_expectation_that_nobody_meets_is_refused_in_the_protocols_shape(
    tmp_path: Path, models: Path, path: str
):
    async with serve(tmp_path, models=models, scripted=True) as served:
        answer = await served.request("POST", path, chat_body("a"), Expect="a-miracle", X_Request_Id="mine")
        assert (answer.status, answer.code) == (417, "invalid_request")
        said = "the Expect header is 'a-miracle'; send 100-continue or none"
        assert answer.body["error"]["message"] == said
        assert answer.headers["x-request-id"] == "mine"
        assert answer.body.get("request_id", "mine") == "mine"
        assert (await served.chat("a")).status == 200


async def test_a_header_that_is_too_long_is_a_400_that_does_not_repeat_it(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        answer = await served.request("GET", "/health", X_Long="a" * 9000)
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "has more than 8190 bytes" in answer.body["error"]["message"]
        assert "aaaa" not in answer.body["error"]["message"]


async def test_a_body_that_breaks_while_it_is_read_is_a_400_too(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n"
            b"Content-Length: 20\r\nExpect: 100-continue\r\n\r\n"
        )
        async with asyncio.timeout(60):
            # The server asks for the body when it is about to read it.
            assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"this is no gzip body")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.split(b" ")[1] == b"400"
        assert json.loads(body)["error"]["code"] == "invalid_request"
        assert "Traceback" not in served.log()


async def test_a_compressed_body_is_read_and_a_bomb_is_too_large(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        packed = gzip.compress(json.dumps(chat_body("a", "q")).encode())
        answer = await served.request("POST", "/v1/chat/completions", data=packed, Content_Encoding="gzip")
        assert answer.text == expected_text("a", "q")
        bomb = gzip.compress(b" " * (80 * 2**20))
        answer = await served.request("POST", "/v1/chat/completions", data=bomb, Content_Encoding="gzip")
        assert (answer.status, answer.code) == (413, "body_too_large")
