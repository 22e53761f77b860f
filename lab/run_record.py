"""How a scenario went, as plain data: what happened when, how everybody ended, and what was seen meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from lab.pulse import Sample


@dataclass(frozen=True, slots=True)
class Done:
    """Something that happened as the script says."""

    at_s: float
    """When it should have."""
    time: float
    """When it did, in seconds since 1970, as event logs count."""
    do: str
    who: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process of a peer ended."""

    status: int
    ended_by_us: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """How it all went."""

    lives: dict[str, list[Ended]]
    """Of each peer that was started."""
    done: list[Done]
    missed: list[str]
    """What could not happen, and why: whom it concerns was not there any more, or the stage could not do it."""
    troubles: list[str]
    """What ended it before its time, or went wrong when it was over."""
    cut_short: bool
    """The scenario's seconds were over, and everybody was asked to leave."""
    wall_s: float
    """Since second 0; 0 where that never came."""
    samples: dict[str, list[Sample]]
    """Of the last process of each peer and bootstrap, while it was watched."""
    peaks: dict[str, int]
    """Of the same, the most memory that it and its network daemon ever had resident, in bytes."""
