"""Run record as plain data: what happened when, how each process ended, and samples of memory and files."""

from __future__ import annotations

from dataclasses import dataclass, field

from lab.resource_monitor import Sample


@dataclass(frozen=True, slots=True)
class Done:
    """Act of the script that was performed."""

    at_s: float
    """Time at which it was due, in scenario seconds."""
    time: float
    """Time at which it was done, in seconds since 1970, as in event logs."""
    do: str
    who: str


@dataclass(frozen=True, slots=True)
class Ended:
    """End of one process of a peer."""

    status: int
    ended_by_us: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a whole run."""

    lives: dict[str, list[Ended]]
    """Ends of the processes of each peer that was started."""
    done: list[Done]
    missed: list[str]
    """Acts that were not possible, and why: the peer had gone, or the stage failed."""
    troubles: list[str]
    """Errors that ended the run early, or occurred at its end."""
    cut_short: bool
    """Whether the scenario's seconds were over, so that all peers were asked to leave."""
    wall_s: float
    """Seconds since second 0; 0 if that never came."""
    samples: dict[str, list[Sample]]
    """Samples of the last process of each peer and bootstrap."""
    peaks: dict[str, int]
    """Largest resident bytes of the same process and its network daemon."""
    line_bytes: dict[str, int | None] = field(default_factory=dict)
    """Bytes that the line of each bootstrap's host has carried, both ways; None where nothing counts them."""
