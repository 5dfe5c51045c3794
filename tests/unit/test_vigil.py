"""A voice in the silence: what is said, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

from mlxpool.parent.edge.vigil import Vigil

NEVER_S = 3600.0


class Voice:
    """Counts its words, and may be held in the middle of one."""

    def __init__(self) -> None:
        self.words = 0
        self.spoke = asyncio.Event()
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.cut = False

    async def speak(self) -> None:
        self.words += 1
        self.spoke.set()
        try:
            await self.may_finish.wait()
        except asyncio.CancelledError:
            self.cut = True
            raise


async def test_a_wait_that_ends_before_the_first_word_is_silent() -> None:
    voice = Voice()
    async with Vigil(voice.speak, NEVER_S, NEVER_S) as vigil:
        await vigil.end()
    assert voice.words == 0


async def test_words_come_again_and_again_until_the_end() -> None:
    voice = Voice()
    async with asyncio.timeout(60), Vigil(voice.speak, 0, 0) as vigil:
        while voice.words < 3:
            voice.spoke.clear()
            await voice.spoke.wait()
        await vigil.end()
        said = voice.words
        for _ in range(5):
            await asyncio.sleep(0)
        assert voice.words == said


async def test_the_end_waits_for_a_word_that_is_being_said() -> None:
    voice = Voice()
    voice.may_finish.clear()
    async with asyncio.timeout(60), Vigil(voice.speak, 0, 0) as vigil:
        await voice.spoke.wait()
        ending = asyncio.create_task(vigil.end())
        await asyncio.sleep(0)
        assert not ending.done()
        voice.may_finish.set()
        await ending
    assert (voice.words, voice.cut) == (1, False)


async def test_an_error_does_not_wait_for_a_word() -> None:
    voice = Voice()
    voice.may_finish.clear()

    async def wait() -> None:
        async with asyncio.timeout(60), Vigil(voice.speak, 0, 0):
            await voice.spoke.wait()
            raise ValueError("news")

    with pytest.raises(ValueError, match="news"):
        await wait()
    assert voice.cut


async def test_a_word_that_fails_is_the_last_and_the_end_says_why() -> None:
    async def speak() -> None:
        raise ConnectionResetError("the client reads nothing")

    async def wait() -> None:
        async with Vigil(speak, 0, 0) as vigil:
            for _ in range(5):
                await asyncio.sleep(0)
            await vigil.end()

    with pytest.raises(ConnectionResetError):
        await wait()
