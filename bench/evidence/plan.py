"""Which cell comes next, in what state each is, and what all of them will cost. Pure but for the store it reads.

Breadth first: the tuning of whoever takes part in R1's two decisive settings, then these with one seed for all, then
their other seeds, then the centres of the other experiments, then these experiments whole, then R1 along its axes, then
everything else; within a tier one seed of everything before the next seed of anything. Whenever the run is stopped, the
tables are as complete as they could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from bench.evidence.cells import Cell, Choice
from bench.evidence.grid import UNTUNED, best
from bench.evidence.identity import scenario_digest
from bench.evidence.scenario import scenario, total_tokens
from bench.evidence.store import Record, Store

TOKENS_PER_CORE_S = 45_000
"""Of the small transformer, two sequences a step, on one core: measured, two workers."""

OUTER_STEP_S = {"lm": 0.002, "quadratic": 0.007, "bytes": 0.002}
"""Of one core for one peer's outer step with its exchanges; the quadratic's ten inner steps are in it. The last two are
measured on the simulator, the first is assumed."""

START_S = 3.0
"""Of one core for building a world. Assumed."""

LOOK_S, GLANCE_S = 1.1, 0.04
"""Of one core for evaluating one peer on a whole split, at the end, and on the few sequences of any other point."""

QUICK_SHARE = 8
"""By what ``make results-quick`` divides a cell's inner steps."""

SAMPLE_SHARE = 16
"""The same for a sample of older code, which need not look like a result."""

Results = Mapping[str, Sequence[tuple[Choice, float | None]]]
"""What the tuning found: for each contender its choices, in the grid's order, with their losses."""


class State(StrEnum):
    """Of a cell."""

    DONE = "done"
    STALE = "stale"
    """Done by older code; kept, and run again only with --refresh-stale."""
    FAILED = "failed"
    """Without a result, which may be the machine's doing: tried again by every call."""
    WAITING = "waiting"
    """For the tuning of its method."""
    TO_DO = "to do"


@dataclass(frozen=True, slots=True)
class Job:
    """A cell with everything known about it."""

    cell: Cell
    state: State
    scenario: Mapping[str, Any] | None
    """None while it waits."""
    record: Record | None = None


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """In the order in which they are run; cells of one tier and seed stay in the order in which they came."""
    return sorted(cells, key=lambda cell: (cell.tier, cell.seed))


def quick(cells: Iterable[Cell]) -> list[Cell]:
    """The small part for ``make results-quick``: the marked cells, with fewer steps."""
    return [replace(cell, shorter=QUICK_SHARE) for cell in cells if cell.quick]


def shortened(cell: Cell, choice: Choice) -> dict[str, Any]:
    """A cell's scenario with few steps."""
    return scenario(replace(cell, shorter=SAMPLE_SHARE), choice)


def choice_for(cell: Cell, results: Results) -> Choice | None:
    """The numbers of a cell; None while its method's tuning is not complete.

    A contender's best form stands for it. A form that was not tuned itself takes the numbers of its contender.
    """
    contender = cell.contender
    if cell.choice is not None:
        return cell.choice
    if contender.tuned_as is None:
        return replace(UNTUNED, recipe=contender.forms[0])
    found = results.get(contender.tuned_as)
    if not found:
        return None
    own = [(choice, loss) for choice, loss in found if choice.recipe in contender.forms]
    if any(loss is not None for _, loss in own):
        return best(own)
    if any(loss is not None for _, loss in found):
        return replace(best(found), recipe=contender.forms[0])
    return None


def tuned(cells: Iterable[Cell], store: Store) -> Results:
    """The contenders whose whole grid is in the store. A cell that failed has told nothing, as if not run."""
    found: dict[str, list[tuple[Choice, float | None]]] = {}
    incomplete = set()
    for cell in cells:
        if cell.experiment != "tuning" or cell.choice is None:
            continue
        record = store.find(scenario(cell, cell.choice))
        if record is None or record.failure is not None:
            incomplete.add(cell.contender.name)
        else:
            found.setdefault(cell.contender.name, []).append((cell.choice, record.loss))
    return {name: grid for name, grid in found.items() if name not in incomplete}


def jobs(cells: Iterable[Cell], store: Store, results: Results, code: str) -> list[Job]:
    """The state of every cell, in order; cells of one scenario but the first are left out."""
    made, seen = [], set()
    for cell in ordered(cells):
        choice = choice_for(cell, results)
        if choice is None:
            made.append(Job(cell, State.WAITING, None))
            continue
        wanted = scenario(cell, choice)
        key = scenario_digest(wanted)
        if key in seen:
            continue
        seen.add(key)
        record = store.find(wanted)
        made.append(Job(cell, _state(record, code), wanted, record))
    return made


def _state(record: Record | None, code: str) -> State:
    if record is None:
        return State.TO_DO
    if record.failure is not None:
        return State.FAILED
    return State.DONE if code in (record.code, *record.confirmed) else State.STALE


def core_seconds(cell: Cell) -> float:
    """What a cell is expected to take of one core."""
    setting = cell.setting
    outer_steps = setting.peers * cell.steps / setting.inner_steps
    compute = total_tokens(cell) / TOKENS_PER_CORE_S if setting.learner == "lm" else 0.0
    looks = (LOOK_S + GLANCE_S * (setting.points - 1)) * (setting.peers + 1) if setting.learner == "lm" else 0.0
    return START_S + compute + outer_steps * OUTER_STEP_S[setting.learner] + looks


def pace(done: Iterable[tuple[Cell, float]]) -> float:
    """Measured over expected seconds of the cells that were run: what expectations are to be multiplied by."""
    pairs = [(core_seconds(cell), seconds) for cell, seconds in done]
    expected = sum(first for first, _ in pairs)
    return sum(second for _, second in pairs) / expected if expected else 1.0


def hours(cells: Iterable[Cell], workers: int, pace: float = 1.0) -> float:
    """Of real time for all of these, on so many workers."""
    return pace * sum(core_seconds(cell) for cell in cells) / workers / 3_600


__all__ = [
    "Job",
    "Results",
    "State",
    "choice_for",
    "core_seconds",
    "hours",
    "jobs",
    "ordered",
    "pace",
    "quick",
    "tuned",
]
