"""Data types of an experiment: its cells, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.evidence.cells import CENTRAL, Cell, Contender

Entry = Mapping[str, Any]
"""Cell and its headline, as ``docs/results/R*.json`` holds it."""

Best = Literal["low", "high"]


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """Published figure beside ours."""

    what: str
    published: str
    ours: str
    standing: str
    """How the published figure is known, and what had to be assumed."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Row of a table: one contender."""

    contender: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the setting that are specific to this row, such as H = 1 for a method that has no other."""
    label: str = ""
    """Heading; the contender's name if empty."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: one figure in one setting."""

    heading: str
    figure: str
    setting: Any = CENTRAL
    """``CellSetting`` or ``published.CostColumn``."""
    digits: int = 3
    scale: float = 1.0
    """Factor applied before display: 100 for percent."""
    best: Best | None = None
    """Which end is better; None if neither."""

    def circumstances(self, row: TableRow) -> dict[str, Any]:
        """Return the key of the setting for this row."""
        setting = replace(self.setting, **row.changes) if row.changes else self.setting
        key: dict[str, Any] = setting.key()
        return key


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Table of a page."""

    title: str
    rows: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    row_heading: str = "method"
    over: TableRow | None = None
    """Row by whose figures all figures are divided, seed by seed; None: figures as they are."""


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """Point of a figure. A string names a figure of the contender; a number is a coordinate."""

    contender: str
    setting: Any
    x: float | str
    y: float | str


@dataclass(frozen=True, slots=True)
class PlotPanel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[PlotPoint, ...]]
    logarithmic: bool = False
    """Logarithmic x axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Tuning, or one of R1 to R10."""

    id: str
    question: str
    notes: tuple[str, ...]
    """How to read the tables, and what they do not show."""
    cells: tuple[Cell, ...] = ()
    computed: Callable[[], list[Entry]] | None = None
    """Entries that need no simulation, in place of cells."""
    checks: Callable[[], list[PublishedFigure]] = list
    derive: Callable[[Sequence[Entry]], list[Entry]] = list
    """Adds figures that depend on several cells."""
    tables: tuple[ResultTable, ...] = ()
    panels: tuple[PlotPanel, ...] = ()


def rows(*contenders: Contender, **changes: Any) -> tuple[TableRow, ...]:
    """Return one row for each contender, with the same changes of setting."""
    return tuple(TableRow(each.name, changes) for each in contenders)


def columns(figure: str, settings: Mapping[str, Any], **how: Any) -> tuple[Column, ...]:
    """Return one column of the same figure for each setting, by heading."""
    return tuple(Column(heading, figure, setting, **how) for heading, setting in settings.items())


LOSS = Column("loss", "loss", best="low")
AVERAGED = Column("averaged model", "averaged_loss", best="low")
DISAGREEMENT = Column("disagreement, %", "disagreement", scale=100, digits=2)
EXCHANGES = Column("exchanges per outer step", "exchanges_per_outer_step", digits=2)
BITS = Column("bits per parameter and outer step", "bits_per_parameter", digits=2)
