"""Model size and token budget for a text of a given length."""

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Manifest, parameter_count, preset, with_changes
from p2ptrain.manifest.fitting import (
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
    return {"tokenizer": {"kind": "file", "sha256": "0" * 64}, "model.config.vocab_size": ids}


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
    shortest = MIN_OUTER_STEPS * manifest.tokens_per_outer_step
    assert manifest.run.tokens == shortest > tokens or 0.98 < epochs(manifest, tokens) <= 1.0
    assert f"{parameter_count(manifest.model):,} parameters" in fit.reason


def test_more_text_never_means_a_smaller_model() -> None:
    sizes = [parameter_count(made(fitted(10**6 * 2**power, vocabulary(8_000))).model) for power in range(12)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 5


def test_a_tiny_text_gets_a_run_with_enough_outer_steps_and_a_warning() -> None:
    manifest = made(fitted(10_000, {}))
    assert manifest.run.tokens == MIN_OUTER_STEPS * manifest.tokens_per_outer_step
    assert "its 10,000 training tokens 204.8 times" in str(repetition(manifest, 10_000))


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


@pytest.mark.parametrize("name", ["demo", "llama-135m"])
def test_presets_read_their_text_at_most_four_times(name: str) -> None:
    manifest = preset(name, AUTHOR)
    most = manifest.corpus.max_tokens if manifest.corpus.kind == "hub" else 5_055_611
    assert repetition(manifest, int(most * (1 - manifest.corpus.validation_fraction))) is None
