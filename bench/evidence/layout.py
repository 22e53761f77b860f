"""How an experiment is shown: tables and drawings as data, and what an experiment is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from bench.evidence.cells import CENTRAL, Cell, Contender

Entry = Mapping[str, Any]
"""A cell and its headline, as ``docs/results/R*.json`` has it."""


@dataclass(frozen=True, slots=True)
class Check:
    """A published figure beside ours."""

    what: str
    published: str
    ours: str
    standing: str
    """How the published figure is known, and what had to be assumed."""


class Circumstances(Protocol):
    """Whatever names a column: ``cells.Setting``, or that of the cost model."""

    def key(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table."""

    contender: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the setting that are this row's own: H = 1 for a method that knows no other."""
    label: str = ""
    """Empty: the contender's name."""

    @property
    def heading(self) -> str:
        return self.label or self.contender


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: one figure in one setting."""

    heading: str
    figure: str
    setting: Any = CENTRAL
    digits: int = 3
    scale: float = 1.0
    """What the figure is multiplied by before it is shown: 100 for percent."""
    best: Literal["low", "high"] | None = None
    """Which end wins; None: nothing to win here."""

    def circumstances(self, row: Row) -> dict[str, Any]:
        """The key of the setting in which this row's figure was taken."""
        setting = replace(self.setting, **row.changes) if row.changes else self.setting
        key: dict[str, Any] = setting.key()
        return key


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    row_heading: str = "method"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a drawing. A word is the name of a figure, a number stands for itself."""

    contender: str
    setting: Any
    x: float | str
    y: float | str


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Point, ...]]
    logarithmic: bool = False
    """Of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """R1 to R11."""

    id: str
    question: str
    notes: tuple[str, ...]
    """How to read it, and what it does not show."""
    cells: tuple[Cell, ...] = ()
    computed: Callable[[], list[Entry]] | None = None
    """In place of cells: entries that need no simulation."""
    checks: Callable[[], list[Check]] = list
    """Published figures, and what we get for them."""
    derive: Callable[[Sequence[Entry]], list[Entry]] = list
    """Adds figures that need several cells at once."""
    figures: tuple[str, ...] = ()
    """What summary.json has of each row."""
    keeps: tuple[str, ...] = ()
    """Beginnings of the names of further figures that are kept for ``derive`` and for drawings."""
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    competition: bool = True
    """Whether its tables say who wins; False where rows are no rivals."""

    def kept(self, figure: str) -> bool:
        """Whether this figure of a headline goes into ``docs/results``."""
        shown = {column.figure for table in self.tables for column in table.columns}
        drawn = {
            name for panel in self.panels for line in panel.lines.values() for each in line for name in (each.x, each.y)
        }
        return figure in {"diverged", *self.figures, *shown, *drawn} or figure.startswith(self.keeps)


def rows(*contenders: Contender, **changes: Any) -> tuple[Row, ...]:
    """One row for each contender, with the same changes of setting."""
    return tuple(Row(each.name, changes) for each in contenders)
