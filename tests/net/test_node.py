"""Addresses that a node dials at its start."""

from __future__ import annotations

from random import Random

import pytest

from p2ptrain.base.ids import PeerId
from p2ptrain.net.node import MAX_DIALS_AT_ONCE, whom_to_dial

BOOTSTRAPS = [PeerId(f"bootstrap {number}") for number in range(16)]
PEERS = [PeerId(f"peer {number}") for number in range(64)]


def drawn(bootstraps: list[PeerId], peers: list[PeerId], has_company: bool, rounds: int = 400) -> list[list[PeerId]]:
    random = Random(1)
    return [whom_to_dial([*peers, *bootstraps], bootstraps, has_company, random) for _ in range(rounds)]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_lone_node_always_dials_a_bootstrap_and_peers_besides(count: int) -> None:
    """Check a cache of 64 dead peers and a live bootstrap: the bootstrap is dialed at once."""
    bootstraps = BOOTSTRAPS[:count]
    for dialed in drawn(bootstraps, PEERS, has_company=False):
        assert len(dialed) == len(set(dialed)) == MAX_DIALS_AT_ONCE
        assert len(set(dialed) & set(bootstraps)) == min(count, MAX_DIALS_AT_ONCE // 2)


def test_a_lone_node_that_knows_few_dials_them_all() -> None:
    for dialed in drawn(BOOTSTRAPS[:6], PEERS[:2], has_company=False):
        assert set(dialed) == {*BOOTSTRAPS[:6], *PEERS[:2]}
    assert all(len(each) == MAX_DIALS_AT_ONCE for each in drawn(BOOTSTRAPS, [], has_company=False))
    assert drawn([], [], has_company=False, rounds=1) == [[]]


def test_in_company_it_is_a_bootstrap_every_other_time() -> None:
    dialed = [peer for [peer] in drawn(BOOTSTRAPS[:1], PEERS, has_company=True)]
    assert 160 < dialed.count(BOOTSTRAPS[0]) < 240
    assert len(set(dialed)) > 50


def test_in_company_whoever_is_known_is_dialed() -> None:
    assert all(len(each) == 1 for each in drawn(BOOTSTRAPS, [], has_company=True))
    assert all(len(each) == 1 for each in drawn([], PEERS, has_company=True))
    assert drawn([], [], has_company=True, rounds=1) == [[]]


def test_all_are_dialed_some_day() -> None:
    dialed = {peer for each in drawn(BOOTSTRAPS, PEERS, has_company=False) for peer in each}
    assert dialed == {*BOOTSTRAPS, *PEERS}
