"""Rank on another computer as its leader sees it, and the computer that has joined."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from p2ptrain.base.errors import NetworkError, TeamError
from p2ptrain.team.lan_messages import ControlLine, EndMessage, PlanMessage
from peer.team.plan import RankPlan, RankReport

POLL_S = 0.2


@dataclass(slots=True)
class Visitor:
    """A ``p2ptrain rank`` command that has joined. The listener's lock protects its fields."""

    rank: int
    name: str
    device: str
    host: str
    line: ControlLine
    is_ready: bool = False
    is_lost: bool = False
    report: RankReport | None = None
    stops: threading.Event = field(default_factory=threading.Event)


class Places(Protocol):
    """Places of a team for other computers (``lan_leader.LanListener``)."""

    def await_ready(self, rank: int) -> Visitor:
        """Wait until a computer is in a place and ready, or the owner stops the peer. Raises TeamError."""

    def visitor(self, rank: int) -> Visitor | None:
        """Return the computer in a place; None: the place is free."""


class RemoteRank:
    """Rank on another computer, as ``processes.RankProcess`` is one on this computer."""

    pid: int | None = None
    compiler = ""

    def __init__(self, listener: Places, rank: int) -> None:
        self.rank = rank
        self._listener = listener
        self._visitor: Visitor | None = None

    @property
    def name(self) -> str:
        visitor = self._visitor
        return "its computer" if visitor is None else f"{visitor.name} ({visitor.host})"

    @property
    def is_lost(self) -> bool:
        """Whether the line to the computer has ended since the plan was sent."""
        return self._visitor is not None and self._visitor.is_lost

    @property
    def has_ended(self) -> bool:
        return self._visitor is not None and (self._visitor.is_lost or self._visitor.report is not None)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for the computer, as long as the owner lets the peer run. Raises TeamError."""
        self._listener.await_ready(self.rank)

    def tell(self, plan: RankPlan) -> None:
        """Send the plan. Raises TeamError."""
        visitor = self._listener.visitor(self.rank)
        if visitor is None:
            raise TeamError("starting the ranks", f"the computer of rank {self.rank} has left")
        self._visitor, visitor.is_ready, visitor.report = visitor, False, None
        try:
            visitor.line.send(PlanMessage(meeting=plan.meeting), plan.model_dump_json().encode())
        except NetworkError as error:
            visitor.is_lost = True
            raise TeamError("starting the ranks", f"rank {self.rank}: {error}") from error

    def last_report(self) -> RankReport | None:
        """Return why the rank process has ended, if it said so."""
        return None if self._visitor is None else self._visitor.report

    def begin_kill(self) -> None:
        """Do nothing: ``wait_ready`` ends by itself when the owner stops the peer."""

    def kill(self) -> None:
        """Let the computer end its rank process and start another one. Safe to call twice."""
        visitor, self._visitor = self._visitor, None
        if visitor is None or visitor.is_lost:
            return
        try:
            visitor.line.send(EndMessage())
        except NetworkError:
            visitor.line.close()

    def wait(self, until: float) -> bool:
        """Wait for the rank process to end until this time of ``time.monotonic``; return whether it has."""
        while not self.has_ended and time.monotonic() < until:
            time.sleep(POLL_S)
        return self.has_ended

    def how_ended(self) -> str:
        """Say how the rank has ended."""
        return f"the line to {self.name} was cut" if self.is_lost else f"its process on {self.name} ended"
