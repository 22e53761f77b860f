"""Means, errors, and who is better; the rule and the goals, which may come out against us."""

from __future__ import annotations

from typing import Any

import pytest

from bench.evidence import published
from bench.evidence.conclusion import conclusion
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.experiments.r9_uneven import SETTINGS as UNEVEN
from bench.evidence.goals import goals
from bench.evidence.rule import AT_10, AT_30, AT_HOME, AT_ITS_BEST, CANDIDATES, decide
from bench.evidence.summary import Figure, better, document, figure_of, paired, summaries

R1 = EXPERIMENTS["R1"]


def entry(contender: str, seed: int, **headline: float) -> dict[str, Any]:
    return {"contender": contender, "setting": {}, "seed": seed, "headline": headline}


# --- figures --------------------------------------------------------------------------------------


def test_mean_and_standard_error_by_hand() -> None:
    found = figure_of({1: 1.0, 2: 2.0, 3: 3.0})
    assert (found.mean, found.seeds) == (2.0, (1, 2, 3))
    assert found.standard_error == pytest.approx(1 / 3**0.5)
    assert figure_of({4: 1.0}) == Figure(1.0, None, (4,))
    assert figure_of({None: 1.0}) == Figure(1.0, 0.0, ())


def test_better_is_by_more_than_two_standard_errors_of_the_difference() -> None:
    assert better(Figure(1.0, 0.03), Figure(1.11, 0.04), "low")  # .11 > 2 x .05
    assert not better(Figure(1.0, 0.03), Figure(1.09, 0.04), "low")
    assert not better(Figure(1.11, 0.03), Figure(1.0, 0.04), "low")
    assert better(Figure(1.11, 0.03), Figure(1.0, 0.04), "high")
    assert not better(Figure(1.0, None), Figure(9.0, 0.0), "low"), "one run proves nothing"
    assert better(Figure(1.0, 0.0), Figure(1.1, 0.0), "low")
    assert not better(Figure(1.0, 0.0), Figure(1.0, 0.0), "low")


def test_pairs_share_the_luck_of_their_seeds() -> None:
    lucky, other = figure_of({1: 1.0, 2: 2.0, 3: 4.0}), figure_of({1: 2.0, 2: 4.0, 4: 1.0})
    assert paired(lucky, other) == Figure(0.5, 0.0, (1, 2))
    assert paired(lucky, figure_of({3: 1.0, 4: 1.0})) is None, "one seed in common is no pair of seeds"
    assert paired(lucky, figure_of({None: 1.0})) is None


def test_where_a_run_diverged_there_is_no_loss() -> None:
    entries = [
        entry("swarm", 1, loss=1.5),
        entry("swarm", 2, diverged=1.0),
        entry("swarm", 4, loss=911.0, averaged_loss=5.0, disagreement=0.5, simulated_s=7.0),
        {**entry("swarm", 3), "failure": "it broke"},
        {**entry("noloco", 1), "failure": "it broke"},
    ]
    swarm, noloco = summaries(R1, entries)
    assert (swarm.contender, swarm.failed, swarm.runs) == ("swarm", 3, 4)
    assert set(swarm.figures) == {"simulated_s"}, "a mean of the survivors would speak for the others"
    plain = {**entry("swarm", 1, loss=911.0, disagreement=0.5), "setting": {"learner": "quadratic"}}
    assert set(summaries(R1, [plain])[0].figures) == {"loss", "disagreement"}, "its loss is no text's"
    assert (noloco.contender, noloco.failed, noloco.figures) == ("noloco", 1, {})


def test_the_summary_document_holds_the_named_figures() -> None:
    found = {"R1": summaries(R1, [entry("swarm", seed, loss=1.0 + seed, wall=9.0) for seed in (1, 2)])}
    tuning = {"contenders": {"swarm": {"chosen": {"recipe": "swarm"}, "grid": []}}}
    made = document(found, EXPERIMENTS, tuning)
    assert made["tuning"] == {"swarm": {"recipe": "swarm"}}
    assert made["R1"] == [
        {
            "contender": "swarm",
            "setting": {},
            "figures": {"loss": {"mean": 2.5, "standard_error": 0.5, "seeds": [1, 2], "values": [2.0, 3.0]}},
        }
    ]
    assert made["R5"] == []


