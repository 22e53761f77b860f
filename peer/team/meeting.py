"""How the leader and the ranks of one generation meet: on one computer, or on several of a private network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2ptrain.base.errors import NetworkError, TeamError
from p2ptrain.team.connection import ByteLine, RankConnection, SocketLine
from p2ptrain.team.handshake import RankListener, dial, new_key
from p2ptrain.team.lan_address import LanAddress, interface_of
from p2ptrain.team.sealed import Hello, Purpose, dial_leader
from p2ptrain.team.store import MOST_VALUE_BYTES, RankStore
from p2ptrain.train.team_group import Rendezvous
from peer.team.plan import LEADER_SOCKET, RankPlan


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """What a leader's plan says of a generation's meeting."""

    key: bytes
    folder: str = ""
    leader: str = ""
    host: str = ""
    name: str = ""


class MeetingHost(Protocol):
    """Leader's side of the meetings of its generations, one at a time: ``BoxHost`` or ``lan_leader.LanListener``."""

    def open_meeting(self, timeout_s: float) -> MeetingPoint:
        """Begin a generation's meeting. Raises TeamError."""

    def rendezvous(self, size: int, generation: int) -> Rendezvous:
        """Return the place of the leader's own rank among ``size``."""

    def shard_lines(
        self, size: int, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> list[ByteLine]:
        """Return the shard lines of ranks 1 to ``size`` - 1, in order.

        Raises TeamError if one is missing in time, or ``is_stopping``.
        """

    def close_meeting(self) -> None:
        """End the meeting, but not its shard lines. Safe to call twice."""


class BoxHost:
    """Meetings of ranks on the leader's own computer, in a folder that only the owner can enter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener: RankListener | None = None

    def open_meeting(self, timeout_s: float) -> MeetingPoint:
        key = new_key()
        self._listener = RankListener(self._folder / LEADER_SOCKET, key)
        return MeetingPoint(key, str(self._folder))

    def rendezvous(self, size: int, generation: int) -> Rendezvous:
        return Rendezvous(self._folder, 0, size, generation)

    def shard_lines(
        self, size: int, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> list[ByteLine]:
        assert self._listener is not None, "a meeting is open"
        return [SocketLine(each) for each in self._listener.connect(size, timeout_s, is_stopping)]

    def close_meeting(self) -> None:
        if self._listener is not None:
            self._listener.close()


@dataclass(frozen=True, slots=True)
class BoxMeeting:
    """Meeting of ranks that their leader has started on its own computer."""

    plan: RankPlan

    def rendezvous(self) -> Rendezvous:
        plan = self.plan
        return Rendezvous(Path(plan.folder), plan.rank, len(plan.devices), plan.generation)

    def dial(self) -> ByteLine:
        """Connect to the leader. Raises TeamError."""
        plan = self.plan
        return SocketLine(dial(Path(plan.folder) / LEADER_SOCKET, bytes.fromhex(plan.key), plan.rank, plan.timeout_s))


@dataclass(frozen=True, slots=True)
class LanMeeting:
    """Meeting of ranks on several computers."""

    plan: RankPlan
    leader: LanAddress

    @staticmethod
    def of(plan: RankPlan) -> LanMeeting:
        """Raises DeviceError if the plan names no private address."""
        return LanMeeting(plan, LanAddress.parse(plan.leader))

    def rendezvous(self) -> Rendezvous:
        """Connect to the leader's store. Raises TeamError, and DeviceError if this computer lacks the address."""
        plan, interface = self.plan, interface_of(self.plan.host)
        store = RankStore(RankConnection(self._dialed(Purpose.STORE), MOST_VALUE_BYTES), plan.timeout_s)
        return Rendezvous(Path(), plan.rank, len(plan.devices), plan.generation, store, interface)

    def dial(self) -> ByteLine:
        """Connect to the leader. Raises TeamError."""
        return self._dialed(Purpose.SHARD)

    def _dialed(self, purpose: Purpose) -> ByteLine:
        plan, leader = self.plan, self.leader
        hello = Hello(purpose, plan.rank, bytes.fromhex(plan.meeting))
        try:
            return dial_leader(leader.host, leader.port, bytes.fromhex(plan.key), hello, plan.timeout_s)
        except NetworkError as error:
            raise TeamError("connecting the ranks", str(error)) from error
