"""Figures service: peers tell their figures to nodes that show the swarm, if their owners agreed; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import virtual_time
from memory_network import MemoryNetwork

from bootstrap.swarm_view import POLL_S
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.figures_service import MAX_TOLD, FiguresService, Telling, ask_figures
from p2ptrain.ports import Link
from p2ptrain.statements import packed

WATCHER, PEER = PeerId("watcher"), PeerId("peer")
Answer = tuple[dict[str, Any], list[Any]] | None


def telling(serial: int) -> tuple[dict[str, Any], list[list[Any]]]:
    exchanges = [[n, 5.0, "partner", 0.5, 1000, 0.1, "direct"] for n in range(serial + 1, 101)]
    return {"tokens": 7, "loss": 2.5, "device": None}, exchanges


def asked(handler: Callable[[Link], Awaitable[None]], serial: int = 0, times: int = 1) -> Answer:
    """Return the last of several answers."""

    async def main() -> Answer:
        network = MemoryNetwork(0.01)
        await network.transport(PEER).listen(handler)
        answer: Answer = None
        for _ in range(times):
            answer = await ask_figures(network.transport(WATCHER), PEER, (), serial)
        return answer

    return virtual_time.run(main())


def teller(telling: Telling | None) -> Callable[[Link], Awaitable[None]]:
    return FiguresService(lambda: telling, clock=lambda: 0.0).answer


def saying(*words: Any) -> Callable[[Link], Awaitable[None]]:
    """Return a handler that answers every request with these words."""

    async def answer(link: Link) -> None:
        await link.receive()
        await link.send(FrameKind.MESSAGE, packed(list(words)))

    return answer


def test_a_peer_tells_what_it_knows_and_what_is_new() -> None:
    answer = asked(teller(telling), serial=90)
    assert answer is not None
    row, exchanges = answer
    assert row == {"tokens": 7, "loss": 2.5}
    assert [each[0] for each in exchanges] == list(range(91, 101))


def test_an_answer_is_bounded_and_has_the_newest() -> None:
    answer = asked(teller(telling))
    assert answer is not None
    assert [each[0] for each in answer[1]] == list(range(101 - MAX_TOLD, 101))


def test_who_keeps_its_figures_says_so() -> None:
    assert asked(teller(None)) is None


def test_who_asks_too_often_is_turned_away() -> None:
    assert asked(teller(telling), times=40) is not None
    with pytest.raises(NetworkError):
        asked(teller(telling), times=41)


def test_a_watcher_asks_half_as_often_as_it_may() -> None:
    """Check the polling period: rounds have no slack, so at the full rate some minute would have one too many."""
    assert 2 * 60.0 / POLL_S <= 40


@pytest.mark.parametrize(
    "words",
    [["figures"], ["figures", {}, []], ["figures", [["a"]], []], ["figures", [[1, 2]], []], ["else"], [1], ["kept", 1]],
)
def test_nonsense_is_refused(words: list[Any]) -> None:
    if any(isinstance(each, dict) for each in words):
        words = ["figures", [["a", 1, 2]], []]  # a map is not a statement
    with pytest.raises(RemoteError):
        asked(saying(*words))


def test_who_says_nothing_is_given_up() -> None:
    async def silence(link: Link) -> None:
        await asyncio.sleep(1e6)

    with pytest.raises(NetworkError, match="did not answer a request about figures"):
        asked(silence)
