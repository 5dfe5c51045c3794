"""Servers that the official clients are tried on, and the clients: strict, without retries.

A server lives as long as a test file. It runs in processes of its own, so the tests are plain functions and
use the clients' blocking forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.clients.answers import ANSWERS
from tests.tools.held import held
from tests.tools.scripted_events import told
from tests.tools.scripted_script import make_scripted_model
from tests.tools.served import Served

STARTER = "smollm2-135m"

# What a small model on a busy machine needs for some dozen tokens, many times over.
ANSWER_TIMEOUT_S = 360.0


@pytest.fixture(scope="module")
def starter_models(starter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the starter model in it."""
    models = tmp_path_factory.mktemp("models")
    (models / STARTER).symlink_to(starter_folder)
    return models


@pytest.fixture(scope="module")
def starter(starter_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`mlxpool up` with the starter model."""
    yield from held(tmp=tmp_path_factory.mktemp("starter"), models=starter_models)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same parent over scripted workers: a model for each of ANSWERS."""
    models = tmp_path_factory.mktemp("models")
    for name, events in ANSWERS.items():
        make_scripted_model(models, name, events=told(*events))
    yield from held(tmp=tmp_path_factory.mktemp("scripted"), models=models, scripted=True)


def openai_client(served: Served, strict: bool = True) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=ANSWER_TIMEOUT_S,
        _strict_response_validation=strict,
    )


def anthropic_client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=served.url,
        api_key="none",
        max_retries=0,
        timeout=ANSWER_TIMEOUT_S,
        _strict_response_validation=True,
    )


def lenient(served: Served) -> openai.OpenAI:
    """For what the vendor's own types don't allow although it answers so itself: a null finish_reason in all
    but the last chunk of a completion, and the user's messages in a compacted conversation."""
    return openai_client(served, strict=False)


@pytest.fixture(scope="module")
def scripted_gpt(scripted: Served) -> Iterator[openai.OpenAI]:
    with openai_client(scripted) as client:
        yield client


@pytest.fixture(scope="module")
def scripted_claude(scripted: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(scripted) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(starter: Served) -> Iterator[openai.OpenAI]:
    with openai_client(starter) as client:
        yield client


@pytest.fixture(scope="module")
def claude(starter: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(starter) as client:
        yield client
