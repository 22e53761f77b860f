"""Warnings on a valid manifest: values that peers would accept, and that its author can hardly have meant.

They are not errors, since a signed run stays as it is, and unusual values are for experiments.
"""

from __future__ import annotations

from p2ptrain.manifest.fitting import MIN_OUTER_STEPS, shortest_run
from p2ptrain.manifest.schema import Manifest
from p2ptrain.recipes import RECIPES

MAX_WARMUP = 0.5
"""Share of the run up to which the warm-up raises no warning. The presets take 2 to 5 %; above 80 %, schedule wsd would
have to begin its decay before the peak. Guess: measure the loss of short runs."""


def advice(manifest: Manifest) -> list[str]:
    """Return warnings that name the field, its value and its bound, without their last full stops."""
    run, training, outer = manifest.run, manifest.training, manifest.outer
    recipe, warnings = RECIPES[outer.recipe], []
    share, steps = training.warmup_tokens / run.tokens, run.tokens // manifest.tokens_per_outer_step
    if share > MAX_WARMUP:
        warnings.append(
            f"training.warmup_tokens: {training.warmup_tokens:,} of run.tokens, {run.tokens:,}, so the learning rate "
            f"rises for {100 * share:.0f} % of the run; set it to at most {int(MAX_WARMUP * run.tokens):,}"
        )
    if recipe.exchanges and steps < MIN_OUTER_STEPS:
        lower = f", or lower outer.inner_steps, now {outer.inner_steps:,}" if outer.inner_steps > 1 else ""
        all_of = f"{steps:,} outer step{'s' if steps != 1 else ''} of all peers together"
        warnings.append(
            f"run.tokens: {run.tokens:,} make {all_of}, who then hardly exchange; "
            f"set it to at least {shortest_run(manifest):,}, which are {MIN_OUTER_STEPS}{lower}"
        )
    if outer.weights == "work" and not recipe.exchanges:
        warnings.append(
            f"outer.weights: work, and recipe {recipe.name} averages nothing, so it has no effect; set it to equal"
        )
    if outer.partners > 1 and not recipe.exchanges:
        warnings.append(
            f"outer.partners: {outer.partners}, and recipe {recipe.name} exchanges nothing, so it has no effect; "
            "set it to 1"
        )
    elif outer.partners > 1 and outer.topology != "random":
        warnings.append(
            f"outer.partners: {outer.partners}, and topology {outer.topology} names the partners itself, so it has no "
            "effect; set it to 1"
        )
    return warnings
