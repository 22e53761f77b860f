"""What a bootstrap carries for a large swarm (``bench.bootstrap_load``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.bootstrap_load import Costs, SwarmCase, load
from p2ptrain.net.relay.relay import FOR_A_SERVER

SWARM = SwarmCase()


def test_punching_leaves_the_pairs_that_no_hole_connects() -> None:
    with_holes, without = load(SWARM), load(replace(SWARM, punched=0.0))
    assert with_holes.relayed_share == pytest.approx(0.6**2 * 0.3)
    assert without.relayed_share == 0.6  # each pair whose target is unreachable
    assert with_holes.relayed_mbit_s / without.relayed_mbit_s == pytest.approx(0.18)
    bytes_s = 10_000 / 600 * with_holes.relayed_share * 2 * SWARM.exchange_bytes
    assert with_holes.relayed_mbit_s == pytest.approx(bytes_s * 8e-6)


def test_peers_that_relay_share_bytes_and_circuits_but_not_the_bootstraps_requests() -> None:
    alone, shared = load(SWARM), load(replace(SWARM, relays=9))
    assert shared.relayed_mbit_s == pytest.approx(alone.relayed_mbit_s / 10)
    assert shared.circuits == pytest.approx(alone.circuits / 10)
    assert shared.places_wanted == alone.places_wanted == 6000
    assert shared.near_per_s == alone.near_per_s
    assert load(replace(SWARM, bootstraps=2)).places_wanted == 3000


def test_memory_is_bounded_by_the_limits_whatever_the_swarm_wants() -> None:
    costs = Costs()
    most = FOR_A_SERVER.connections * costs.connection_bytes + FOR_A_SERVER.circuits * costs.circuit_bytes
    for peers in (100, 10_000, 1_000_000):
        assert load(replace(SWARM, peers=peers)).memory_mb * 1e6 <= most
    assert load(SWARM).memory_mb * 1e6 == pytest.approx(most)


def test_a_small_swarm_is_no_load() -> None:
    small = load(replace(SWARM, peers=8))
    assert small.connects_per_s == 0
    assert small.cores < 0.01
    assert small.relayed_mbit_s < 1
