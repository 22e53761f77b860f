"""Model size and token budget for a text of a given length."""

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Manifest, parameter_count, preset, with_changes
from p2ptrain.manifest.fitting import (
    ENOUGH_OUTER_STEPS,
    MAX_EPOCHS,
    MIN_OUTER_STEPS,
    TOKENS_PER_PARAMETER,
    FittedRun,
    epochs,
    fitted,
    repetition,
)

AUTHOR = "ab" * 32


def vocabulary(ids: int) -> dict[str, object]:
    shards = {"kind": "shards", "root": "1" * 64, "training_tokens": 1, "held_out_tokens": 1}
    return {"tokenizer": {"kind": "file", "sha256": "0" * 64}, "corpus": shards, "model.config.vocab_size": ids}


def made(fit: FittedRun) -> Manifest:
    return with_changes(preset(fit.preset, AUTHOR), fit.changes)


@pytest.mark.parametrize("ids", [256, 1_000, 8_000, 32_000, 49_152])
@pytest.mark.parametrize("tokens", [20_000_000, 60_000_000, 300_000_000, 1_000_000_000, 1_900_000_000])
def test_the_size_is_near_the_optimum_and_all_peers_together_read_the_text_once(ids: int, tokens: int) -> None:
    fit = fitted(tokens, vocabulary(ids))
    manifest = made(fit)
    smallest = parameter_count(made(fitted(1, vocabulary(ids))).model)
    ratio = tokens / parameter_count(manifest.model) / TOKENS_PER_PARAMETER
    assert ratio < 2.5
    assert ratio > 0.5 or parameter_count(manifest.model) == smallest
    shortest = ENOUGH_OUTER_STEPS * manifest.tokens_per_outer_step
    assert manifest.run.tokens == shortest > tokens or 0.98 < epochs(manifest, tokens) <= 1.0
    assert f"{parameter_count(manifest.model):,} parameters" in fit.reason


def test_more_text_never_means_a_smaller_model() -> None:
    sizes = [parameter_count(made(fitted(10**6 * 2**power, vocabulary(8_000))).model) for power in range(12)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 5


DEMO_STEP = 5_120


@pytest.mark.parametrize(
    ("tokens", "budget"),
    [
        (10_000, MIN_OUTER_STEPS * DEMO_STEP),
        (25_600, MIN_OUTER_STEPS * DEMO_STEP),
        (100_000, 400_000),
        (500_000, 2_000_000),
        (1_000_000, ENOUGH_OUTER_STEPS * DEMO_STEP),
        (3_000_000, 3_000_000),
    ],
)
def test_a_short_text_is_read_up_to_four_times_for_enough_outer_steps(tokens: int, budget: int) -> None:
    manifest = made(fitted(tokens, {}))
    assert (manifest.tokens_per_outer_step, manifest.run.tokens) == (DEMO_STEP, budget)


@pytest.mark.parametrize("tokens", [1, 10_000, 25_599])
def test_a_budget_that_was_fitted_is_not_advised_against(tokens: int) -> None:
    """Check a text so short that peers read it more often: the only remedy is more text."""
    warning = str(repetition(made(fitted(tokens, {})), tokens))
    assert "can use more text, 25,600 training tokens or more; with a smaller run.tokens than 102,400 peers" in warning
    assert repetition(made(fitted(25_600, {})), 25_600) is None


def test_a_smaller_budget_is_advised_down_to_the_shortest_run() -> None:
    manifest = preset("demo", AUTHOR)
    assert "lower run.tokens, now 2,400,000, to 102,400" in str(repetition(manifest, 10_000))
    assert "lower run.tokens, now 2,400,000, to 2,200,000" in str(repetition(manifest, 550_000))
    alone = with_changes(manifest, {"outer.recipe": "local", "outer.exchanges_per_step": 0})
    assert "to 40,000" in str(repetition(alone, 10_000))


def test_a_chosen_preset_stays_as_it_is() -> None:
    fit = fitted(10**6, vocabulary(1_000), "llama-15m")
    assert made(fit) == with_changes(preset("llama-15m", AUTHOR), vocabulary(1_000))
    with pytest.raises(ManifestError, match="Did you mean demo"):
        fitted(10**6, {}, "dem")


def test_repetition_is_reported_above_four_epochs() -> None:
    manifest = preset("demo", AUTHOR)
    enough = manifest.run.tokens // MAX_EPOCHS
    assert repetition(manifest, enough) is None
    assert f"to {MAX_EPOCHS * (enough - 1):,}" in str(repetition(manifest, enough - 1))


def test_the_demo_reads_its_text_at_most_four_times() -> None:
    assert repetition(preset("demo", AUTHOR), 4_800_000) is None
