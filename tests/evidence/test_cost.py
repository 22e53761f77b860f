"""Cost model: durations computed by hand, published percentages, and impossible results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cost import (
    METHODS,
    MODULAR4_BITS,
    SPARSELOCO_BITS,
    CostSetting,
    CostTraffic,
    Method,
    at_bits,
    duration_s,
    implied_inner_step_seconds,
    inner_step_seconds,
    utilization,
)
from p2ptrain.recipes import RECIPES
from sim.scenario import Scenario
from sim.simulate import simulate

# 10^9 bits of model, 10^8 bit/s, 10 inner steps of 1 s, 5 peers: a swap takes 10 s, a ring 16 s.
ROUND = CostSetting(parameters=1e9, inner_step_s=1.0, inner_steps=10, up_bit_per_s=1e8, down_bit_per_s=2e8, peers=5)


def method(*traffic: CostTraffic, **changes: object) -> Method:
    return replace(Method("test", traffic), **changes)  # type: ignore[arg-type]


def test_durations_by_hand() -> None:
    assert duration_s(CostTraffic("pairs", 1), ROUND) == pytest.approx(10)
    assert duration_s(CostTraffic("pairs", 1, swaps=3, share=0.5), ROUND) == pytest.approx(15)
    assert duration_s(CostTraffic("all_reduce", 1), ROUND) == pytest.approx(2 * 4 / 5 * 10)
    assert duration_s(CostTraffic("all_gather", 1), ROUND) == pytest.approx(10 + 4 * 5)
    assert duration_s(CostTraffic("all_reduce", 1), ROUND, bandwidth_share=0.1) == pytest.approx(160)
    late = replace(ROUND, latency_s=0.25)
    assert duration_s(CostTraffic("pairs", 1), late) == pytest.approx(10.5)
    assert duration_s(CostTraffic("all_reduce", 1), late) == pytest.approx(16 + 8 * 0.25)


def test_stalls_by_hand() -> None:
    blocking = method(CostTraffic("all_reduce", 1))
    assert utilization(blocking, ROUND).others == pytest.approx(10 / 26)
    assert utilization(replace(blocking, every_step=True), ROUND).others == pytest.approx(1 / 17)
    under_a_phase = method(CostTraffic("all_reduce", 1, hiding="phase"))
    assert utilization(under_a_phase, ROUND).others == pytest.approx(10 / 16)
    assert utilization(under_a_phase, replace(ROUND, inner_steps=16)).others == pytest.approx(1)


def test_an_asynchronous_method_never_waits_and_says_what_it_could_not_send() -> None:
    free = method(CostTraffic("pairs", 4, hiding="asynchronous"))
    found = utilization(free, ROUND)
    assert found.others == 1
    assert found.delivered == pytest.approx(10 / 40)


def test_without_rounds_a_straggler_delays_only_its_partner() -> None:
    # One of four possible partners has a tenth of the bandwidth: 40 + (400 - 40) / 4 seconds per swap.
    slow = replace(ROUND, straggler_share=0.1)
    free = method(CostTraffic("pairs", 4, hiding="asynchronous"), straggler="delays its partner")
    assert utilization(free, slow).delivered == pytest.approx(10 / 130)
    waiting = method(CostTraffic("pairs", 4, hiding="phase"), straggler="delays its partner")
    assert utilization(waiting, slow).others == pytest.approx(10 / 130)


def test_applying_averages_counts_for_all_methods() -> None:
    busy = replace(ROUND, apply_s_per_parameter=1e-9)  # 1 s for each average
    assert utilization(method(CostTraffic("pairs", 1, hiding="asynchronous", swaps=2)), busy).others == pytest.approx(
        10 / 12
    )
    assert utilization(method(CostTraffic("all_reduce", 1)), busy).others == pytest.approx(10 / 27)


def test_a_straggler_slows_all_peers_of_a_blocking_method_unless_it_trains_less() -> None:
    slow = replace(ROUND, straggler_share=0.5)
    assert utilization(method(CostTraffic("all_reduce", 1)), slow).others == pytest.approx(10 / 42)
    assert utilization(method(CostTraffic("pairs", 1)), slow).others == pytest.approx(10 / 30)
    # A swap of 0.4 bits takes 4 s, the straggler's 8: it does 6 steps, and both cycles take 14 s.
    assert utilization(method(CostTraffic("pairs", 0.4), straggler="trains less"), slow).others == pytest.approx(
        10 / 14
    )


def test_diloco_at_one_and_a_half_billion_parameters_as_published() -> None:
    """Check the comparison in Factored Gossip DiLoCo: 53 % at 200 Mbit/s, 36 % at 100, data parallel about 1 %."""
    step = inner_step_seconds(1.5e9, 65_536)
    assert step == pytest.approx(4.726, abs=0.001)  # one A100 at 40 %
    at_200 = CostSetting(1.5e9, step, inner_steps=100, up_bit_per_s=200e6, down_bit_per_s=200e6, peers=8)
    at_100 = replace(at_200, up_bit_per_s=100e6, down_bit_per_s=100e6)
    assert duration_s(METHODS["diloco"].traffic[0], at_200) == pytest.approx(2 * 7 / 8 * 1.5e9 * 32 / 200e6)  # 420 s
    assert round(100 * utilization(METHODS["diloco"], at_200).others) == 53
    assert round(100 * utilization(METHODS["diloco"], at_100).others) == 36
    assert round(100 * utilization(METHODS["ddp"], at_100).others) == 1
    assert round(100 * utilization(METHODS["factored_gossip_global_none"], at_200).others) == 100


def test_both_published_percentages_imply_the_same_inner_step() -> None:
    """Check that the ranges of seconds that two percentages, printed without decimals, allow do overlap."""

    def seconds(bit_per_s: float, share: float) -> float:
        setting = CostSetting(1.5e9, 1.0, inner_steps=100, up_bit_per_s=bit_per_s, down_bit_per_s=bit_per_s, peers=8)
        return implied_inner_step_seconds(METHODS["diloco"], setting, share)

    low = max(seconds(200e6, 0.525), seconds(100e6, 0.355))
    high = min(seconds(200e6, 0.535), seconds(100e6, 0.365))
    assert low < inner_step_seconds(1.5e9, 65_536) < high
    assert seconds(200e6, 0.53) == pytest.approx(420 * 0.53 / 0.47 / 100)


def test_the_implied_inner_step_inverts_the_model() -> None:
    for name in ("ddp", "diloco", "noloco", "sparseloco"):
        share = utilization(METHODS[name], ROUND).others
        assert implied_inner_step_seconds(METHODS[name], ROUND, share) == pytest.approx(ROUND.inner_step_s)
    with pytest.raises(ValueError, match="cannot be solved"):
        implied_inner_step_seconds(METHODS["eager_diloco"], ROUND, 0.5)


def test_every_exchanging_recipe_has_a_method() -> None:
    """Check the first word of each recipe's name: a recipe's variants have the same traffic."""
    families = {name.split(" ")[0].split("-")[0] for name in METHODS}
    assert {"ddp", "dpsgd", "ad_psgd", "diloco", "streaming_diloco", "eager_diloco", "noloco", "gasloc"} <= families
    assert {"factored_gossip", "dilocox", "sparseloco", "swarm"} <= families
    assert {name for name, recipe in RECIPES.items() if recipe.exchanges and "_" not in name} <= families


def test_numbers_of_the_table() -> None:
    assert pytest.approx(0.21875) == SPARSELOCO_BITS
    assert [traffic.bits for traffic in at_bits(METHODS["factored_gossip"], 8).traffic] == [8, 8]
    assert all(name == each.name for name, each in METHODS.items())


@given(
    st.sampled_from(sorted(METHODS)),
    st.floats(1e6, 1e12),
    st.floats(1e-3, 1e3),
    st.integers(1, 500),
    st.floats(1e6, 1e10),
    st.integers(2, 10_000),
    st.floats(0.01, 1),
    st.floats(0, 0.2),
)
def test_utilization_is_a_share_and_more_bandwidth_never_hurts(
    name: str,
    parameters: float,
    step: float,
    inner_steps: int,
    bandwidth: float,
    peers: int,
    straggler: float,
    latency: float,
) -> None:
    setting = CostSetting(parameters, step, inner_steps, bandwidth, bandwidth, peers, latency, straggler)
    found = utilization(METHODS[name], setting)
    assert 0 < found.others <= 1
    assert 0 < found.delivered <= 1
    faster = replace(setting, up_bit_per_s=2 * bandwidth, down_bit_per_s=2 * bandwidth)
    if METHODS[name].straggler != "trains less":  # there, rounding H may shift half a step between the two
        assert utilization(METHODS[name], faster).others >= found.others * (1 - 1e-12)


# Recipe, its fields beside one random pair, and codec.
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "swarm": ("swarm", {"exchanges_per_step": 1}, "fp32"),
    "swarm int8": ("swarm", {"exchanges_per_step": 1}, "int8"),
    "swarm modular4": ("swarm", {"exchanges_per_step": 1}, "modular4"),
    "gasloc-1": ("gasloc_y", {"exchanges_per_step": 0}, "fp32"),
    "noloco": ("noloco", {"exchanges_per_step": 0}, "fp32"),
    "diloco": ("diloco", {"exchanges_per_step": 0}, "fp32"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_simulated_run_sends_the_bits_of_the_formula(name: str) -> None:
    """Check measured against computed traffic.

    Swarm sends a little less: at both ends of a run a peer finds no partner.
    """
    recipe, exchanges, codec = RUNS[name]
    outer = {"recipe": recipe, "inner_steps": 10, "learning_rate": 0.7, "momentum": 0.5, "nesterov": True}
    pairs = {"topology": "random", "partners": 1, "weights": "equal", "fragments": 1, "fragments_per_exchange": 1}
    line = {"step_s": 1.0, "step_jitter": 0.1, "up_mbit_s": 10.5, "down_mbit_s": 10.5, "latency_s": 0.025}
    scenario = {
        "run": {"seed": 1, "tokens": 300, "points": 1},
        "learner": {"kind": "quadratic", "parameters": 16_384},
        "outer": {**outer, **pairs, **exchanges},
        "codec": {"name": codec, "block_size": 1_024, "gradients": "fp32", "rank": 16},
        "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 0.0},
        "peers": [{"name": "home", "count": 8, **line}],
    }
    sent = simulate(Scenario.model_validate(scenario)).overall.payload_bits_per_parameter
    assert sent == pytest.approx(sent_bits(name), rel=0.05)


def test_one_swaps_bytes_fit_a_home_line_and_two_do_not() -> None:
    home = CostSetting(135e6, 1.0, 30, 20e6, 100e6, latency_s=0.05)
    assert utilization(METHODS["swarm modular4, one swap"], home).delivered == 1
    assert utilization(METHODS["swarm modular4"], home).delivered == pytest.approx(0.55, abs=0.01)
    assert sent_bits("swarm modular4, one swap") == pytest.approx(MODULAR4_BITS)


def sent_bits(name: str) -> float:
    """Return the payload that each of 8 peers sends in an outer step, in bits per parameter."""
    return sum(traffic.sent_bits(peers=8) for traffic in METHODS[name].traffic)
