"""The proxy examples in front of a running server, where nginx or Caddy is on this machine.

The files are used as they are but for addresses, ports and certificates; the server's settings are those that
their comments tell to make.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served, chat_body, serve

PROXY = Path(__file__).parents[2] / "deploy/proxy"
KEY = {"Authorization": "Bearer sk-1", "Host": "models.example"}
NGINX = """pid {tmp}/pid; error_log {tmp}/error.log; daemon off; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path {tmp}/b; proxy_temp_path {tmp}/p;
  fastcgi_temp_path {tmp}/f; uwsgi_temp_path {tmp}/u; scgi_temp_path {tmp}/s;
  include {tmp}/site.conf;
}}
"""


def start(name: str, text: str, tmp: Path, port: int, server_port: int) -> subprocess.Popen[bytes]:
    text = text.replace("127.0.0.1:8420", f"127.0.0.1:{server_port}")
    if name == "nginx.conf":
        text = re.sub(r"(?m)^\s+ssl_.*$", "", text).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
        (tmp / "site.conf").write_text(text)
        (tmp / "nginx.conf").write_text(NGINX.format(tmp=tmp))
        argv = ["nginx", "-p", str(tmp), "-e", str(tmp / "error.log"), "-c", str(tmp / "nginx.conf")]
    else:
        site = f"http://models.example:{port} {{\n\tbind 127.0.0.1"
        text = "{\n\tadmin off\n\tauto_https off\n}\n" + text.replace("models.example {", site, 1)
        (tmp / "Caddyfile").write_text(text)
        argv = ["caddy", "run", "--adapter", "caddyfile", "--config", str(tmp / "Caddyfile")]
    env = {"HOME": str(tmp), "PATH": "/usr/bin:/bin"}
    program = shutil.which(argv[0])
    assert program is not None
    return subprocess.Popen(
        [program, *argv[1:]], env=env, cwd=tmp, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@contextlib.asynccontextmanager
async def proxied(name: str, tmp: Path) -> AsyncIterator[tuple[Served, str]]:
    """A scripted server behind the proxy, and the proxy's address."""
    text = (PROXY / name).read_text()
    settings = "\n".join(re.findall(r"^#   (.+)$", text, re.M)).replace("…", "sk-1")
    make_scripted_model(tmp / "models", "slow", tokens=40, tokens_per_s=20)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    async with serve(tmp, models=tmp / "models", scripted=True, config=settings) as served:
        process = start(name, text, tmp, port, served.port)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with served.client.get(f"{url}/health", headers=KEY) as answer:
                        assert answer.status == 200
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            yield served, url
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} here")
        )
        for name, program in (("nginx.conf", "nginx"), ("Caddyfile", "caddy"))
    ],
)
async def test_tokens_pass_one_by_one_and_a_client_that_leaves_ends_its_request(
    name: str, tmp_path: Path
) -> None:
    async with proxied(name, tmp_path) as (served, url):
        body = chat_body("slow", stream=True)
        arrived = []
        async with served.client.post(f"{url}/v1/chat/completions", json=body, headers=KEY) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    arrived.append(time.monotonic())
        # 20 tokens a second for two seconds: a proxy that waits for 4 kB would bring them all at the end.
        assert len(arrived) == 40
        assert arrived[-1] - arrived[0] > 1.5
        assert max(later - sooner for sooner, later in itertools.pairwise(arrived)) < 0.5

        async with served.client.post(f"{url}/v1/chat/completions", json=body, headers=KEY) as answer:
            await answer.content.readline()
            answer.close()
        left = time.monotonic()
        while await active(served):
            assert time.monotonic() - left < 1.0, "the request goes on without its client"
            await asyncio.sleep(0.02)

        # A page of the proxy's own name is served; a request without a key is not.
        page = {**KEY, "Origin": "https://models.example"}
        async with served.client.get(f"{url}/v1/models", headers=page) as answer:
            assert answer.status == 200
        async with served.client.get(f"{url}/v1/models", headers={"Host": "models.example"}) as answer:
            assert answer.status == 401


async def active(served: Served) -> int:
    pool = await served.request("GET", "/api/pool", Authorization="Bearer sk-1")
    return sum(worker["active"] for worker in pool.body["workers"])
