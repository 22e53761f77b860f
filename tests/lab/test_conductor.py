"""Queue of a conductor's acts: parallel for different hosts, in order for the same host."""

from __future__ import annotations

import asyncio

import pytest

from lab.conductor import TaskQueue


def test_work_of_one_key_waits_and_of_others_does_not() -> None:
    heard: list[str] = []

    async def scene() -> None:
        queue, gate = TaskQueue(), asyncio.Event()

        async def waits() -> None:
            await gate.wait()
            heard.append("a first")

        async def says(word: str) -> None:
            heard.append(word)
            gate.set()

        queue.add("a", waits)
        queue.add("a", lambda: says("a second"))
        queue.add("b", lambda: says("b"))
        await queue.join()
        queue.add("a", lambda: says("a third"))
        await queue.join()

    asyncio.run(scene())
    assert heard == ["b", "a first", "a second", "a third"]


def test_a_failure_is_raised_and_ends_its_key() -> None:
    heard: list[str] = []

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def says() -> None:
        heard.append("behind")

    async def scene() -> None:
        queue = TaskQueue()
        queue.add("a", fails)
        queue.add("a", says)
        await queue.join()

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(scene())
    assert heard == []


def test_work_in_progress_can_be_cancelled() -> None:
    heard: list[str] = []

    async def hangs() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            heard.append("ended")

    async def scene() -> None:
        queue = TaskQueue()
        queue.add("a", hangs)
        queue.add("a", hangs)  # which never begins
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        queue.check()  # nothing is over yet
        await queue.cancel()
        queue.check()

    asyncio.run(scene())
    assert heard == ["ended"]
