"""The Homebrew formula and the proxy examples: what can be checked without Homebrew and without a proxy."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from mlxpool.shared import config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
URL = "https://example.org/mlxpool-9.8.7.tar.gz"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_formula", DEPLOY / "homebrew/make_formula.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tarball(folder: Path, **files: str) -> Path:
    path = folder / "mlxpool.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"mlxpool-9.8.7/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


RELEASE = {"pyproject.toml": '[project]\nversion = "9.8.7"\n', "constraints.txt": "mlx==0.32.4\n"}


def test_the_formula_has_the_version_and_checksum_of_its_tarball(maker: ModuleType, tmp_path: Path) -> None:
    release = tarball(tmp_path, **RELEASE)
    said = maker.formula(release, URL, "https://example.org")
    assert f'  url "{URL}"\n  version "9.8.7"\n' in said
    assert f'  sha256 "{hashlib.sha256(release.read_bytes()).hexdigest()}"\n' in said
    assert "$" not in re.sub(r"#\{\w+\}", "", said)
    if shutil.which("ruby"):
        checked = subprocess.run(["ruby", "-wc"], input=said, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("files", "url", "message"),
    [
        ({"pyproject.toml": "x"}, URL, "has no constraints.txt in its top folder"),
        (RELEASE, 'https://a"; system("x")', '--url = \'https://a"; system("x")\': use an https address'),
        (RELEASE, "https://a#{x}", "use an https address"),
        (RELEASE, "http://a", "use an https address"),
    ],
)
def test_what_no_formula_can_be_made_of_is_refused(
    maker: ModuleType, tmp_path: Path, files: dict[str, str], url: str, message: str
) -> None:
    with pytest.raises(maker.FormulaError, match=re.escape(message)):
        maker.formula(tarball(tmp_path, **files), url, "https://example.org")


def test_the_formulas_commands_exist(tmp_path: Path) -> None:
    """Each `mlxpool …` it runs or tells of, run with --help here."""
    template = (DEPLOY / "homebrew/mlxpool.rb.template").read_text()
    told = set(re.findall(r"mlxpool (service \w+|pull|models)", template)) | {"completion"}
    assert told == {"service install", "service uninstall", "pull", "models", "completion"}
    for command in told:
        subprocess.run(
            [sys.executable, "-m", "mlxpool.parent", *command.split(), "--help"],
            check=True,
            capture_output=True,
        )


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_the_settings_that_a_proxy_example_tells_are_valid(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "proxy" / name).read_text()
    toml = re.findall(r"^#   (.+)$", text, re.M)
    path = tmp_path / "config.toml"
    path.write_text("\n".join(toml).replace("…", "sk-1"))
    server = config.load(path, {}, {}).server
    assert server.api_keys == ("sk-1",)
    assert server.allowed_hosts == ("models.example",)
    assert server.allowed_origins == ("https://models.example",)
    assert f"127.0.0.1:{config.Server().port}" in text


def test_nginx_holds_nothing_back_and_waits_long_enough() -> None:
    text = (DEPLOY / "proxy/nginx.conf").read_text()
    set_to = dict(re.findall(r"^\s+(\w+) ([^;{]+);$", text, re.M))
    assert set_to["proxy_buffering"] == "off"
    assert set_to["gzip"] == "off"
    assert set_to["proxy_read_timeout"] == "1h"
    assert set_to["client_max_body_size"] == "64m"
    assert set_to["proxy_next_upstream"] == "off"
    assert set_to["proxy_http_version"] == "1.1"


def test_caddy_compresses_nothing_and_lets_a_client_leave() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "proxy/Caddyfile").read_text())
    assert "encode" not in text
    assert "flush_interval" not in text
    assert "max_size 64MiB" in text
