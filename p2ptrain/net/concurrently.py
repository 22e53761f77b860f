"""Concurrent awaitables: the first failure cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar, overload

from p2ptrain.base.errors import NetworkError, RemoteError

S = TypeVar("S")
T = TypeVar("T")


@overload
async def concurrently(one: Awaitable[S], other: Awaitable[T], /) -> tuple[S, T]: ...
@overload
async def concurrently(*works: Awaitable[T]) -> tuple[T, ...]: ...
async def concurrently(*works: Awaitable[Any]) -> tuple[Any, ...]:
    """Run all awaitables and return their results.

    Raises the first NetworkError or RemoteError, not wrapped in an exception group.
    """
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_coroutine(work)) for work in works]
    except* (NetworkError, RemoteError) as errors:
        failure = errors.exceptions[0]
    if failure is not None:  # raised inside except*, Python before 3.11.4 would wrap it in a group
        raise failure
    return tuple(each.result() for each in running)


async def _coroutine(work: Awaitable[T]) -> T:
    return await work
