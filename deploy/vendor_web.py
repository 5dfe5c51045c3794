"""Fetch the libraries that the dashboard and its tests carry, and record what was fetched.

    python deploy/vendor_web.py            # fetch all, as pinned below
    python deploy/vendor_web.py --check    # compare what lies there with the manifests; fetches nothing

The page has no build step: a library is one or two ES modules and its licence, copied from its npm package
into a folder that carries its version, so that a browser may keep it for ever. Browsers know no bare names
("preact"), and an import map would be an inline script, which the page's Content-Security-Policy forbids:
so bare imports are rewritten to relative paths, and mentions of source maps taken out; nothing else is
changed. A manifest beside the folders says name, version, licence and the SHA-256 of every file as it lies
there; a test compares. This script owns both vendor folders: what is in them and not in PACKAGES is removed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE_VENDOR = ROOT / "parent/web/vendor"
TEST_VENDOR = ROOT / "tests/browser/vendor"
MANIFEST = "manifest.json"
LICENSES = re.compile(r"package/LICEN[SC]E[^/]*", re.IGNORECASE)
# `from"preact"`, `from 'preact/hooks'`: a static import of a name, not of a path.
BARE_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])([@a-zA-Z][^"'.:]*)\2""")


@dataclass(frozen=True)
class Package:
    """One npm package. files: path in the package → name in the vendor folder. into: the vendor folder."""

    name: str
    version: str
    files: dict[str, str]
    into: Path = PAGE_VENDOR

    @property
    def folder(self) -> str:
        """`@preact/signals` 2.11.4 lies in `preact-signals-2.11.4`."""
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}"


PACKAGES = (
    Package("preact", "11.2.0", {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"}),
    Package("htm", "3.1.1", {"dist/htm.mjs": "htm.js"}),
    Package("@preact/signals-core", "1.14.5", {"dist/signals-core.mjs": "signals-core.js"}),
    Package("@preact/signals", "2.11.4", {"dist/signals.mjs": "signals.js"}),
    Package("marked", "18.2.1", {"lib/marked.esm.js": "marked.js"}),
    Package("uplot", "1.6.32", {"dist/uPlot.esm.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"}),
    Package("axe-core", "4.14.1", {"axe.min.js": "axe.min.js"}, TEST_VENDOR),
)


def module_paths(into: Path) -> dict[str, str]:
    """What a bare name means in this vendor folder: name → path below it."""
    paths = {}
    for package in PACKAGES:
        if package.into == into:
            main, *others = package.files.values()
            paths[package.name] = f"{package.folder}/{main}"
            paths |= {f"{package.name}/{Path(other).stem}": f"{package.folder}/{other}" for other in others}
    return paths


def rewrite_imports(source: str, paths: dict[str, str]) -> str:
    """The module with every bare import made relative. Raises ValueError for a name that isn't vendored."""

    def relative(match: re.Match[str]) -> str:
        keyword, quote, name = match.groups()
        if name not in paths:
            raise ValueError(f"it imports {name!r}, which is not vendored; add it to PACKAGES")
        return f"{keyword}{quote}../{paths[name]}{quote}"

    return BARE_IMPORT.sub(relative, source)


def fetch(package: Package) -> tuple[dict[str, bytes], str]:
    """The wanted files and licences of one package, name in the vendor folder → content; and its licence's
    short name."""
    with tempfile.TemporaryDirectory() as scratch:
        packed = subprocess.run(
            ["npm", "pack", "--json", "--ignore-scripts", f"{package.name}@{package.version}"],
            cwd=scratch,
            check=True,
            capture_output=True,
            text=True,
        )
        archive = (Path(scratch) / json.loads(packed.stdout)[0]["filename"]).read_bytes()
    found: dict[str, bytes] = {}
    license_name = ""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            inside = member.name.removeprefix("package/")
            name = package.files.get(inside)
            if inside == "package.json":
                license_name = json.load(tar.extractfile(member) or io.BytesIO())["license"]
            if name is None and LICENSES.fullmatch(member.name):
                name = inside
            content = tar.extractfile(member) if name is not None and member.isfile() else None
            if name is not None and content is not None:
                found[name] = content.read()
    missing = set(package.files.values()) - set(found)
    if missing or not any(LICENSES.fullmatch(f"package/{name}") for name in found):
        lacks = ", ".join(sorted(missing)) or "a licence file"
        raise SystemExit(f"{package.name} {package.version} has no {lacks}")
    return found, license_name


def vendor(into: Path) -> None:
    """Fill one vendor folder anew."""
    shutil.rmtree(into, ignore_errors=True)
    paths = module_paths(into)
    entries = []
    for package in (p for p in PACKAGES if p.into == into):
        folder = into / package.folder
        folder.mkdir(parents=True)
        hashes = {}
        files, license_name = fetch(package)
        for name, content in sorted(files.items()):
            written = content
            if name.endswith(".js"):
                text = content.decode()
                # A source map that isn't shipped is a 404 in every developer's console.
                text = re.sub(r"\n?//# sourceMappingURL=\S+\s*$", "\n", text)
                written = rewrite_imports(text, paths).encode() if into == PAGE_VENDOR else text.encode()
            (folder / name).write_bytes(written)
            hashes[f"{package.folder}/{name}"] = hashlib.sha256(written).hexdigest()
        entries.append(
            {
                "name": package.name,
                "version": package.version,
                "license": license_name,
                "sha256": hashes,
            }
        )
    (into / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n")


def differences(into: Path) -> list[str]:
    """What lies in a vendor folder and is not what its manifest says; empty when all is as fetched."""
    manifest = json.loads((into / MANIFEST).read_text())
    pinned = {(p.name, p.version) for p in PACKAGES if p.into == into}
    listed = {(entry["name"], entry["version"]) for entry in manifest}
    wrong = [f"{name} {version}: pinned and not fetched" for name, version in sorted(pinned - listed)]
    wrong += [f"{name} {version}: fetched and not pinned" for name, version in sorted(listed - pinned)]
    hashes = {path: value for entry in manifest for path, value in entry["sha256"].items()}
    lying = {
        str(path.relative_to(into)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in into.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }
    wrong += [f"{path}: missing" for path in sorted(hashes.keys() - lying.keys())]
    wrong += [f"{path}: not in the manifest" for path in sorted(lying.keys() - hashes.keys())]
    both = hashes.keys() & lying.keys()
    return wrong + [f"{path}: changed" for path in sorted(both) if hashes[path] != lying[path]]


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Fetch the dashboard's libraries through npm.")
    parser.add_argument("--check", action="store_true", help="compare with the manifests, fetch nothing")
    args = parser.parse_args()
    folders = (PAGE_VENDOR, TEST_VENDOR)
    if not args.check:
        for folder in folders:
            vendor(folder)
    wrong = [line for folder in folders for line in differences(folder)]
    print("\n".join(wrong) or "the vendored files are what the manifests say")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
