"""Cells in bulk: everything in ``contenders`` times everything in ``settings`` times every seed."""

from __future__ import annotations

from collections.abc import Iterable

from bench.evidence.cells import FINAL_SEEDS, Cell, Contender, Setting


def block(
    experiment: str,
    contenders: Iterable[Contender],
    settings: Iterable[Setting],
    *,
    seeds: Iterable[int] = FINAL_SEEDS,
    tier: int = 3,
    quick: Iterable[Contender] = (),
) -> tuple[Cell, ...]:
    """All combinations, on the test split and with tuned numbers. ``quick``: who is in the quick part, first seed."""
    seeds, contenders, quick = tuple(seeds), tuple(contenders), tuple(quick)
    return tuple(
        Cell(
            experiment=experiment,
            contender=contender,
            setting=setting,
            seed=seed,
            tier=tier,
            quick=contender in quick and seed == seeds[0],
        )
        for setting in settings
        for seed in seeds
        for contender in contenders
    )
