"""Recipes that average over all peers: what they compute, what they cost, and what a scenario may specify."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from p2ptrain.codec import CodecTerms, LowRankCodec, TopKCodec
from sim.lockstep.ensemble import EnsembleSimulation, Lossy
from sim.scenario import MEGABIT, Scenario
from sim.simulate import simulate

OUTER = {
    "recipe": "diloco",
    "inner_steps": 10,
    "learning_rate": 0.7,
    "momentum": 0.5,
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "exchanges_per_step": 0,
    "fragments": 1,
    "fragments_per_exchange": 1,
}
LINE = {"count": 4, "step_s": 0.5, "up_mbit_s": 8.0, "down_mbit_s": 80.0, "latency_s": 0.0}
PARAMETERS = 4096


def scenario(learner: str = "quadratic", peers: list[dict[str, Any]] | None = None, **changes: Any) -> Scenario:
    sizes: dict[str, Any] = (
        {"parameters": PARAMETERS} if learner == "quadratic" else {"layers": 1, "curve_sequences": 4}
    )
    codec = {"name": "fp32", "block_size": 1024, "gradients": "fp32", "rank": 4}
    return Scenario.model_validate(
        {
            "run": {"outer_steps": 12, "points": 3, "failed_exchanges": changes.pop("failed_exchanges", 0.0)},
            "learner": {"kind": learner, **sizes},
            "outer": OUTER | {name: changes.pop(name) for name in list(changes) if name in OUTER},
            "codec": codec | changes,
            "peers": peers or [LINE],
        }
    )


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        scenario(**changes)
    return str(caught.value)


def test_everybody_ends_at_one_point_and_has_learnt() -> None:
    report = simulate(scenario())
    first, last = report.curve[0], report.curve[-1]
    assert last.disagreement == 0
    assert last.outer_steps == 12
    assert last.validation == last.validation_of_mean
    assert last.validation < 0.5 * first.validation


def test_the_same_scenario_gives_the_same_report() -> None:
    assert simulate(scenario()).model_dump(exclude={"cost"}) == simulate(scenario()).model_dump(exclude={"cost"})


def test_an_outer_step_takes_the_slowest_phase_and_a_ring_all_reduce_over_the_narrowest_line() -> None:
    peers = [LINE | {"count": 3}, LINE | {"count": 1, "name": "odd", "step_s": 1.0, "up_mbit_s": 0.8}]
    report = simulate(scenario(peers=peers))
    sent = 2 * 3 / 4 * 4 * PARAMETERS
    assert report.simulated_s == pytest.approx(12 * (10 * 1.0 + sent / (0.8 * MEGABIT)))
    assert report.overall.up.payload == pytest.approx(12 * sent)
    assert report.overall.bits_per_parameter == pytest.approx(1.5 * 32)
    assert report.groups["odd"].utilization == pytest.approx(10.0 / (10.0 + sent / (0.8 * MEGABIT)))
    assert report.groups["peers-1"].utilization == pytest.approx(5.0 / (10.0 + sent / (0.8 * MEGABIT)))


def test_what_is_used_late_hides_behind_the_next_phase() -> None:
    assert simulate(scenario(recipe="dilocox_global")).simulated_s == pytest.approx(12 * 10 * 0.5)
    narrow = [LINE | {"up_mbit_s": 0.01}]
    sent = 2 * 3 / 4 * 4 * PARAMETERS
    assert simulate(scenario(recipe="eager_diloco", peers=narrow)).simulated_s == pytest.approx(
        12 * sent / (0.01 * MEGABIT)
    )


SPARSE: dict[str, Any] = {"recipe": "sparseloco", "gradients": "topk", "momentum": 0.9, "learning_rate": 1.0}
SPARSE_MESSAGE = TopKCodec().encoded_size(CodecTerms(PARAMETERS))


def test_gathered_messages_go_up_once_and_down_to_all_others() -> None:
    peers = [LINE | {"count": 3}, LINE | {"count": 1, "name": "odd", "up_mbit_s": 0.08, "latency_s": 0.05}]
    report = simulate(scenario(peers=peers, **SPARSE))
    assert report.overall.up.payload == pytest.approx(12 * SPARSE_MESSAGE)
    assert report.overall.down.payload == pytest.approx(12 * 3 * SPARSE_MESSAGE)
    assert report.overall.bits_per_parameter == pytest.approx(0.227, rel=0.02)
    passage_s = SPARSE_MESSAGE / (0.08 * MEGABIT) + 3 * SPARSE_MESSAGE / (80 * MEGABIT) + 2 * 0.1
    assert report.simulated_s == pytest.approx(12 * (5.0 + passage_s))


REPEATED, GIVEN_UP = "averages that failed and were made again", "averages taken as made after 100 attempts"


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco", "factored_gossip_global_none", "streaming_diloco"])
def test_an_average_that_fails_is_made_again_and_nobody_differs(recipe: str) -> None:
    changes: dict[str, Any] = SPARSE if recipe == "sparseloco" else {"recipe": recipe}
    calm, rough = simulate(scenario(**changes)), simulate(scenario(failed_exchanges=0.3, **changes))
    assert calm.notes == {}
    assert rough.notes[REPEATED] > 0
    assert rough == simulate(scenario(failed_exchanges=0.3, **changes)).model_copy(update={"cost": rough.cost})
    for one, other in zip(calm.curve, rough.curve, strict=True):
        assert other.model_copy(update={"time_s": one.time_s}) == one
    assert rough.overall.up.payload > calm.overall.up.payload


def test_each_attempt_costs_its_time_and_its_bytes() -> None:
    report = simulate(scenario(failed_exchanges=0.3))
    attempts, sent = 12 + report.notes[REPEATED], 2 * 3 / 4 * 4 * PARAMETERS
    assert 2 * 12 < attempts < 8 * 12, "of 4 peers none fails in .7^4 = .24 of all attempts: 4.2 an average"
    assert report.overall.up.payload == report.overall.down.payload == pytest.approx(attempts * sent)
    assert report.simulated_s == pytest.approx(12 * 5.0 + attempts * sent / (8 * MEGABIT))


def test_late_averages_hide_their_further_attempts_as_far_as_they_fit() -> None:
    sent = 2 * 3 / 4 * 4 * PARAMETERS
    wide = simulate(scenario(recipe="dilocox_global", failed_exchanges=0.3))
    assert wide.simulated_s == pytest.approx(12 * 5.0)
    assert wide.overall.up.payload == pytest.approx((12 + wide.notes[REPEATED]) * sent)
    narrow = [LINE | {"up_mbit_s": 8 * sent / 1e6 / 6.0}]  # one attempt takes longer than a phase
    report = simulate(scenario(recipe="dilocox_global", peers=narrow, failed_exchanges=0.3))
    assert report.notes == wide.notes
    assert report.simulated_s == pytest.approx((12 + wide.notes[REPEATED]) * 6.0)


def test_of_a_gathering_only_what_failed_is_done_again() -> None:
    report = simulate(scenario(failed_exchanges=0.3, **SPARSE))
    rounds = 12 + report.notes[REPEATED]
    assert 12 * SPARSE_MESSAGE < report.overall.up.payload < 0.9 * rounds * SPARSE_MESSAGE
    assert report.overall.down.payload == pytest.approx(3 * report.overall.up.payload)
    passage_s = SPARSE_MESSAGE / (8 * MEGABIT) + 3 * SPARSE_MESSAGE / (80 * MEGABIT)
    assert report.simulated_s == pytest.approx(12 * 5.0 + rounds * passage_s)


def test_nobody_tries_for_ever() -> None:
    report = simulate(scenario(failed_exchanges=0.99))
    assert report.notes == {REPEATED: 12 * 99, GIVEN_UP: 12}
    assert report.overall.up.payload == pytest.approx(12 * 100 * 2 * 3 / 4 * 4 * PARAMETERS)
    assert report.curve[-1].disagreement == 0


def test_a_swap_fails_for_both_of_its_sides() -> None:
    simulation = EnsembleSimulation(
        scenario(recipe="factored_gossip_local_global", topology="ring", partners=2, failed_exchanges=0.5)
    )
    met = 0.0
    for simulation._lockstep.step in range(20):
        weights = simulation._lockstep.weights()
        assert torch.equal(weights, weights.T)
        assert torch.equal(weights, simulation._lockstep.weights())
        met += float((weights > 0).sum() - 4) / 8
    assert 0.3 * 20 < met < 0.7 * 20


@pytest.mark.parametrize("recipe", ["ddp", "diloco", "streaming_diloco", "factored_gossip_local_global"])
def test_language_models_learn(recipe: str) -> None:
    changes: dict[str, Any] = {"recipe": recipe}
    changes |= {"inner_steps": 1} if recipe == "ddp" else {}
    changes |= {"fragments": 3} if recipe == "streaming_diloco" else {}
    report = simulate(scenario("lm", [LINE | {"count": 2}], **changes))
    assert report.curve[-1].loss < report.curve[0].loss < 6
    assert report.curve[-1].validation < report.curve[0].loss
    assert report.overall.tokens == 2 * 12 * changes.get("inner_steps", 10) * 256


def test_data_parallel_training_sends_a_gradient_every_inner_step() -> None:
    report = simulate(scenario("lm", [LINE | {"count": 2}], recipe="ddp", inner_steps=1))
    assert report.overall.bits_per_parameter == pytest.approx(32.0)


def test_feedback_loses_nothing_in_the_long_run() -> None:
    send = Lossy(scenario(recipe="dilocox_global", gradients="topk"))
    values = torch.randn(3, PARAMETERS, generator=torch.Generator().manual_seed(0))
    total = sum(send("pseudo_gradient", 0, values) for _ in range(200))
    assert float((total / 200 - values).norm() / values.norm()) < 0.2
    assert send.encoded["pseudo_gradient"] == pytest.approx(200 * PARAMETERS * 0.227 / 8, rel=0.02)


def following(policy: str = "rank", learner: Mapping[str, Any] | None = None, **changes: Any) -> Scenario:
    """Return a scenario without noise, with one target; its error has ever fewer components (54 to 30)."""
    settings = {"recipe": "dilocox_global", "gradients": "lowrank", "rank": 24, "learning_rate": 0.2, "momentum": 0.0}
    data = scenario(**settings | changes).model_dump()
    data["learner"] |= {"learning_rate": 1.0, "noise": 0.0, "spread": 0.0} | dict(learner or {})
    data["run"] |= {"outer_steps": 60, "points": 6}
    data["pace"] = {"policy": policy}
    return Scenario.model_validate(data)


def phases(notes: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Return (rank, inner steps, number of outer steps with both)."""
    found = [re.fullmatch(r"outer steps of rank (\d+) and (\d+) inner steps", note) for note in notes]
    return [(int(each[1]), int(each[2]), notes[each[0]]) for each in found if each is not None]


