"""Size of a run that fits its text or the model that it continues: pure arithmetic on the presets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
from p2ptrain.manifest.decoder import MAX_LOGITS, Decoder
from p2ptrain.manifest.document import with_changes
from p2ptrain.manifest.model import parameter_count
from p2ptrain.manifest.presets import PRESETS, preset
from p2ptrain.manifest.schema import Manifest
from p2ptrain.recipes import RECIPES

TOKENS_PER_PARAMETER = 20
"""Training tokens per parameter of the best model for a given compute (Hoffmann et al. 2022, arXiv 2203.15556)."""

SHORT_TEXT = 0.5
"""Share of ``TOKENS_PER_PARAMETER`` below which ``init`` advises a longer text. Guess: losses on short texts."""

MAX_EPOCHS = 4
"""Epochs up to which repeated text is worth about as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""

ENOUGH_OUTER_STEPS = 400
"""Outer steps of all peers that a run has if its text suffices for them within ``MAX_EPOCHS``: 100 for each of four.
Guess: measure the loss of short runs."""

MIN_OUTER_STEPS = 20
"""Outer steps of all peers that a run has at least, however short its text: 5 for each of four. Guess: measure the
loss of short runs."""

MAX_WARMUP = 0.5
"""Share of the run up to which the warm-up raises no warning. The presets take 2 to 5 %; above 80 %, schedule wsd would
have to begin its decay before the peak. Guess: measure the loss of short runs."""

CONTINUED_TRAINING = {
    # Published models were trained with AdamW, and Muon degrades those (arXiv 2502.16982, 2605.10468).
    "training.optimizer": "adamw",
    # Guess: a sweep on published models; a higher one adapts more to the new text and forgets more of the old
    # (arXiv 2308.04014).
    "training.learning_rate": 1e-4,
    # Warmed up and decayed again (arXiv 2403.08763).
    "training.schedule": "cosine",
    "training.final_learning_rate_fraction": 0.1,
}

WARMUP_SHARE = 100
"""Tokens of a run for each token of its warm-up; its length matters little (arXiv 2308.04014)."""


class FittedRun(NamedTuple):
    """A preset, and changes to it that fit a text."""

    preset: str
    changes: dict[str, Any]
    """New values of the preset's fields, by dotted path."""
    reason: str
    """A sentence that says what was chosen and why."""


def fitted(tokens: int, changes: Mapping[str, Any], preset_name: str | None = None) -> FittedRun:
    """Choose model size and token budget for a text of ``tokens`` training tokens.

    Without ``preset_name`` all peers together read as much as the text once, a short one up to ``MAX_EPOCHS`` times for
    ``ENOUGH_OUTER_STEPS``, and the model is that of ``_candidates`` which comes nearest to ``TOKENS_PER_PARAMETER``.
    With it, model and budget are the preset's.

    Args:
        changes: further changes to the preset, such as its vocabulary.

    Raises:
        ManifestError: no such preset, or the changes do not fit it.
    """
    if preset_name is not None:
        return _explained(preset_name, dict(changes), tokens)
    target = tokens / TOKENS_PER_PARAMETER
    found = [(name, {**sizes, **changes}) for name, sizes in _candidates(changes)]
    name, chosen = min(found, key=lambda each: abs(math.log(_parameters(*each) / max(1.0, target))))
    budget = _budget(tokens, preset(name).tokens_per_outer_step)
    run = PRESETS[name]
    warmup = _rounded(budget * run["training"]["warmup_tokens"] // run["run"]["tokens"])
    chosen |= {"run.tokens": budget, "training.warmup_tokens": warmup}
    return _explained(name, chosen, tokens)


def nearest_preset(model: Decoder) -> str:
    """Return the preset whose model has the nearest size."""
    own = parameter_count(model)
    sizes = {name: parameter_count(preset(name).model) for name in PRESETS}
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / own)))


