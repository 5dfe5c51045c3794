"""Ids of calls on the way to Anthropic's clients and back."""

from __future__ import annotations

import re

import pytest

from mlxpool.shared.api.tool_use_ids import decode, encode

MODELS_OWN = [
    "call_0123456789abcdef",
    "functions.get:0",
    "aB3dE6gH9",
    "0",
    "call_",
    "call_é\n",
    "toolu_x",
    "call_mlxpool_x",
    "mlxpool_Zg",
    "x" * 5000,
]


@pytest.mark.parametrize("call_id", MODELS_OWN)
def test_a_client_is_told_an_id_of_its_protocol_and_sends_back_the_models_own(call_id: str) -> None:
    told = encode(call_id)
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]+", told)
    assert decode(told) == call_id


def test_this_servers_ids_stay_readable_and_no_two_become_one() -> None:
    assert encode("call_ab12") == "toolu_ab12"
    assert len({encode(call_id) for call_id in MODELS_OWN}) == len(MODELS_OWN)


@pytest.mark.parametrize("foreign", ["call_x", "srvtoolu_01", "toolu_", "toolu_a.b", "toolu_mlxpool_!", "x"])
def test_ids_that_nobody_here_made_stay(foreign: str) -> None:
    assert decode(foreign) == foreign


@pytest.mark.parametrize(
    "damaged", ["toolu_mlxpool_", "toolu_mlxpool_A", "toolu_mlxpool__w", "toolu_mlxpool_Zh"]
)
def test_a_damaged_id_stays_as_it_is(damaged: str) -> None:
    assert decode(damaged) == damaged
