"""Those who come in mid-run: how soon they are in step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lab.artifacts import Artifacts

SOON = 2
"""Outer steps within which a newcomer is to be as good as the others."""


def loss_soon(one: Artifacts, came: float, others: Sequence[Artifacts]) -> float | None:
    """Its training loss over the others' when it had made SOON outer steps with the weights that it took.

    Each is the mean of one whole inner phase: the newcomer's of its SOON'th, the others' of the one that each had
    completed last by then.

    Args:
        came: when it was started (seconds since 1970); weights that it took before do not count.

    Returns:
        None where it took none, did not come that far, or nobody else had told a loss.
    """
    taken = one.first("caught up", came)
    if taken is None:
        return None
    since = [each for each in one.progress() if each.time >= taken]
    told = [(each.time, each.loss) for each in since if each.step >= since[0].step + SOON and each.loss is not None]
    if not told:
        return None
    time, ours = told[0]
    theirs = [losses[-1] for each in others if (losses := _losses(each, time))]
    return ours * len(theirs) / sum(theirs) if theirs else None


def _losses(one: Artifacts, until: float) -> list[float]:
    return [each.loss for each in one.progress() if each.loss is not None and each.time <= until]