def test_the_straggler_table_compares_times_to_a_loss_that_all_reached() -> None:
    derive = EXPERIMENTS["R3"].derive
    made = derive(
        [
            entry("diloco", 1, **{"seconds_to:2.0": 50.0, "seconds_to:1.8": 90.0}),
            entry("swarm", 1, **{"seconds_to:2.0": 20.0, "seconds_to:1.8": 40.0, "seconds_to:1.7": 60.0}),
        ]
    )
    assert [(each["headline"]["target"], each["headline"]["seconds_to_target"]) for each in made] == [
        (1.8, 90.0),
        (1.8, 40.0),
    ]


def test_the_fast_peer_is_compared_with_itself_alone() -> None:
    derive = EXPERIMENTS["R9"].derive
    made = derive(
        [
            entry(
                "local", 1, **{"fast_seconds_to:2.0": 10.0, "fast_seconds_to:1.9": 20.0, "fast_seconds_to:1.8": 40.0}
            ),
            entry("swarm", 1, **{"fast_seconds_to:2.0": 12.0, "fast_seconds_to:1.9": 18.0}),
            entry("swarm", 2, **{"fast_seconds_to:2.0": 1.0}),
        ]
    )
    assert made[1]["headline"]["fast_delay"] == pytest.approx(1.2)
    assert made[1]["headline"]["fast_never"] == 1
    assert "fast_delay" not in made[2]["headline"], "nobody trained alone with this seed"


# --- the rule -------------------------------------------------------------------------------------


def row(contender: str, setting: Any, **figures: tuple[float, float]) -> dict[str, Any]:
    shown = {
        name: {"mean": mean, "standard_error": error, "seeds": [1, 2, 3]} for name, (mean, error) in figures.items()
    }
    return {"contender": contender, "setting": dict(setting), "figures": shown}


def summary(losses: dict[str, tuple[float, float]], bits: dict[str, float], r5: list[dict[str, Any]]) -> dict[str, Any]:
    """Equal losses at H of 10 and 30."""
    recipes = {"swarm": "swarm", "noloco": "noloco", "gasloc": "gasloc_y", "factored_gossip": "factored_gossip"}
    tuning = {name: {"recipe": recipe, "learning_rate": 0.7, "momentum": 0.9} for name, recipe in recipes.items()}
    rows = [
        row(name, setting, loss=loss, bits_per_parameter=(bits.get(name, 32.0), 0.0))
        for name, loss in losses.items()
        for setting in (AT_10, AT_30)
    ]
    busy = [row(each, AT_HOME, utilization=(1.0, 0.0)) for each in sorted({*sum(AT_ITS_BEST.values(), ())})]
    return {"version": 1, "tuning": tuning, "R1": rows, "R4": busy, "R5": r5}


CODECS = [
    row("x fp32", {}, loss=(1.50, 0.002), disagreement=(0.004, 0.0), bits_per_parameter=(64.0, 0.0)),
    row("x int8", {}, loss=(1.501, 0.002), disagreement=(0.012, 0.0), bits_per_parameter=(16.0, 0.0)),
    row("x modular4", {}, loss=(1.502, 0.002), disagreement=(0.03, 0.0), bits_per_parameter=(8.0, 0.0)),
    row("x int4", {}, loss=(1.56, 0.002), disagreement=(0.015, 0.0), bits_per_parameter=(8.5, 0.0)),
    row("x modular4 /4", {}, loss=(1.50, 0.002), disagreement=(0.01, 0.0), bits_per_parameter=(2.0, 0.0)),
    row("g topk", {}, loss=(1.40, 0.002), disagreement=(0.01, 0.0), bits_per_parameter=(0.3, 0.0)),
]


