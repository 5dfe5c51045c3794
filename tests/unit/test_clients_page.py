"""docs/clients.md: every path and setting of ours that it names exists, and every block can be read."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from mlxpool.shared import config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clients.md").read_text()
ROUTES = set(re.findall(r"^\| `((?:GET|POST|DELETE) [^`]+)` \|", (ROOT / "docs/http.md").read_text(), re.M))
OURS = "# ~/.mlxpool/config.toml\n"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    assert found, language
    return found


def test_every_route_is_one_of_ours() -> None:
    named = set(re.findall(r"`((?:GET|POST|HEAD|DELETE) /[^`]*)`", PAGE))
    assert len(named) >= 6
    assert named <= ROUTES


def test_every_address_is_the_default_one_with_a_path_that_leads_somewhere() -> None:
    prefixes = {route.split()[1] for route in ROUTES} | {"", "/v1"}
    for host, port, path in re.findall(r"http://([\w.]+):(\d+)([\w/]*)", PAGE):
        assert host in (config.Server().host, "host.docker.internal")
        assert int(port) == config.Server().port
        assert path in prefixes


def test_our_settings_are_accepted(tmp_path: Path) -> None:
    ours = [block for block in blocks("toml") if block.startswith(OURS)]
    assert len(ours) == 2
    for place, block in enumerate(ours):
        path = tmp_path / f"{place}.toml"
        path.write_text(block)
        config.load(path, {}, {})


def test_every_setting_and_variable_of_ours_exists() -> None:
    for section, key in re.findall(r"`\[(\w+)\] (\w+)`", PAGE):
        assert key in config.keys_of(config.SECTIONS[section]), (section, key)
    assert not re.findall(r"MLXPOOL_\w+", PAGE)


@pytest.mark.parametrize("language", ["toml", "json", "yaml"])
def test_every_block_can_be_read_and_has_the_model(language: str) -> None:
    readers = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
    for block in blocks(language):
        assert readers[language](block)
        assert "smollm2" in block or block.startswith(OURS)


def test_every_figure_that_a_client_is_told_to_look_up_is_in_the_list_of_models() -> None:
    assert "`context_window` in `GET /v1/models`" in PAGE
    assert "context_window" in (ROOT / "parent/edge/models.py").read_text()


def test_the_readme_leads_to_it() -> None:
    assert "(docs/clients.md)" in (ROOT / "README.md").read_text()
