"""A served parent for tests that are plain functions, in a fixture of any scope."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from tests.tools.served import Served, serve


def held(**settings: Any) -> Iterator[Served]:
    """`serve(**settings)` for a fixture that is no coroutine."""
    loop = asyncio.new_event_loop()
    context = serve(**settings)
    try:
        served = loop.run_until_complete(context.__aenter__())
        try:
            yield served
        finally:
            loop.run_until_complete(context.__aexit__(None, None, None))
    finally:
        loop.close()
