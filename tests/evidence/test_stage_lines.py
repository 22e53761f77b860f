"""Pipelines over home lines: the arithmetic, its table in the documentation, and the hours of R8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.environment import ROOT
from bench.evidence.experiments.r8_stages import LOSS, MODEL, R8, STAGED, STEP_TOKENS, WHOLE, setting, step_s
from bench.stage_lines import LINES_MBIT_S, MODELS, StagedModel, rows

SMALL = StagedModel(width=1000, layers=8, stages=4, flop_per_s=72e12, number_bytes=1.0)


def test_by_hand() -> None:
    assert SMALL.parameters == 96_000_000
    assert SMALL.whole_tokens_per_s() == 125_000
    assert SMALL.upload_bytes == 2000
    assert SMALL.computed_tokens_per_s(micro_batches=1) == 125_000, "one micro-batch passes stage after stage"
    assert SMALL.computed_tokens_per_s(micro_batches=17) == 4 * 125_000 * 17 / 20
    assert SMALL.tokens_per_s(16e6) == 1000
    assert SMALL.tokens_per_s(1e15) == SMALL.computed_tokens_per_s()
    assert SMALL.paying_bit_per_s() == 8e9


def test_the_rate_that_pays_is_the_formula() -> None:
    for model in MODELS:
        layers = model.layers / model.stages
        formula = 16 / 72 * model.number_bytes * model.flop_per_s / (layers * model.width)
        assert model.paying_bit_per_s() == pytest.approx(formula)
        at_it = replace(model, flop_per_s=model.flop_per_s).tokens_per_s(model.paying_bit_per_s(), 10**9)
        assert at_it == pytest.approx(model.computed_tokens_per_s(10**9))


def test_two_stages_upload_in_one_direction_each() -> None:
    assert replace(SMALL, stages=2).upload_bytes == 1000


def test_a_published_pipeline_is_slower_than_the_bound_but_not_by_much() -> None:
    """Check Pluralis' record 20260917_vanilla_baseline: 8 stages, d 1024, bf16, 200 Mbit/s, 5,218 tokens a second."""
    record = StagedModel(width=1024, layers=16, stages=8, flop_per_s=1e18, number_bytes=2.0)
    assert 0.8 < 5218 / record.tokens_per_s(200e6) < 1


@pytest.mark.parametrize("change", [{"width": 0}, {"layers": 7}, {"stages": 0}, {"flop_per_s": float("nan")}])
def test_impossible_numbers_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        replace(SMALL, **change)


def test_the_documentation_has_the_table() -> None:
    lines = (ROOT / "docs" / "ALGORITHMS.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line in rows()] == rows()


def test_r8_takes_the_time_of_the_large_model() -> None:
    assert step_s(WHOLE, 20) == step_s(WHOLE, 1000) == STEP_TOKENS / MODEL.whole_tokens_per_s()
    assert step_s(STAGED, 20) == pytest.approx(5 * step_s(STAGED, 100))
    entries = [
        {"contender": who.name, "setting": setting(who, line).key(), "seed": 1, "headline": {f"seconds_to:{LOSS}": 100}}
        for who, line in ((WHOLE, 20), (STAGED, 100))
    ]
    whole, staged = R8.derive(entries)
    assert whole["headline"]["hours_at:20"] == 100 * step_s(WHOLE, 20) / 3600
    assert set(whole["headline"]) == {f"seconds_to:{LOSS}", "hours_at:20"}
    assert {name for name in staged["headline"] if "hours" in name} == {"hours_at:20", "hours_at:100", "hours_at:300"}
    assert staged["headline"]["hours_at:20"] == pytest.approx(5 * staged["headline"]["hours_at:100"])
    assert len(R8.tables) == len(LINES_MBIT_S)
