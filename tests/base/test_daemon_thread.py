"""A thread beside a loop: order, errors, interrupts, coroutines for its calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from p2ptrain.base.background import in_background
from p2ptrain.base.daemon_thread import DaemonThread, nap

LONG_S = 60.0


def test_calls_are_made_in_order_in_one_thread_and_raise_their_errors() -> None:
    async def scene() -> None:
        with DaemonThread("reader") as thread:
            names = await asyncio.gather(*[thread.run(lambda: threading.current_thread().name) for _ in range(3)])
            assert names == ["reader"] * 3
            with pytest.raises(ZeroDivisionError):
                await thread.run(lambda: 1 / 0)
            assert await thread.run(max, 2, 3) == 3

    asyncio.run(scene())


def test_a_cancelled_run_interrupts_its_function_which_cleans_up() -> None:
    ended = list[str]()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        try:
            nap(LONG_S)
        except KeyboardInterrupt:
            ended.append("interrupted")
            raise

    async def scene() -> None:
        with DaemonThread("worker") as thread:
            task = asyncio.create_task(thread.run(work))
            await asyncio.to_thread(begun.wait, LONG_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scene())
    assert ended == ["interrupted"]


def test_a_wait_outside_of_the_interpreter_is_woken_and_then_interrupted() -> None:
    begun, woken = threading.Event(), threading.Event()
    ended = list[str]()

    def work() -> None:
        begun.set()
        try:
            woken.wait(LONG_S * 60)
        except KeyboardInterrupt:
            ended.append("interrupted")

    async def scene() -> None:
        with DaemonThread("worker") as thread:
            task = asyncio.create_task(thread.run(work, wake=woken.set))
            await asyncio.to_thread(begun.wait, LONG_S)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(scene())
    assert ended == ["interrupted"]


def test_a_call_may_wait_for_the_loop() -> None:
    async def doubled(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def late() -> None:
        raise TimeoutError("its own")

    async def scene() -> None:
        with DaemonThread("worker") as thread:
            assert await thread.run(lambda: thread.result_of(doubled(4))) == 8
            with pytest.raises(TimeoutError, match="its own"):
                await thread.run(lambda: thread.result_of(late()))

    asyncio.run(scene())


def test_a_background_task_that_fails_ends_the_block_with_its_error() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("own") from KeyError("cause")

    async def scene() -> None:
        async with in_background(asyncio.sleep(LONG_S), fail()):
            await asyncio.sleep(LONG_S)

    with pytest.raises(ZeroDivisionError, match="own") as caught:
        asyncio.run(scene())
    assert isinstance(caught.value.__cause__, KeyError)


def test_background_tasks_end_with_the_block_and_its_error_is_raised() -> None:
    ended = list[str]()

    async def wait() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            ended.append("cancelled")

    async def scene(fails: bool) -> None:
        async with in_background(wait()):
            await asyncio.sleep(0)
            if fails:
                raise ValueError("the block's")

    asyncio.run(scene(False))
    with pytest.raises(ValueError, match="the block's"):
        asyncio.run(scene(True))
    assert ended == ["cancelled"] * 2
