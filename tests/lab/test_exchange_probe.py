"""Waiting for an exchange of a fake peer with a real control socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab import exchange_probe
from lab.exchange_probe import PROBES, wait_for_exchange
from peer.owner.control_socket import ControlServer


def waited(home: Path, *counts: int, timeout_s: float = 10.0) -> tuple[bool, int]:
    """Return the result and the number of probes if the peer reports these numbers of exchanges."""
    looks = 0

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal looks
        assert request == {"command": "status"}
        looks += 1
        return {"status": {"exchanges_under_way": counts[min(looks, len(counts)) - 1]}}

    async def wait() -> bool:
        door = ControlServer(home, answer)
        await door.start()
        try:
            return await wait_for_exchange(home, timeout_s)
        finally:
            door.close()

    return asyncio.run(wait()), looks


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_probe, "PROBE_INTERVAL_S", 0.001)


def test_it_waits_for_the_first_exchange(tmp_path: Path) -> None:
    assert waited(tmp_path, 0, 0, 2) == (True, 2 + PROBES)


def test_an_exchange_counts_after_several_probes_in_a_row(tmp_path: Path) -> None:
    """Check that one probe is not enough: the partner may not know of the exchange yet."""
    assert waited(tmp_path, *[1] * (PROBES - 1), 0, 1) == (True, 2 * PROBES)


def test_the_wait_has_a_timeout(tmp_path: Path) -> None:
    was_amid, _ = waited(tmp_path, 0, timeout_s=0.1)
    assert not was_amid


def test_a_peer_that_does_not_answer_has_no_exchange(tmp_path: Path) -> None:
    assert not asyncio.run(wait_for_exchange(tmp_path, 0.05))
