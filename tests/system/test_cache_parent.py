"""The parent's side of the prompt cache, over scripted workers: shares, drains, flushes, figures, folder."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.names import temp_name
from mlxpool.shared.units import format_size
from tests.tools.kv_records import fingerprint, held_bytes, write_record
from tests.tools.scripted_script import make_scripted_model, read_events
from tests.tools.served import Served, serve, until

MB = 1_000_000
SHARES = {"cache.ram": "400MB"}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, weights_bytes=50 * MB)
    return tmp_path / "m"


def told(models: Path, name: str) -> list[int]:
    """The shares that workers of a model were told, in order: with their launch, then later ones."""
    return [e["ram_bytes"] for e in read_events(models / name) if e["event"] in ("go", "share")]


def holds(models: Path, name: str) -> int:
    """What a model's worker may hold, by its own account."""
    return [e["ram_bytes"] for e in read_events(models / name) if e["event"] in ("go", "shared")][-1]


async def events(served: Served, kind: str) -> list[dict[str, Any]]:
    return [event for event in (await served.pool())["recent"] if event["event"] == kind]


async def metrics(served: Served) -> dict[str, str]:
    text = (await served.request("GET", "/metrics")).body.decode()
    return dict(re.findall(r"^(\S+?(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))


async def until_metric(served: Served, name: str, value: str) -> dict[str, str]:
    """Wait for a heartbeat that says so."""
    found: dict[str, str] = {}

    async def says_so() -> bool:
        found.update(await metrics(served))
        return found.get(name) == value

    await until(says_so, said=lambda: f"{name} stays {found.get(name)}")
    return found


# ---- memory ------------------------------------------------------------------------------------------


async def test_workers_share_one_total_and_are_told_when_others_come_and_go(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, budget="4GB", settings=SHARES) as served:
        await served.chat("a")
        assert told(models, "a") == [400 * MB]
        await served.chat("b")
        await until(lambda: holds(models, "b") == 200 * MB)
        assert told(models, "a") == [400 * MB, 200 * MB]
        # It began with nothing, because all was spoken for, and was raised once it was free.
        assert told(models, "b") == [0, 200 * MB]
        given = next(e["t"] for e in read_events(models / "a") if e["event"] == "shared")
        taken = next(e["t"] for e in read_events(models / "b") if e["event"] == "share")
        assert given < taken
        await served.request("POST", "/api/models/a/unload")
        await until(lambda: holds(models, "b") == 400 * MB)


async def test_a_worker_that_takes_no_share_is_not_waited_for(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "stubborn", never_share=True)
    make_scripted_model(models, "b")
    flags = ["--share-timeout", "0.2"]
    async with serve(
        tmp_path, models=models, scripted=True, budget="4GB", settings=SHARES, flags=flags
    ) as served:
        await served.chat("stubborn")
        assert (await served.chat("b")).status == 200
        await until(lambda: holds(models, "b") == 200 * MB)
        assert "does not take its share of the prompt cache" in served.log()
        assert (await served.chat("stubborn")).status == 200


async def test_prompts_take_a_quarter_of_the_budget_at_most_and_models_have_the_rest(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "fits", weights_bytes=2_000 * MB)
    make_scripted_model(models, "large", weights_bytes=2_700 * MB)
    settings = {"cache.ram": "8GB"}
    async with serve(tmp_path, models=models, scripted=True, budget="4GB", settings=settings) as served:
        pool = await served.pool()
        assert (pool["budget_bytes"], pool["prompt_cache_bytes"]) == (4000 * MB, 1000 * MB)
        text = (await served.request("GET", "/metrics")).body.decode()
        assert "# HELP mlxpool_budget_bytes Memory that models and their prompts may hold.\n" in text
        assert "mlxpool_budget_bytes 4e+09\n" in text
        assert pool["cache"]["max_bytes"] == 1000 * MB
        assert (await served.chat("fits")).status == 200
        assert told(models, "fits") == [1000 * MB]
        refused = await served.chat("large")
        assert (refused.status, refused.code) == (400, "model_too_large")
        assert "does not fit in 3.0 GB" in refused.body["error"]["message"]
        fit = (await served.request("GET", "/api/fit?model=large")).body
        assert (fit["limit_bytes"], fit["budget_bytes"], fit["prompt_cache_bytes"]) == (
            3000 * MB,
            4000 * MB,
            1000 * MB,
        )


async def test_a_reload_moves_shares_at_once_and_other_settings_with_the_next_worker(
    tmp_path: Path, models: Path
):
    config = '[pool]\nmemory_budget = "4GB"\n[cache]\n'
    async with serve(tmp_path, models=models, scripted=True, config=f'{config}ram = "400MB"\n') as served:
        await served.chat("a")
        pid = (await served.worker("a") or {})["pid"]

        async def reload(cache: str) -> list[str]:
            (served.home / "config.toml").write_text(config + cache)
            return list((await served.request("POST", "/api/config/reload")).body["changed"])

        assert await reload('ram = "300MB"\n') == ["cache.ram"]
        await until(lambda: holds(models, "a") == 300 * MB)
        assert (await served.worker("a") or {})["pid"] == pid
        assert await reload('ram = "300MB"\nverify = false\n') == ["cache.verify"]
        assert (await served.chat("a")).status == 200
        assert (await served.worker("a") or {})["pid"] != pid


# ---- drains ------------------------------------------------------------------------------------------


async def test_a_drain_says_what_it_saved(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a", "one")
        await served.chat("a", "two")
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        (stopped,) = await events(served, "stop")
        assert re.fullmatch(
            r"drained in \d\.\d s, all prompts are on disk \(2 records written\)", stopped["detail"]
        )
        assert await events(served, "loss") == []
        cache = (await served.pool())["cache"]
        assert (cache["drains"], cache["losses"]) == (1, 0)
        assert (await metrics(served))['mlxpool_drains_total{durable="true"}'] == "1.0"


@pytest.mark.parametrize("drain_timeout", ["20d", "150ms", "0.00001"])
async def test_a_drain_may_be_given_any_time(tmp_path: Path, models: Path, drain_timeout: str):
    settings = {"pool.drain_timeout": drain_timeout}
    async with serve(tmp_path, models=models, scripted=True, settings=settings) as served:
        await served.chat("a", "one")
        flushed = await served.request("POST", "/api/cache/flush")
        assert (flushed.status, flushed.body["flushed"]) == (200, 1)
        await served.chat("a", "two")
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        (stopped,) = await events(served, "stop")
        assert stopped["detail"].endswith("all prompts are on disk (1 record written)")


async def test_a_drain_that_is_not_durable_says_how_much_is_missing(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "a", cache_missing=2)
    async with serve(tmp_path, models=models, scripted=True) as served:
        for prompt in ("one", "two", "three"):
            await served.chat("a", prompt)
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        (loss,) = await events(served, "loss")
        said = r"not all prompts are on disk after the drain \(in \d\.\d s\), missing 2 records"
        assert re.match(said, loss["detail"])
        assert loss["detail"].endswith("2 failed writes: the disk is full")
        assert re.search(rf" W mlxpool.pool: loss a: {said}", served.log())
        assert (await metrics(served))['mlxpool_drains_total{durable="false"}'] == "1.0"
        assert (await served.pool())["cache"]["losses"] == 1


async def test_a_worker_that_hangs_in_its_drain_is_ended_after_the_margin(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "a", never_drain=True, ignore_sigterm=True, weights_bytes=400 * MB)
    make_scripted_model(models, "b", weights_bytes=400 * MB)
    settings = {"pool.drain_timeout": "200ms"}
    flags = ["--report-margin", "0.3"]
    async with serve(
        tmp_path, models=models, scripted=True, budget="1400MB", settings=settings, flags=flags
    ) as served:
        await served.chat("a")
        begun = time.monotonic()
        assert (await served.chat("b")).status == 200
        # Time-out and margin, then the grace between SIGTERM and SIGKILL.
        assert 3 < time.monotonic() - begun < 6
        (loss,) = await events(served, "loss")
        assert loss["model"] == "a"
        assert (await served.pool())["cache"]["losses"] == 1
        assert re.match(
            r"the drain failed after 0\.\d s \(no answer within 0\.5 s\): prompts", loss["detail"]
        )


async def test_shutdown_drains_all_workers_at_once(tmp_path: Path):
    models = tmp_path / "m"
    for name in ("a", "b", "c"):
        make_scripted_model(models, name, drain_s=0.8)
    async with serve(tmp_path, models=models, scripted=True) as served:
        for name in ("a", "b", "c"):
            await served.chat(name)
        begun = time.monotonic()
        assert await served.down() == 0
        assert time.monotonic() - begun < 2
        drains = [[e["t"] for e in read_events(models / n) if e["event"] == "drain"] for n in "abc"]
        drained = [[e["t"] for e in read_events(models / n) if e["event"] == "drained"] for n in "abc"]
        assert max(drains)[0] < min(drained)[0]
        assert served.log().count("all prompts are on disk (1 record written)") == 3


# ---- the HTTP surface --------------------------------------------------------------------------------


async def test_a_flush_writes_what_is_not_on_disk_and_says_so(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        nobody = await served.request("POST", "/api/cache/flush")
        assert (nobody.status, nobody.body["durable"], nobody.body["models"]) == (200, True, {})
        await served.chat("a", "one")
        await served.chat("b", "two")
        await served.chat("b", "three")
        answer = await served.request("POST", "/api/cache/flush?timeout_s=5", {})
        report = answer.body
        assert answer.status == 200
        assert {key: report[key] for key in ("durable", "flushed", "missing", "pending")} == {
            "durable": True,
            "flushed": 3,
            "missing": 0,
            "pending": 0,
        }
        assert {name: told["flushed"] for name, told in report["models"].items()} == {"a": 1, "b": 2}
        assert report["elapsed_ms"] > 0
        assert (await served.request("POST", "/api/cache/flush")).body["flushed"] == 0


async def test_a_flush_that_leaves_something_is_a_503_with_the_counts(tmp_path: Path, models: Path):
    make_scripted_model(models, "full", cache_missing=1)
    make_scripted_model(models, "hung", never_flush=True)
    flags = ["--report-margin", "0.2"]
    async with serve(tmp_path, models=models, scripted=True, flags=flags) as served:
        await served.chat("a")
        await served.chat("full")
        answer = await served.request("POST", "/api/cache/flush")
        assert (answer.status, answer.body["durable"], answer.body["missing"]) == (503, False, 1)
        assert (answer.body["flushed"], answer.body["failed"]) == (1, 1)
        assert answer.body["models"]["a"]["durable"] is True
        assert answer.body["models"]["full"]["durable"] is False
        await served.chat("hung")
        answer = await served.request("POST", "/api/cache/flush?timeout_s=0.1")
        assert (answer.status, answer.body["models"]["hung"]["durable"]) == (503, False)
        assert "model 'hung' does not flush its prompt cache: no answer within 0.3 s" in served.log()


BAD = ["x", "-1", "nan", "inf", "3601", "1e9", "%00"]


async def test_bad_flushes_are_refused_by_name(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        for value in BAD:
            answer = await served.request("POST", f"/api/cache/flush?timeout_s={value}")
            assert (answer.status, answer.code) == (400, "invalid_request"), value
            assert answer.body["error"]["param"] == "timeout_s"
        for method, path in (("POST", "/api/cache/flush?now=1"), ("GET", "/api/cache?model=a")):
            answer = await served.request(method, path)
            assert (answer.status, answer.code) == (400, "invalid_request")
        assert (await served.request("POST", "/api/cache/flush", data=b"[1]")).status == 400
        assert (await served.request("GET", "/api/cache/flush")).status == 405
        assert (await served.request("GET", "/api/cache", Host="evil.example")).status == 403
        page = await served.request("POST", "/api/cache/flush", Origin="https://evil.example")
        assert page.status == 403


async def test_the_cache_is_shown_only_to_who_has_the_key(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, config='[server]\napi_keys = ["k"]\n') as served:
        for method, path in (("GET", "/api/cache"), ("POST", "/api/cache/flush")):
            assert (await served.request(method, path)).status == 401
            assert (await served.request(method, path, Authorization="Bearer k")).status == 200


async def test_what_is_cached_in_memory_and_on_disk(tmp_path: Path, models: Path):
    root = tmp_path / "home" / "kv"
    (tmp_path / "home").mkdir()
    record = write_record(root, fingerprint("b"), "old-model")
    async with serve(tmp_path, models=models, scripted=True, budget="4GB", settings=SHARES) as served:
        await served.chat("a", "one")
        await served.chat("a", "one")
        cache = (await served.request("GET", "/api/cache")).body
        assert cache["ram"] == {"bytes": MB, "max_bytes": 400 * MB}
        assert cache["ssd"] == {
            "enabled": True,
            "dir": str(root),
            "bytes": held_bytes(record),
            "max_bytes": 32_000 * MB,
            "entries": 1,
            "off": None,
        }
        (model,) = cache["models"]
        assert (model["model"], model["state"]) == ("a", "ready")
        assert (model["prompt_cache"]["hits"], model["prompt_cache"]["misses"]) == (1, 1)
        assert model["ssd_cache"]["pending"] == 1
        (on_disk,) = cache["folders"]
        assert (on_disk["fingerprint"], on_disk["model"], on_disk["entries"]) == ("b" * 32, "old-model", 1)
        assert on_disk["last_used"] == pytest.approx(time.time(), abs=60)
        stats = (await served.request("GET", "/api/models/a/stats")).body
        assert (stats["prompt_cache"]["entries"], stats["prompt_cache"]["max_bytes"]) == (1, 400 * MB)
        assert (stats["ssd_cache"]["dir"], stats["ssd_cache"]["entries"]) == (str(root), 0)
        assert stats["kv"] == {"mode": "none", "layers": {"KVCache": 1}}


async def test_without_a_disk_nothing_is_said_of_one(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, settings={"cache.ssd": "false"}) as served:
        await served.chat("a")
        cache = (await served.request("GET", "/api/cache")).body
        assert cache["ssd"]["enabled"] is False
        assert cache["models"][0]["ssd_cache"] is None
        assert (await served.pool())["cache"]["ssd"] is False
        flushed = await served.request("POST", "/api/cache/flush")
        assert (flushed.status, flushed.body["flushed"], flushed.body["missing"]) == (200, 0, 0)
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        (stopped,) = await events(served, "stop")
        assert re.fullmatch(r"drained in \d\.\d s", stopped["detail"])
        assert not (served.home / "kv").exists()


async def test_a_drain_that_fails_loses_nothing_where_nothing_was_to_be_on_disk(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "a", never_drain=True)
    settings = {"cache.ssd": "false", "pool.drain_timeout": "200ms"}
    flags = ["--report-margin", "0.1"]
    async with serve(tmp_path, models=models, scripted=True, settings=settings, flags=flags) as served:
        await served.chat("a")
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        assert await events(served, "loss") == []
        (stopped,) = await events(served, "stop")
        assert re.fullmatch(r"the drain failed after \d\.\d s \(no answer within 0\.3 s\)", stopped["detail"])


async def test_metrics_count_over_the_workers_of_a_model(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True, budget="4GB", settings=SHARES) as served:
        await served.chat("a", "one two")
        await served.chat("a", "one two")
        found = await until_metric(served, 'mlxpool_prompt_cache_hits_total{model="a"}', "1.0")
        assert found['mlxpool_prompt_cache_misses_total{model="a"}'] == "1.0"
        assert found['mlxpool_prompt_cache_cached_tokens_total{model="a"}'] == "2.0"
        assert found['mlxpool_prompt_cache_bytes{model="a"}'] == "1e+06"
        assert found["mlxpool_prompt_cache_limit_bytes"] == "4e+08"
        assert found['mlxpool_ssd_cache_pending{model="a"}'] == "1.0"
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        found = await metrics(served)
        assert found['mlxpool_prompt_cache_bytes{model="a"}'] == "0.0"
        assert found['mlxpool_prompt_cache_hits_total{model="a"}'] == "1.0"
        await served.chat("a", "three")
        await until_metric(served, 'mlxpool_prompt_cache_misses_total{model="a"}', "2.0")
        assert (await served.worker("a") or {})["cache"]["misses"] == 1


async def test_what_a_drain_writes_is_counted(tmp_path: Path, models: Path):
    async with serve(tmp_path, models=models, scripted=True) as served:
        for prompt in ("one", "two", "three"):
            await served.chat("a", prompt)
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        found = await metrics(served)
        assert found['mlxpool_ssd_cache_spills_total{model="a"}'] == "3.0"
        assert found['mlxpool_prompt_cache_misses_total{model="a"}'] == "3.0"
        assert found['mlxpool_ssd_cache_pending{model="a"}'] == "0.0"


async def test_why_nothing_is_written_is_shown(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "a", cache_off="no space left on device")
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a")
        assert (await served.request("GET", "/api/cache")).body["ssd"]["off"] == "no space left on device"
        await until_metric(served, 'mlxpool_prompt_cache_misses_total{model="a"}', "1.0")
        assert (await served.pool())["cache"]["off"] == "no space left on device"


# ---- the command, beside a running server ------------------------------------------------------------------


async def command(served: Served, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `mlxpool cache …` for that server's home."""
    argv = [sys.executable, "-c", "from mlxpool.parent.cli import main; main()", "cache", *words]
    process = await asyncio.create_subprocess_exec(
        *argv,
        *("--home", str(served.home)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_asks_a_running_server_and_prunes_beside_it(tmp_path: Path, models: Path):
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / "kv"
    # Model a lies in a folder that only the server was told of.
    kept = write_record(root, fingerprint("a"), "a", 1)
    garbage = write_record(root, fingerprint("b"), "gone", 2)
    one, both = format_size(held_bytes(kept)), format_size(held_bytes(kept, garbage))
    async with serve(tmp_path, models=models, scripted=True, budget="4GB", settings=SHARES) as served:
        await served.chat("a", "one")
        await served.chat("a", "one")
        code, out, _ = await command(served, "status")
        assert code == 0
        assert out.splitlines()[:3] == [
            "memory  1.0 MB of 400.0 MB",
            "        a: 1.0 MB, 1 hit, 1 miss, 1 token reused",
            f"disk    {both} of 32.0 GB in {root}",
        ]
        assert await command(served, "prune", "--yes") == (
            0,
            f"deleted 1 record, {one}; 1 record, {one} left\n",
            "",
        )
        assert [use["model"] for use in (await served.request("GET", "/api/cache")).body["folders"]] == ["a"]
        assert (await command(served, "verify"))[0] == 0
        assert (await served.chat("a", "one")).status == 200


# ---- the folder at the start -------------------------------------------------------------------------


async def test_the_folder_is_clean_before_anybody_is_served(tmp_path: Path):
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / "kv"
    record = write_record(root, fingerprint("b"), "m")
    torn = record.parent / temp_name(2**22 - 1, 4096, "00" * 8)
    torn.write_bytes(b"half")
    async with serve(tmp_path, scripted=True) as served:
        assert not torn.exists()
        assert record.exists()
        size = format_size(held_bytes(record))
        assert f"prompts on disk: 1 record, {size}; removed 1 unfinished file" in served.log()
        assert served.log().index("prompts on disk") < served.log().index("serves on")


async def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path):
    (tmp_path / "home").mkdir()
    record = write_record(tmp_path / "home" / "kv", fingerprint("b"), "m")
    async with serve(tmp_path, scripted=True, settings={"cache.ssd_budget": "1kB"}):
        assert not record.exists()


async def test_a_lowered_disk_budget_is_kept_by_a_reload_and_once_the_old_workers_are_gone(tmp_path: Path):
    models = tmp_path / "m"
    make_scripted_model(models, "a", drain_s=1.0)
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / "kv"
    before = write_record(root, fingerprint("b"), "m", 1)
    async with serve(tmp_path, models=models, scripted=True, config="") as served:
        await served.chat("a")
        (served.home / "config.toml").write_text('[cache]\nssd_budget = "2kB"\n')
        assert (await served.request("POST", "/api/config/reload")).body["changed"] == ["cache.ssd_budget"]
        await until(lambda: not before.exists(), 3)
        assert await served.state("a") == "draining"
        # The worker that drains was launched with the old budget, and may write as much.
        late = write_record(root, fingerprint("b"), "m", 2)
        await served.until_state("a", "absent")
        await until(lambda: not late.exists(), 3)


async def test_what_is_on_disk_is_one_number_everywhere(tmp_path: Path, models: Path):
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / "kv"
    record = write_record(root, fingerprint("b"), "old", 1)
    others = [write_record(root, fingerprint(letter), "a", 2) for letter in "cd"]
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a")
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")

        async def told() -> tuple[int, int, dict[str, str]]:
            cache = (await served.request("GET", "/api/cache")).body["ssd"]["bytes"]
            found = await metrics(served)
            of = {name: size for name, size in found.items() if name.startswith("mlxpool_ssd_cache_bytes")}
            return cache, (await served.pool())["cache"]["ssd_bytes"], of

        everything = held_bytes(record, *others)
        cache, pool, of = await told()
        assert (cache, pool) == (everything, everything)
        assert {name: float(size) for name, size in of.items()} == {
            'mlxpool_ssd_cache_bytes{model="a"}': held_bytes(*others),
            'mlxpool_ssd_cache_bytes{model="old"}': held_bytes(record),
        }
        kept = held_bytes(record)
        await command(served, "prune", "--model", "a")
        cache, pool, of = await told()
        assert (cache, pool, list(of)) == (kept, kept, ['mlxpool_ssd_cache_bytes{model="old"}'])


async def test_a_held_ledger_holds_up_no_view_and_no_shutdown(tmp_path: Path, models: Path):
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / "kv"
    record = write_record(root, fingerprint("b"), "m", 1)
    async with serve(tmp_path, models=models, scripted=True) as served:
        await served.chat("a")
        with Budget(root, 1).locked():
            # Over the budget: somebody would have to delete, and waits for the ledger.
            (served.home / "config.toml").write_text('[cache]\nssd_budget = "2kB"\n')
            await served.request("POST", "/api/config/reload")
            begun = time.monotonic()
            assert (await served.request("GET", "/health")).status == 200
            assert (await served.pool())["cache"]["max_bytes"] > 0
            assert await served.down() == 0
            assert time.monotonic() - begun < 3
        assert record.exists()


async def test_a_broken_folder_is_a_warning_and_no_failed_start(tmp_path: Path, models: Path):
    (tmp_path / "home").mkdir()
    root = tmp_path / "home" / "kv"
    record = write_record(root, fingerprint("b"), "m")
    ledger = next(path for path in root.iterdir() if path.is_file())
    ledger.unlink()
    ledger.mkdir()
    async with serve(tmp_path, models=models, scripted=True) as served:
        assert re.search(r" W mlxpool: the prompt cache's folder .* can't be used: ", served.log())
        assert (await served.chat("a")).status == 200
        assert (await served.request("GET", "/api/cache")).status == 200
        assert record.exists()


async def test_a_file_in_the_folders_place_is_a_warning_too(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kv").write_text("not a folder")
    async with serve(tmp_path, scripted=True) as served:
        assert "can't be used: it is no folder" in served.log()
        assert (await served.request("GET", "/api/cache")).body["folders"] == []