def continued(model: Decoder, preset_name: str) -> dict[str, Any]:
    """Return the changes that make a preset a run that continues a published model, by dotted path.

    The numbers of the presets are for random weights.

    Sequences and fragments are the preset's, as far as the model has the positions and the weights for them.
    """
    start = preset(preset_name)
    length = min(
        start.training.sequence_length,
        model.config.max_position_embeddings,
        MAX_LOGITS // model.config.vocab_size,
    )
    fragments = max(1, min(start.outer.fragments, parameter_count(model) // FRAGMENT_ALIGNMENT))
    return {
        **CONTINUED_TRAINING,
        "model": model.model_dump(),
        "training.sequence_length": length,
        "training.warmup_tokens": start.run.tokens // WARMUP_SHARE,
        "outer.fragments": fragments,
        "outer.fragments_per_exchange": min(fragments, start.outer.fragments_per_exchange),
    }


def continued_run(tokens: int, changes: Mapping[str, Any], preset_name: str) -> FittedRun:
    """Choose the token budget of a run that continues a model, by the rule of ``fitted``.

    Args:
        changes: those of ``continued``, and further ones.

    Raises ManifestError if the changes do not fit the preset.
    """
    manifest = with_changes(preset(preset_name), changes)
    budget = _budget(tokens, manifest.tokens_per_outer_step)
    reason = (
        f"{parameter_count(manifest.model):,} parameters, continued with {manifest.training.optimizer} and a peak "
        f"learning rate of {manifest.training.learning_rate:g}, for {budget:,} tokens of all peers together."
    )
    warmup = _rounded(budget // WARMUP_SHARE)
    return FittedRun(preset_name, {**changes, "run.tokens": budget, "training.warmup_tokens": warmup}, reason)


def _budget(tokens: int, per_outer_step: int) -> int:
    """Return the tokens of a run whose peers read the text once, or more often if it is short."""
    enough = min(ENOUGH_OUTER_STEPS * per_outer_step, _rounded(MAX_EPOCHS * tokens))
    return max(_rounded(tokens), enough, MIN_OUTER_STEPS * per_outer_step)


def epochs(manifest: Manifest, tokens: int) -> float:
    """Return how often all peers together read as much as a text of ``tokens`` training tokens until the run ends."""
    return manifest.run.tokens / tokens


def never_read(passes: float) -> float:
    """Return the share of a text that many peers, each in an order of its own, never read in so many passes."""
    return math.exp(-passes)


def shortest_run(manifest: Manifest) -> int:
    """Return the least tokens of a run in which peers exchange at all often (``MIN_OUTER_STEPS``)."""
    exchanges = RECIPES[manifest.outer.recipe].exchanges
    return manifest.tokens_per_outer_step * (MIN_OUTER_STEPS if exchanges else 1)


def repetition(manifest: Manifest, tokens: int) -> str | None:
    """Return a warning, without its last full stop, if peers read the text too often (``MAX_EPOCHS``); else None.

    It advises a smaller budget only down to ``shortest_run``, as ``fitted`` chooses none below.
    """
    if epochs(manifest, tokens) <= MAX_EPOCHS:
        return None
    budget = manifest.run.tokens
    lower = max(MAX_EPOCHS * tokens, shortest_run(manifest))
    if lower < budget:
        advice = f"use more text, or lower run.tokens, now {budget:,}, to {lower:,}"
    else:
        advice = (
            f"use more text, {-(-budget // MAX_EPOCHS):,} training tokens or more; with a smaller run.tokens than "
            f"{budget:,} peers would hardly exchange"
        )
    return (
        f"the text is small for this run: all peers together read its {tokens:,} training tokens "
        f"{epochs(manifest, tokens):,.1f} times. Beyond {MAX_EPOCHS} times repeated text is worth less and less "
        f"(Muennighoff et al. 2023). The run's author can {advice}"
    )


def advice(manifest: Manifest) -> list[str]:
    """Return warnings on values that peers accept and the author can hardly have meant, without last full stops.

    They are no errors: a signed run stays as it is, and unusual values are for experiments.
    """
    run, training, outer = manifest.run, manifest.training, manifest.outer
    warnings = []
    share, steps = training.warmup_tokens / run.tokens, run.tokens // manifest.tokens_per_outer_step
    if share > MAX_WARMUP:
        warnings.append(
            f"training.warmup_tokens: {training.warmup_tokens:,} of run.tokens, {run.tokens:,}, so the learning rate "
            f"rises for {100 * share:.0f} % of the run; set it to at most {int(MAX_WARMUP * run.tokens):,}"
        )
    if RECIPES[outer.recipe].exchanges and steps < MIN_OUTER_STEPS:
        lower = f", or lower outer.inner_steps, now {outer.inner_steps:,}" if outer.inner_steps > 1 else ""
        all_of = f"{steps:,} outer step{'s' if steps != 1 else ''} of all peers together"
        warnings.append(
            f"run.tokens: {run.tokens:,} make {all_of}, who then hardly exchange; "
            f"set it to at least {shortest_run(manifest):,}, which are {MIN_OUTER_STEPS}{lower}"
        )
    return warnings


def _explained(name: str, changes: dict[str, Any], tokens: int) -> FittedRun:
    manifest = with_changes(preset(name), changes)
    config, parameters = manifest.model.config, parameter_count(manifest.model)
    reason = (
        f"{parameters:,} parameters (preset {name}, {config.num_hidden_layers} layers of {config.hidden_size}): "
        f"the text has {tokens / parameters:,.2f} training tokens per parameter, and about {TOKENS_PER_PARAMETER} are "
        "best (Hoffmann et al. 2022)."
    )
    if tokens < SHORT_TEXT * TOKENS_PER_PARAMETER * parameters:
        vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        is_mostly_ids = 2 * vocabulary > parameters
        advice = f"a tokenizer of fewer ids than {config.vocab_size:,}" if is_mostly_ids else "a longer text"
        reason += f" No smaller model is offered: use {advice} if you can."
    return FittedRun(name, changes, reason)


def _candidates(changes: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield presets and, between two of them, the larger one with fewer attention heads and layers."""
    below = 0
    for name, values in PRESETS.items():
        config = values["model"]["config"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        for kept in range(heads // groups, heads, heads // groups):
            sizes = {
                "hidden_size": config["hidden_size"] * kept // heads,
                "intermediate_size": config["intermediate_size"] * kept // heads,
                "num_hidden_layers": max(1, round(config["num_hidden_layers"] * kept / heads)),
                "num_attention_heads": kept,
                "num_key_value_heads": groups * kept // heads,
            }
            smaller = {f"model.config.{field}": value for field, value in sizes.items()}
            if below and _parameters(name, {**smaller, **changes}) > below:
                yield name, smaller
        below = _parameters(name, changes)
        yield name, {}


def _parameters(name: str, changes: Mapping[str, Any]) -> int:
    return parameter_count(with_changes(preset(name), changes).model)


def _rounded(number: int) -> int:
    """Round down to three digits."""
    unit = int(10 ** max(0, len(str(number)) - 3))
    return number // unit * unit
