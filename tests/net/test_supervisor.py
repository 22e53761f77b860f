"""Replacement of a node whose p2pd died, with fake nodes in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import virtual_time

from p2ptrain.base.errors import DeviceError, NetworkError, UserError
from p2ptrain.net.supervisor import STABLE_S, NodeSupervisor


def supervised(lives: list[float | Exception], until_s: float) -> tuple[list[tuple[str, float]], list[str]]:
    """Run a supervisor whose nodes live so long, or fail to start; return the reported deaths, and what was closed."""
    deaths: list[tuple[str, float]] = []
    closed: list[str] = []
    upcoming = iter(lives)

    async def start() -> Any:
        life = next(upcoming, 1e9)
        if isinstance(life, Exception):
            raise life

        async def close() -> None:
            closed.append("node")

        return SimpleNamespace(life=life, close=close, daemon=SimpleNamespace(ending="exit code 1"))

    class Service:
        async def close(self) -> None:
            closed.append("service")
            raise NetworkError("p2pd is gone")

    async def equip(node: Any) -> None:
        supervisor.services.append(Service())

    supervisor = NodeSupervisor(
        start,
        equip,
        attend=lambda node: asyncio.sleep(node.life),  # type: ignore[attr-defined]
        on_death=lambda why, pause_s: deaths.append((why, pause_s)),
        on_return=lambda: closed.append("back"),
    )

    async def main() -> None:
        await supervisor.start()
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(until_s)
        running.cancel()
        await asyncio.wait([running])
        await supervisor.close()
        with pytest.raises(NetworkError):
            _ = supervisor.node

    virtual_time.run(main())
    return deaths, closed


def test_pauses_grow_while_p2pd_dies_soon_and_begin_anew_after_a_long_life() -> None:
    deaths, closed = supervised([1.0, 1.0, STABLE_S + 1.0], 1000.0)
    assert deaths == [("exit code 1", 1.0), ("exit code 1", 2.0), ("exit code 1", 1.0)]
    assert closed == ["service", "node", "back"] * 3 + ["service", "node"]


def test_a_failure_to_start_only_delays_the_next_try() -> None:
    deaths, closed = supervised([1.0, NetworkError("too late"), KeyError()], 100.0)
    assert deaths == [("exit code 1", 1.0), ("too late", 2.0), ("KeyError", 4.0)]
    assert closed.count("back") == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EOFError("gone"), DeviceError),
        (OSError(111, "refused"), DeviceError),
        (UserError("Taken.", "Stop it."), UserError),
    ],
)
def test_a_first_node_that_does_not_start_is_the_owners_matter(error: Exception, raised: type[UserError]) -> None:
    with pytest.raises(raised):
        supervised([error], 1.0)