def test_the_lowest_loss_wins_also_against_us() -> None:
    found = decide(summary({"swarm": (1.60, 0.002), "noloco": (1.55, 0.002), "diloco": (1.5, 0.001)}, {}, CODECS))
    assert found is not None
    assert (found.contender, found.recipe, found.learning_rate, found.momentum) == ("noloco", "noloco", 0.7, 0.9)
    assert "diloco" not in found.because[1], "it needs everybody at once"


def test_equal_losses_are_decided_by_bits_and_by_nothing_of_ours() -> None:
    close = {"swarm": (1.500, 0.003), "gasloc": (1.499, 0.003)}
    found = decide(summary(close, {"swarm": 32.0, "gasloc": 64.0}, CODECS))
    assert found is not None
    assert found.contender == "swarm"
    found = decide(summary(close, {"swarm": 64.0, "gasloc": 32.0}, CODECS))
    assert found is not None
    assert (found.contender, found.recipe) == ("gasloc", "gasloc_y")
    found = decide(summary(close, {"swarm": 32.0, "gasloc": 32.3}, CODECS))
    assert found is not None
    assert found.contender == "gasloc", "within 2 % of the bits the alphabet decides"


def test_the_codec_is_the_cheapest_that_costs_nothing() -> None:
    found = decide(summary({"swarm": (1.5, 0.002)}, {}, CODECS))
    assert found is not None
    assert found.codec == "x int8"  # modular4 is too far apart, int4 too bad, the rest another stream or in pieces
    found = decide(summary({"swarm": (1.5, 0.002)}, {}, CODECS[1:]))
    assert found is not None
    assert found.codec is None


def test_a_form_with_a_global_average_is_no_candidate() -> None:
    made = summary({"swarm": (1.6, 0.002), "factored_gossip": (1.5, 0.002)}, {}, CODECS)
    found = decide(made)
    assert found is not None
    assert found.contender == "factored_gossip"
    made["tuning"]["factored_gossip"]["recipe"] = "factored_gossip_global_local"
    found = decide(made)
    assert found is not None
    assert found.contender == "swarm"


def test_who_would_wait_for_a_home_line_is_refused_and_named() -> None:
    made = summary({"swarm": (1.6, 0.002), "gasloc": (1.4, 0.002), "noloco": (1.5, 0.002)}, {}, CODECS)
    made["R4"] = document({"R4": summaries(EXPERIMENTS["R4"], published.entries())}, EXPERIMENTS, None)["R4"]
    found = decide(made)
    assert found is not None
    assert found.contender == "swarm", "from the cost model as it is"
    refused = found.because[0]
    assert all(f"{name} (computes " in refused for name in ("gasloc", "noloco"))
    assert "factored_gossip" not in refused, "it waits for next to nothing with Mix2 in topk"
    made["R4"] = []
    assert decide(made) is None


def test_candidates_are_in_the_alphabets_order_and_r4_has_a_row_for_each() -> None:
    assert list(CANDIDATES) == sorted(CANDIDATES)
    rows = {each["contender"] for each in published.entries()}
    assert {each for name in CANDIDATES for each in AT_ITS_BEST[name]} <= rows


def test_nothing_is_decided_from_half_the_figures() -> None:
    assert decide({"version": 1, "tuning": {}}) is None
    made = summary({"swarm": (1.5, 0.002)}, {}, CODECS)
    made["R1"] = [each for each in made["R1"] if each["setting"] == dict(AT_10)]
    assert decide(made) is None


# --- goals ----------------------------------------------------------------------------------------


def verdicts(made: dict[str, Any]) -> dict[str, bool | None]:
    """By what is asked; a goal that is asked twice, against two references, by its first."""
    found: dict[str, bool | None] = {}
    for each in goals(made, decide(made)):
        found.setdefault(each.what, each.reached)
    return found


def test_goals_are_missed_when_they_are_missed() -> None:
    losses = {"swarm": (1.525, 0.001), "diloco": (1.5, 0.001), "noloco": (1.53, 0.001), "gasloc": (1.526, 0.001)}
    found = verdicts(summary(losses, {}, CODECS))
    default = next(name for name in ("swarm", "gasloc") if any(what.startswith(f"{name}: ") for what in found))
    assert default == "gasloc", "equal losses and bits: the alphabet"
    assert found["gasloc: loss over that of tuned DiLoCo, N = 8, H = 10"] is False
    assert found["gasloc: loss over that of tuned DiLoCo, N = 8, H = 30"] is False
    assert found["gasloc against noloco: loss at N = 8, H = 10"] is True


