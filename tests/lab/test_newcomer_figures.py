"""Figures of newcomers: weight downloads, place in the schedule, and early loss."""

from __future__ import annotations

from typing import Any

import pytest
from sample_artifacts import SUMMARY, WELL, artifacts, figures, record

from lab.figures import early_loss_ratio, learning_rate_ratio, pull_figures
from lab.script import ActKind


def trains(time: float, rate: float) -> dict[str, Any]:
    return {"kind": "progress", "time": time, "step": 1, "learning_rate": rate}


def test_a_weight_download_counts_lost_donors_and_repeated_pieces() -> None:
    note = {"kind": "took weights", "donors": 3, "pieces": 12, "broke_off": 1, "asked_again": 1}
    assert pull_figures(artifacts("anna", note)) == {"donors": 3, "pieces": 12, "donors_lost": 1, "pieces_again": 1}
    assert set(pull_figures(artifacts("anna")).values()) == {None}


def test_a_newcomer_with_a_restarted_schedule_is_noticed() -> None:
    swarm = [artifacts(name, trains(10, 1.0), trains(20, 0.5), trains(30, 0.1)) for name in ("anna", "bert")]
    in_step = artifacts("late", trains(19, 0.5), trains(29, 0.1), trains(31, 0.1))
    assert learning_rate_ratio([*swarm, in_step], {"late"}) == 1.0
    anew = artifacts("late", trains(21, 1.0), trains(29, 0.9), trains(60, 0.1))
    assert learning_rate_ratio([*swarm, anew], {"late"}) == 9.0


def test_without_learning_rates_there_is_no_ratio() -> None:
    told = artifacts("anna", trains(10, 1.0))
    assert learning_rate_ratio([], {"late"}) is None
    assert learning_rate_ratio([told], {"late"}) is None
    assert learning_rate_ratio([told, artifacts("late", {"kind": "progress", "time": 9.0})], {"late"}) is None
    assert (
        learning_rate_ratio([told, artifacts("late", trains(20, 1.0))], {"late"}) is None
    )  # it joined when the others had ended


def told(time: float, step: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "progress", "time": time, "step": step, "tokens": 0} | ({} if loss is None else {"loss": loss})


TAKEN = {"kind": "caught up", "time": 20.0}
ANNA = artifacts(
    "anna", told(5.0, 1, 9.0), told(20.0, 10, 2.1), told(28.0, 12, 2.0), told(40.0, 15, 1.0), summary=SUMMARY
)
BERT = artifacts("bert", told(27.0, 12, 3.0), told(35.0, 14, 1.0), summary=SUMMARY)


@pytest.mark.parametrize(
    ("notes", "ratio"),
    [
        ([TAKEN, told(21.0, 10, None), told(26.0, 11, 7.0), told(30.0, 12, 5.0), told(34.0, 13, 2.0)], 2.0),
        ([TAKEN, told(21.0, 10, None), told(26.0, 11, 7.0)], None),  # it did not reach that step
        ([told(21.0, 10, None), told(30.0, 12, 5.0)], None),  # it took no weights
        ([{**TAKEN, "time": 4.0}, told(21.0, 10, None), told(30.0, 12, 5.0)], None),  # nor after its restart
        ([told(2.0, 1, 9.0), told(3.0, 3, 9.0), TAKEN, told(21.0, 10, 9.0), told(30.0, 12, 5.0)], 2.0),
        ([TAKEN], None),
    ],
)
def test_the_second_phase_after_it_took_weights_is_compared(notes: list[dict[str, Any]], ratio: float | None) -> None:
    assert early_loss_ratio(artifacts("cleo", *notes), 15.0, [ANNA, BERT, artifacts("dora")]) == ratio


def test_without_others_there_is_nothing_to_compare_with() -> None:
    cleo = artifacts("cleo", TAKEN, told(21.0, 10, None), told(30.0, 12, 5.0))
    assert early_loss_ratio(cleo, 15.0, []) is None


def test_the_largest_of_several_newcomers_counts() -> None:
    done = [{"at_s": 1, "time": 15.0, "do": ActKind.START.value, "who": name} for name in ("cleo", "dora")]
    cleo = artifacts("cleo", TAKEN, told(21.0, 10, None), told(30.0, 12, 5.0), summary=SUMMARY)
    dora = artifacts("dora", TAKEN, told(21.0, 10, None), told(30.0, 12, 2.5), summary=SUMMARY)
    lives = {name: [WELL] for name in ("anna", "bert", "cleo", "dora")}
    assert figures(record(lives, done), ANNA, BERT, cleo, dora)["newcomers_loss_soon"] == 2.0
    assert figures(record({"anna": [WELL]}), ANNA)["newcomers_loss_soon"] is None
