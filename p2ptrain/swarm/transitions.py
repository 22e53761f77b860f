"""Transition tables: the data that the core's state machines follow, and that docs/PROTOCOL.md shows.

A state machine changes its state only by ``TransitionTable.after``, so a transition without a row cannot happen. The
design is h11's (``h11/_state.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


@dataclass(frozen=True, slots=True)
class Transition(Generic[StateT, EventT]):
    """One row of a transition table."""

    before: tuple[StateT | None, ...]
    """States that the row applies to. None: nothing is there yet."""
    event: EventT
    after: StateT | None
    remark: str


class TransitionTable(Generic[StateT, EventT]):
    """All transitions of one state machine."""

    def __init__(self, name: str, *rows: Transition[StateT, EventT]) -> None:
        self.name = name
        self.rows = rows
        self._after = {(before, row.event): row.after for row in rows for before in row.before}
        if len(self._after) != sum(len(row.before) for row in rows):
            raise ValueError(f"{name}: two rows for the same state and event")

    def after(self, before: StateT | None, event: EventT) -> StateT | None:
        """Return the state that follows, or None. RuntimeError if no row allows the transition: a bug of the caller."""
        try:
            return self._after[before, event]
        except KeyError:
            raise RuntimeError(f"{self.name}: {event.name} is impossible in state {_name(before)}") from None

    def to(self, before: StateT | None, event: EventT) -> StateT:
        """Return the state that follows. RuntimeError also if nothing is left after it."""
        after = self.after(before, event)
        if after is None:
            raise RuntimeError(f"{self.name}: {event.name} ends state {_name(before)}")
        return after

    def markdown(self) -> str:
        lines = ["| state | event | next state | remarks |", "|---|---|---|---|"]
        for row in self.rows:
            lines.append(
                f"| {', '.join(map(_name, row.before))} | {row.event.value} | {_name(row.after)} | {row.remark} |"
            )
        return "\n".join(lines)


def _name(state: Enum | None) -> str:
    return "(none)" if state is None else state.name
