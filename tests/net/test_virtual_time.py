"""The virtual clock on which all shell tests depend."""

import asyncio

import pytest
import virtual_time


def test_sleeping_takes_no_time_and_adds_up_exactly():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        for _ in range(10):
            await asyncio.sleep(0.1)
        await asyncio.sleep(86400.0)
        return loop.time()

    expected = 0.0
    for _ in range(10):
        expected += 0.1
    assert virtual_time.run(main()) == expected + 86400.0


def test_ties_run_in_the_order_they_were_scheduled():
    order = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for name in range(50):
            loop.call_at(7.0, order.append, name)
        await asyncio.sleep(8.0)

    virtual_time.run(main())
    assert order == list(range(50))


def test_a_cancelled_timer_does_not_hold_the_clock_up():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_at(5.0, lambda: None).cancel()
        await asyncio.sleep(9.0)
        return loop.time()

    assert virtual_time.run(main()) == 9.0


def test_timeouts_work():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 3.0


def test_waiting_for_nothing_is_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.DeadlockError):
        virtual_time.run(main())


def test_work_for_threads_is_done_at_once():
    async def main() -> tuple[int, float]:
        answer = await asyncio.to_thread(lambda: 6 * 7)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return answer, asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == (42, 0.0)