def test_rank_and_h_follow_what_is_left_to_learn() -> None:
    fixed, adaptive = simulate(following("fixed")), simulate(following())
    assert fixed.notes == {}
    ranks, steps, counts = zip(*phases(adaptive.notes), strict=True)
    assert (max(ranks), max(steps)) == (24, 10)
    assert min(ranks) < 16
    cut_short = [rank for rank, step in zip(ranks, steps, strict=True) if step != (20 * rank + 24) // 48]
    assert len(cut_short) <= 1, "H is as the rank, but for the last phase"
    assert sum(counts) == adaptive.curve[-1].outer_steps > fixed.curve[-1].outer_steps == 60
    assert adaptive.overall.tokens == fixed.overall.tokens == 4 * 600
    assert sum(step * count for step, count in zip(steps, counts, strict=True)) == 600
    assert (adaptive.overall.bits_per_parameter or 9) < 0.9 * (fixed.overall.bits_per_parameter or 0)
    assert adaptive.overall.up.payload == pytest.approx(fixed.overall.up.payload, rel=0.05), "a token costs as much"
    assert (adaptive.curve[-1].validation or 9) < (fixed.curve[-1].validation or 0)
    assert adaptive.curve[-1].disagreement == 0
    assert len(adaptive.curve) == len(fixed.curve) == 6


def test_each_outer_step_costs_its_own_rank_and_its_own_h() -> None:
    narrow = [LINE | {"up_mbit_s": 0.0025}]  # a message of 24 components takes 7.8 s, and a phase of 10 steps 5 s
    report = simulate(following(peers=narrow))
    sent = simulated = 0.0
    for rank, steps, count in phases(report.notes):
        message = 2 * 3 / 4 * LowRankCodec(rank).encoded_size(CodecTerms(PARAMETERS))
        sent += count * message
        simulated += count * max(0.5 * steps, message / (0.0025 * MEGABIT))
    assert report.overall.up.payload == pytest.approx(sent)
    assert report.simulated_s == pytest.approx(simulated)
    assert report.overall.utilization == pytest.approx(600 * 0.5 / simulated)


def test_where_components_are_many_nothing_changes() -> None:
    """Check peers with different components: their average has more relevant ones than one message carries."""
    unlike = {"noise": 0.1, "spread": 0.1}
    fixed, adaptive = simulate(following("fixed", unlike)), simulate(following("rank", unlike))
    assert adaptive.notes == {"outer steps of rank 24 and 10 inner steps": 60}
    assert adaptive.curve == fixed.curve
    assert adaptive.overall == fixed.overall


def test_a_run_of_a_broken_number_of_phases_ends_at_the_same_tokens() -> None:
    whole = following().model_dump()
    whole["run"] |= {"outer_steps": None, "tokens": 4 * 593}
    for policy in ("fixed", "rank"):
        report = simulate(Scenario.model_validate(whole | {"pace": {"policy": policy}}))
        assert report.overall.tokens == 4 * 600


@pytest.mark.parametrize("recipe", ["diloco", "eager_diloco", "factored_gossip_none_global"])
def test_the_rank_may_follow_any_average_over_everybody(recipe: str) -> None:
    assert min(rank for rank, _, _ in phases(simulate(following(recipe=recipe)).notes)) < 24


def test_the_rank_follows_averages_that_failed_as_if_they_had_not() -> None:
    calm, rough = simulate(following()), simulate(following(failed_exchanges=0.3))
    repeated = {note: count for note, count in rough.notes.items() if note not in calm.notes}
    assert list(repeated) == [REPEATED]
    assert phases(rough.notes) == phases(calm.notes)
    assert rough.curve[-1].validation == calm.curve[-1].validation


def test_no_fragment_is_never_sent() -> None:
    with pytest.raises(ValidationError, match="sends at most one after each of its 3 inner steps"):
        scenario(recipe="streaming_diloco", inner_steps=3, fragments=4)


def test_the_policy_needs_an_average_and_a_rank() -> None:
    def said(**changes: Any) -> str:
        with pytest.raises(ValidationError) as caught:
            following(**changes)
        return str(caught.value)

    for recipe in ("swarm", "gasloc", "local"):
        exchanges = 1 if recipe == "swarm" else 0
        assert (
            f"pace.policy: rank, but recipe {recipe} has no average of all peers' whole pseudo-gradients between inner"
            " phases; set it to fixed, or use a recipe with such an average, as dilocox_global"
        ) in said(recipe=recipe, exchanges_per_step=exchanges, gradients="int8")
    assert "recipe streaming_diloco has no average of all peers' whole" in said(recipe="streaming_diloco")
    assert "recipe ddp has no average of all peers' whole" in said(recipe="ddp", inner_steps=1)
    assert (
        "codec.gradients: int4 has no rank, but pace.policy is rank; set it to lowrank, or pace.policy to fixed"
    ) in said(gradients="int4")


def test_what_lockstep_does_not_have_is_refused_in_one_line() -> None:
    assert (
        "recipe diloco averages over all peers, which must arrive at once, stay and be honest, unlike peers-1"
        in refusal(peers=[LINE | {"leaves_at_s": 5.0}])
    )
    told = refusal(peers=[LINE | {"arrives_at_s": 5.0 * place} for place in range(6)])
    assert told.count("averages over all peers") == 1
    assert "honest, unlike peers-2, peers-3, peers-4, peers-5, peers-6; for failures, use run.failed_exchanges" in told
    assert "modular4 works between two peers only" in refusal(recipe="factored_gossip_global_none", name="modular4")
    assert (
        "codec.name: modular4 has no effect, because recipe diloco averages no weights; set it to fp32 or int8, which"
        " are ignored; codec.gradients is the codec of pseudo-gradients"
    ) in refusal(name="modular4")
    assert scenario(name="int8").codec.name == "int8"
    assert "outer.fragments: 2 must be 1: recipe diloco averages everything at once" in refusal(fragments=2)
