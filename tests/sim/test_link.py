"""Ends of simulated links, and starts of their payloads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.events import Event, LinkFailed, Swap
from sim.link import LinkEnd
from sim.peer import SimulatedPeer

ENCODED = SimpleNamespace(parts=[b"a payload"])


class Owner:
    """Owner of one end, for which nothing takes time."""

    def __init__(self) -> None:
        self.ends: dict[LinkId, LinkEnd] = {}
        self.heard: list[Event] = []

    def later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        callback(*arguments)

    def handle(self, event: Event) -> None:
        self.heard.append(event)


def end_of(owner: Owner, serial: int) -> LinkEnd:
    return LinkEnd(cast(SimulatedPeer, owner), LinkId(PeerId("them"), serial, outbound=False), latency_s=0.1)


@pytest.mark.parametrize(
    ("in_order", "has_begun", "unbegun"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_other_side_hears_whether_the_payload_had_begun(in_order: bool, has_begun: bool, unbegun: bool) -> None:
    owner = Owner()
    ours, theirs = end_of(Owner(), 1), end_of(owner, 2)
    ours.other, theirs.other = theirs, ours
    ours.swap = cast(Swap, cast(Any, "begun")) if has_begun else None
    ours.close("it ends", in_order=in_order)
    assert owner.heard == [LinkFailed(theirs.link, "it ends", unbegun=unbegun)]


@pytest.mark.parametrize("sends", [True, False])
def test_whoever_answers_waits_for_the_openers_payload_to_begin(sends: bool) -> None:
    """Check a codec without proposals: if the initiator sends nothing, the payload never starts."""
    started: list[str] = []
    payloads = SimpleNamespace(propose=lambda _: (None, []), encode=lambda *_: ENCODED)

    def owner(name: str, adversary: object = None) -> SimulatedPeer:
        network = SimpleNamespace(
            conditions=SimpleNamespace(breaks_swap=lambda *_: None),
            transfers=SimpleNamespace(start=lambda *_: started.append(name)),
        )
        learner = SimpleNamespace(payloads=payloads)
        named = {
            "peer": PeerId(name),
            "adversary": adversary,
            "learner": learner,
            "network": network,
            "up": None,
            "down": None,
        }
        return cast(SimulatedPeer, SimpleNamespace(later=Owner().later, **named))

    opener = owner("opener", None if sends else SimpleNamespace(sends=lambda *_: None))
    theirs = LinkEnd(opener, LinkId(PeerId("answerer"), 1, outbound=True), latency_s=0.1)
    ours = LinkEnd(owner("answerer"), LinkId(PeerId("opener"), 1, outbound=False), latency_s=0.1)
    theirs.other, ours.other = ours, theirs
    swap = cast(Swap, SimpleNamespace(fragments=(0,)))
    ours.begin(swap)
    assert started == []
    theirs.begin(swap)
    assert started == (["opener", "answerer"] if sends else [])
