"""Warnings on values that a manifest may have, and that its author can hardly have meant."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.manifest import PRESETS, advice, preset, with_changes
from p2ptrain.manifest.fitting import MIN_OUTER_STEPS, fitted

AUTHOR = "ab" * 32
DEMO_STEP = 128 * 2 * 20
LOCAL = {"outer.recipe": "local", "outer.exchanges_per_step": 0, "outer.weights": "equal"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_raise_no_warning(name: str) -> None:
    assert advice(preset(name, AUTHOR)) == []


@pytest.mark.parametrize("tokens", [1_000, 100_000, 10_000_000, 1_000_000_000])
def test_a_run_that_was_fitted_to_a_text_raises_no_warning(tokens: int) -> None:
    fit = fitted(tokens, {})
    assert advice(with_changes(preset(fit.preset, AUTHOR), fit.changes)) == []


@pytest.mark.parametrize(
    ("changes", "beginning", "end"),
    [
        (
            {"training.warmup_tokens": 2_400_000},
            "training.warmup_tokens: 2,400,000 of run.tokens, 2,400,000",
            "1,200,000",
        ),
        (
            {"training.warmup_tokens": 2_390_000},
            "training.warmup_tokens: 2,390,000 of run.tokens, 2,400,000",
            "1,200,000",
        ),
        (
            {"training.warmup_tokens": 1_200_001, "training.schedule": "wsd"},
            "training.warmup_tokens: 1,200,001 of run.tokens, 2,400,000",
            "at most 1,200,000",
        ),
        (
            {"run.tokens": DEMO_STEP, "training.warmup_tokens": 0},
            "run.tokens: 5,120 make 1 outer step of",
            "at least 102,400, which are 20, or lower outer.inner_steps, now 20",
        ),
    ],
)
def test_a_value_without_sense_is_named_with_its_bound(changes: dict[str, Any], beginning: str, end: str) -> None:
    (warning,) = advice(with_changes(preset("demo", AUTHOR), changes))
    assert warning.startswith(beginning)
    assert warning.endswith(end)


@pytest.mark.parametrize(
    "changes",
    [
        {"training.warmup_tokens": 1_200_000},
        {"training.warmup_tokens": 0},
        {"run.tokens": MIN_OUTER_STEPS * DEMO_STEP},
        {"run.tokens": DEMO_STEP, **LOCAL},
    ],
)
def test_a_value_within_its_bound_raises_no_warning(changes: dict[str, Any]) -> None:
    fewer_warmup = {} if "training.warmup_tokens" in changes else {"training.warmup_tokens": 0}
    assert advice(with_changes(preset("demo", AUTHOR), changes | fewer_warmup)) == []


def test_a_recipe_that_mixes_after_every_step_has_no_inner_steps_to_lower() -> None:
    few = {"outer.recipe": "ad_psgd", "outer.inner_steps": 1, "run.tokens": 2_560, "training.warmup_tokens": 0}
    (warning,) = advice(with_changes(preset("demo", AUTHOR), few))
    assert warning.endswith("set it to at least 5,120, which are 20")
