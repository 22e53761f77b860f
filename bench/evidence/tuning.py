"""Tuning: inner learning rate, then outer learning rate and momentum (N = 8, H = 10, one seed, validation split).

First every method runs with each inner rate of its optimizer at one pair of outer numbers, then with the best of these
rates on a grid of outer numbers. Methods that are compared at other numbers of peers run there with three inner rates
at the best outer numbers: few peers have small batches, and want a smaller rate.

DiLoCo's outer numbers are .7 and .9 (arXiv 2311.08105), NoLoCo's .7 and .5 (arXiv 2506.10911), MuLoCo's momentum is .6
where AdamW has .8 (arXiv 2505.23725).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.evidence.cells import ALONE, CENTRAL, TUNING_SEED, Cell, CellSetting, Choice, Contender, block
from bench.evidence.contenders import DDP, DILOCO, SWARM_2, TUNED
from bench.evidence.layout import LOSS, Entry, Experiment, ResultTable, TableRow, columns
from p2ptrain.recipes import RECIPES


@dataclass(frozen=True, slots=True)
class TuningGrid:
    """Numbers that are tried with one inner optimizer."""

    inner_rates: tuple[float, ...]
    first: tuple[float, float]
    """Outer learning rate and momentum at which the inner rates are compared."""
    rates: tuple[float, ...]
    momenta: tuple[float, ...]


GRIDS: Mapping[str, TuningGrid] = {
    "muon": TuningGrid((0.003, 0.006, 0.012, 0.02), (0.7, 0.6), (0.5, 0.7, 1.0), (0.4, 0.6, 0.8)),
    "adamw": TuningGrid((0.0015, 0.003, 0.006, 0.012), (0.4, 0.8), (0.4, 0.7), (0.6, 0.8)),
}
GASLOC_GRID = replace(GRIDS["muon"], first=(0.7, 0.5), momenta=(0.0, 0.5))
"""Without momentum gasloc is the plain form of the paper, and with .8 it diverges where exchanges fail."""

UNREAD = Choice("", 1.0, 0.0)
"""Outer numbers of recipes that read neither."""


STAGES = 3
"""Inner rates, then outer numbers, then inner rates by number of peers."""


def has_outer_optimizer(contender: Contender) -> bool:
    """Return whether the recipe reads the outer learning rate and momentum."""
    return RECIPES[contender.forms[0]].exchanges and not RECIPES[contender.forms[0]].every_step


def grid_of(contender: Contender) -> TuningGrid:
    """Return the grid of a contender."""
    return GASLOC_GRID if contender.tuned_as == "gasloc" else GRIDS[contender.learner["optimizer"]]


def tuned_at(contender: Contender) -> CellSetting:
    """Return the setting in which a contender is tuned."""
    recipe = RECIPES[contender.forms[0]]
    if not recipe.exchanges:
        return ALONE
    return replace(CENTRAL, inner_steps=1) if recipe.every_step else CENTRAL


def inner_points(contender: Contender) -> list[Choice]:
    """Return the runs that decide the inner learning rate."""
    grid, recipe = grid_of(contender), contender.forms[0]
    eta, mu = grid.first if has_outer_optimizer(contender) else (UNREAD.learning_rate, UNREAD.momentum)
    return [Choice(recipe, eta, mu, rate) for rate in grid.inner_rates]


def outer_points(contender: Contender) -> list[Choice]:
    """Return the runs that decide recipe, outer learning rate and momentum, with the tuned inner rate."""
    if not has_outer_optimizer(contender):
        return []
    grid = grid_of(contender)
    return [Choice(form, eta, mu) for form in contender.forms for eta in grid.rates for mu in grid.momenta]


def _rest_of_grid(contender: Contender) -> list[Choice]:
    """Return the outer points without the one at which inner rates are compared, which has run by then."""
    first = inner_points(contender)[0]
    return [each for each in outer_points(contender) if replace(each, inner_rate=first.inner_rate) != first]


def tuning_cells(contenders: Iterable[Contender]) -> tuple[Cell, ...]:
    """Return all cells that tune these contenders, those of inner rates first."""
    chosen = tuple(contenders)
    return tuple(
        cell
        for points in (inner_points, _rest_of_grid)
        for contender in chosen
        for choice in points(contender)
        for cell in block("tuning", (contender,), (tuned_at(contender),), seeds=(TUNING_SEED,), choice=choice)
    )


TUNED_BY_PEERS = (SWARM_2, DILOCO, DDP)
"""Contenders whose inner rate is tuned at several numbers of peers."""
_FEW, _MANY = GRIDS["muon"].inner_rates[:3], GRIDS["muon"].inner_rates[1:]
RATES_BY_PEERS: Mapping[int, tuple[float, ...]] = {2: _FEW, 4: _FEW, 16: _MANY, 32: _MANY}
LIKE = {64: 32}
"""Numbers of peers that use the inner rate of another number."""
TUNED_AT = (2, 4, 8, 16, 32)


def rate_contender(contender: Contender, rate: float) -> Contender:
    """Return the contender under the name that it has with this inner rate."""
    return replace(contender, name=f"{contender.name} rate={rate:g}")


def peers_setting(contender: Contender, peers: int) -> CellSetting:
    """Return the setting in which the inner rate for this number of peers is tuned."""
    return replace(tuned_at(contender), peers=peers)


BY_PEERS = {f"N = {peers}": CellSetting(peers=peers) for peers in (2, 4, 8, 16, 32)}
BY_RATE = {rate: replace(SWARM_2, name=f"swarm-2 eta={rate:g}") for rate in GRIDS["muon"].rates}
"""Outer rates that are compared at several numbers of peers, with the momentum at which inner rates are compared."""
DECAYED = {
    decay: replace(SWARM_2, name=f"swarm-2 decay={decay:g}", learner={**SWARM_2.learner, "weight_decay": decay})
    for decay in (0.0, 0.1, 0.3)
}

TUNING = Experiment(
    id="tuning",
    question="Inner learning rate, outer learning rate and momentum of each method",
    notes=(
        "Validation split, seed 0, N = 8, H = 10 (ddp: H = 1; local: one computer with the budget of all). First the "
        "inner rate at one pair of outer numbers, then the grid of outer numbers with the best rate.",
        "Muon: inner rates .003, .006, .012 and .02 at eta .7 and mu .6; then eta .5, .7 and 1 times mu .4, .6 and .8 "
        "(gasloc: mu 0 and .5, two forms). AdamW: .0015, .003, .006 and .012 at .4 and .8; then eta .4 and .7 "
        "times mu .6 and .8.",
        "Other numbers of peers: three of the inner rates with the best outer numbers; R2 uses the best one, at N = 64 "
        "that of N = 32.",
        "Single runs: differences below .02 are within the spread of seeds.",
    ),
    cells=(
        *tuning_cells(TUNED),
        *(
            cell
            for rate, contender in BY_RATE.items()
            for cell in block(
                "tuning",
                (contender,),
                BY_PEERS.values(),
                seeds=(TUNING_SEED,),
                choice=Choice("swarm", rate, GRIDS["muon"].first[1]),
            )
        ),
        *block("tuning", DECAYED.values(), (CENTRAL,), seeds=(TUNING_SEED,)),
        *(
            replace(cell, inner_rate=rate)
            for contender in TUNED_BY_PEERS
            for peers, rates in RATES_BY_PEERS.items()
            for rate in rates
            for cell in block(
                "tuning",
                (rate_contender(contender, rate),),
                (peers_setting(contender, peers),),
                seeds=(TUNING_SEED,),
            )
        ),
    ),
    tables=(
        ResultTable(
            "Does the best outer rate follow the number of peers? (mu = .6, equal tokens)",
            tuple(TableRow(each.name) for each in BY_RATE.values()),
            columns("loss", BY_PEERS),
            row_heading="outer rate",
        ),
        ResultTable(
            "Inner rate by number of peers (best outer numbers of N = 8, equal tokens)",
            tuple(
                TableRow(rate_contender(each, rate).name, {"inner_steps": tuned_at(each).inner_steps})
                for each in TUNED_BY_PEERS
                for rate in GRIDS["muon"].inner_rates
            ),
            columns("loss", {f"N = {peers}": CellSetting(peers=peers) for peers in RATES_BY_PEERS}),
            row_heading="inner rate",
        ),
        ResultTable(
            "Weight decay",
            tuple(TableRow(each.name) for each in DECAYED.values()),
            (replace(LOSS, best=None),),
            row_heading="weight decay",
        ),
    ),
)


def choice_of(cell: Cell, tuning: Sequence[Entry]) -> Choice | None:
    """Return the numbers of a cell, or None if a part of its tuning is missing.

    Args:
        tuning: entries of ``tuning.json``.
    """
    if cell.choice is not None and cell.choice.inner_rate is not None:
        return cell.choice
    tuned = next(each for each in TUNED if each.name == cell.contender.tuned_as)
    if cell.choice is None:
        chosen = chosen_for(tuned, tuning)
        if chosen is None:
            return None
        rate = cell.inner_rate or _rate_at(tuned_number(cell.setting), tuned, chosen, tuning)
        return None if rate is None else replace(chosen, inner_rate=rate)
    first = _best(tuned, inner_points(tuned), tuning)
    return None if first is None else replace(cell.choice, inner_rate=first.inner_rate)


def tuned_number(setting: CellSetting) -> int:
    """Return the number of peers whose inner rate a setting uses.

    Uneven computers with steps in proportion to their speeds s are worth (sum s)^2 / sum s^2 equal ones, if averages
    weigh them by speed (docs/ALGORITHMS.md); the nearest tuned number counts.
    """
    if not setting.speeds:
        return setting.peers
    worth = sum(setting.speeds) ** 2 / sum(speed**2 for speed in setting.speeds)
    return min(TUNED_AT, key=lambda tuned: abs(math.log(tuned / worth)))


def _rate_at(peers: int, contender: Contender, chosen: Choice, tuning: Sequence[Entry]) -> float | None:
    """Return the best inner rate for this number of peers, that of N = 8 if it is not tuned there; None if missing."""
    at = LIKE.get(peers, peers)
    if contender not in TUNED_BY_PEERS or at not in RATES_BY_PEERS:
        return chosen.inner_rate
    rates, setting = RATES_BY_PEERS[at], peers_setting(contender, at)
    points = [replace(chosen, inner_rate=rate) for rate in rates]
    found = [
        _losses(rate_contender(contender, rate), [point], setting, tuning)[0]
        for rate, point in zip(rates, points, strict=True)
    ]
    if any(loss is None for loss in found):
        return None
    return min(zip(rates, found, strict=True), key=lambda each: each[1] or math.inf)[0]


def chosen_for(contender: Contender, tuning: Sequence[Entry]) -> Choice | None:
    """Return the best numbers of a tuned contender, or None if a part of its tuning is missing."""
    first = _best(contender, inner_points(contender), tuning)
    if first is None or not has_outer_optimizer(contender):
        return first
    points = [replace(each, inner_rate=first.inner_rate) for each in outer_points(contender)]
    return _best(contender, points, tuning)


def _best(contender: Contender, points: Sequence[Choice], tuning: Sequence[Entry]) -> Choice | None:
    """Return the point with the lowest loss, the first one of equal losses; None if a point has no run."""
    losses = losses_of(contender, points, tuning)
    if any(loss is None for loss in losses):
        return None
    return min(zip(points, losses, strict=True), key=lambda each: each[1] or math.inf)[0]


def losses_of(contender: Contender, points: Sequence[Choice], tuning: Sequence[Entry]) -> list[float | None]:
    """Return the loss at each point: infinity for a run that diverged, None for one that is missing."""
    return _losses(contender, points, tuned_at(contender), tuning)


def _losses(
    contender: Contender, points: Sequence[Choice], setting: CellSetting, tuning: Sequence[Entry]
) -> list[float | None]:
    key = setting.key()
    found = {
        Choice(each["recipe"], each["eta"], each["mu"], each["inner_rate"]): each["headline"].get("loss", math.inf)
        for each in tuning
        if each["contender"] == contender.name and each["setting"] == key and "failure" not in each
    }
    return [found.get(point) for point in points]


def quick(cell: Cell, shorter: int) -> Cell:
    """Return a shortened cell with numbers from the middle of the grid, which needs no tuning."""
    return replace(cell, shorter=shorter, choice=cell.choice or inner_points(cell.contender)[1])
