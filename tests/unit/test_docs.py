"""The documents say what the code does: made pages are fresh, and no key, command or code is missing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from mlxpool.parent.cli import COMMANDS, LATER_COMMANDS
from mlxpool.parent.edge.static import STATIC_PREFIX
from mlxpool.shared.api import anthropic_fields, chat_fields, completion_fields, response_fields
from mlxpool.shared.api.table import Field
from mlxpool.shared.config import SECTIONS, ModelSettings, keys_of
from mlxpool.shared.errors import STATUS_OF
from mlxpool.worker.grammar import keywords

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_what_make_docs_writes(generate: ModuleType) -> None:
    assert (DOCS / "configuration.md").read_text() == generate.configuration()


def test_the_command_line_page_is_what_make_docs_writes(generate: ModuleType) -> None:
    assert (DOCS / "cli.md").read_text() == generate.command_line()


def test_the_fields_page_is_what_make_docs_writes(generate: ModuleType) -> None:
    assert (DOCS / "fields.md").read_text() == generate.fields()


def test_the_page_of_jobs_lists_the_kinds_as_make_docs_writes_them(generate: ModuleType) -> None:
    assert (DOCS / "jobs.md").read_text() == generate.jobs()


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("Chat", chat_fields.FIELDS),
        ("Completions", completion_fields.FIELDS),
        ("Messages", anthropic_fields.FIELDS),
        ("Responses", response_fields.FIELDS),
    ],
)
def test_every_field_of_a_protocol_is_under_what_becomes_of_it(title: str, table: dict[str, Field]) -> None:
    protocols = re.split(r"^## ", (DOCS / "fields.md").read_text(), flags=re.M)
    (protocol,) = (text for text in protocols if text.startswith(f"{title}\n"))
    sections = re.split(r"^### ", protocol, flags=re.M)
    for heading, status in (("Honoured", "honoured"), ("Accepted", "accepted"), ("Refused", "refused")):
        (section,) = (text for text in sections if text.startswith(heading))
        rows = re.findall(r"^\| `(\w+)` \|", section, re.M)
        as_in_chat = re.findall(r"^As in chat: (.*)\.$", section, re.M)
        same = re.findall(r"`(\w+)`", "".join(as_in_chat))
        assert sorted([*rows, *same]) == sorted(name for name, row in table.items() if row.status == status)


def test_every_setting_has_its_row() -> None:
    text = (DOCS / "configuration.md").read_text()
    for section in (*SECTIONS.values(), ModelSettings):
        for key in keys_of(section):
            assert f"| `{key}`" in text


def test_the_readme_names_every_command_and_no_later_one() -> None:
    table = re.findall(r"^\| `mlxpool (\w+)", (ROOT / "README.md").read_text(), re.M)
    named = {name for name in table if name in COMMANDS}
    assert named == set(COMMANDS)
    assert not LATER_COMMANDS & set(table)


def test_every_error_code_is_in_the_http_page_with_its_status() -> None:
    text = (DOCS / "http.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", text, re.M))
    assert rows == {code: str(status) for code, status in STATUS_OF.items()}


def test_the_http_page_lists_the_routes_that_there_are() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "parent/edge").glob("*.py")))
    source = source.replace('STATIC_PREFIX + "', f'"{STATIC_PREFIX}')
    served = {
        f"{method.upper()} {path.replace(':.+', '')}"
        for method, path in re.findall(r'web\.(get|post|delete)\("([^"]+)"', source)
    }
    documented = set(
        re.findall(r"^\| `((?:GET|POST|DELETE) [^`]+)` \|", (DOCS / "http.md").read_text(), re.M)
    )
    assert documented == served


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))], ids=lambda p: p.name)
def test_links_between_the_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci/run").read_text()
    assert "```sh\nmake test\n```" in readme
    assert re.search(r"^make test$", ci, re.M)
    # All of `make check` but the tests, which have just run.
    assert re.search(r"^make lint$", ci, re.M)
    assert re.search(r"^check: lint$", (ROOT / "Makefile").read_text(), re.M)


def test_the_page_of_answers_lists_the_keywords_that_are_enforced() -> None:
    text = (DOCS / "answers.md").read_text()
    line = text.split("### Enforced keywords of a JSON schema\n\n")[1].splitlines()[0]
    assert set(re.findall(r"`([^`]+)`", line)) == {"type", *keywords.FAMILY_OF, *keywords.DECIDERS}


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\(decisions/([^)]+)\)", (DOCS / "architecture.md").read_text())
    assert listed == sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