def test_few_bits_count_only_where_peers_agree() -> None:
    found = verdicts(summary({"swarm": (1.5, 0.001)}, {}, CODECS))
    assert found["at most 8 bits per parameter and outer step, everything counted"] is True
    assert found["at most 1 bit per parameter and outer step, everything counted"] is True
    apart = [each for each in CODECS if each["contender"] != "g topk"]
    silent = row("g topk", {}, loss=(1.5, 0.002), disagreement=(0.5, 0.0), bits_per_parameter=(0.3, 0.0))
    found = verdicts(summary({"swarm": (1.5, 0.001)}, {}, [*apart, silent]))
    assert found["at most 1 bit per parameter and outer step, everything counted"] is False, (
        "sending nothing must not win"
    )


def test_goals_without_figures_are_left_out() -> None:
    assert goals({"version": 1, "tuning": {}}, None) == []


def test_goals_are_reached_within_their_errors() -> None:
    losses = {"swarm": (1.502, 0.002), "diloco": (1.5, 0.001), "noloco": (1.53, 0.001), "gasloc": (1.509, 0.002)}
    found = verdicts(summary(losses, {"swarm": 16.0}, CODECS))
    assert found["swarm: loss over that of tuned DiLoCo, N = 8, H = 10"] is True
    assert found["swarm against noloco: loss at N = 8, H = 30"] is True
    assert found["swarm against gasloc: loss at N = 8, H = 30"] is True


def test_few_bits_are_judged_against_fp32_and_against_diloco() -> None:
    made = summary({"swarm": (1.5, 0.001), "diloco": (1.35, 0.001)}, {}, CODECS)
    found = [each.reached for each in goals(made, decide(made)) if each.what.startswith("at most 8 bits")]
    assert found == [True, False], "as good as fp32, which is worse than DiLoCo"


def test_the_fast_peers_delay_has_two_standard_errors_of_slack() -> None:
    def reached(mean: float, error: float) -> bool | None:
        setting = UNEVEN[1].key()
        rows = [row("swarm-2", setting, fast_delay=(mean, error), fast_never=(0.0, 0.0))]
        return goals({"version": 1, "tuning": {}, "R9": rows}, None)[0].reached

    assert reached(1.05, 0.03)
    assert not reached(1.05, 0.02)


# --- in short -------------------------------------------------------------------------------------


def in_short(made: dict[str, Any]) -> str:
    decision = decide(made)
    return " ".join(conclusion(made, decision, goals(made, decision)))


def test_the_conclusion_says_who_is_better_whoever_it_is() -> None:
    rivals = {"diloco": (1.6, 0.002), "noloco": (1.7, 0.002)}
    found = in_short(summary({"swarm": (1.50, 0.002), **rivals}, {}, CODECS))
    assert "0.938 (clearly better) at H = 10" in found
    assert "noloco's 0.882 (clearly better)" in found
    rivals = {"diloco": (1.5, 0.002), "noloco": (1.599, 0.2)}
    found = in_short(summary({"swarm": (1.60, 0.002), **rivals}, {"swarm": 16.0}, CODECS))
    assert "1.067 (clearly worse) at H = 10" in found
    assert "noloco's 1.001 (no clear difference)" in found


def test_the_conclusion_counts_goals_that_were_missed() -> None:
    made = summary({"swarm": (1.60, 0.002), "diloco": (1.5, 0.001)}, {}, CODECS)
    reached = goals(made, decide(made))
    missed = sum(each.reached is False for each in reached)
    assert missed > 0
    assert f"Of {len(reached)} rows of goals below {missed} were missed." in in_short(made)


def test_nothing_is_concluded_where_nothing_is_decided() -> None:
    assert conclusion({"version": 1, "tuning": {}}, None, []) == []
