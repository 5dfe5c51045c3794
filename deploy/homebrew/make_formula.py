"""Write the Homebrew formula of a release: `make_formula.py TARBALL --url URL --homepage URL > mlxpool.rb`.

The checksum and the version are the tarball's own, so nothing in the formula is typed by hand. TARBALL is the
file that URL serves, as `git archive --prefix=mlxpool-VERSION/ -o mlxpool-VERSION.tar.gz vVERSION` makes it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import string
import sys
import tarfile
import tomllib
from pathlib import Path, PurePosixPath

TEMPLATE = Path(__file__).with_name("mlxpool.rb.template")
# The formula installs with these two.
NEEDED = ("pyproject.toml", "constraints.txt")


class FormulaError(Exception):
    """No formula can be made of this. One line."""


def formula(tarball: Path, url: str, homepage: str) -> str:
    """The text of mlxpool.rb. Raises FormulaError."""
    for name, value in (("--url", url), ("--homepage", homepage)):
        if not re.fullmatch(r"https://[^\s\"#\\]+", value):
            raise FormulaError(f"{name} = {value!r}: use an https address")
    try:
        content = tarball.read_bytes()
        found = _read(tarball)
    except (OSError, tarfile.TarError) as problem:
        raise FormulaError(f"{tarball} can't be read: {problem}") from None
    for name in NEEDED:
        if name not in found:
            raise FormulaError(
                f"{tarball} has no {name} in its top folder; make it with git archive --prefix"
            )
    project = tomllib.loads(found["pyproject.toml"].decode())["project"]
    return string.Template(TEMPLATE.read_text()).substitute(
        homepage=homepage,
        url=url,
        version=project["version"],
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _read(tarball: Path) -> dict[str, bytes]:
    """The needed files of the top folder."""
    found = {}
    with tarfile.open(tarball) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            file = archive.extractfile(member) if len(path.parts) == 2 and path.name in NEEDED else None
            if file is not None:
                found[path.name] = file.read()
    return found


def main() -> int:
    """Exit code 2 on what no formula can be made of."""
    parser = argparse.ArgumentParser(description="Write the Homebrew formula of a release.")
    parser.add_argument("tarball", type=Path)
    parser.add_argument("--url", required=True, help="where the tarball is served")
    parser.add_argument("--homepage", required=True, help="the project's page")
    args = parser.parse_args()
    try:
        sys.stdout.write(formula(args.tarball, args.url, args.homepage))
    except FormulaError as problem:
        print(f"make_formula: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
