"""Recovery from failed ranks: the peer leaves the swarm, a new generation of ranks begins, and it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from p2ptrain.base.errors import DeviceError, P2pTrainError, TeamError
from p2ptrain.swarm.events import Event
from peer.session_recorder import SessionRecorder
from peer.team.generations import Team, bare

LEAVING_S = 60.0
"""Longest wait for the farewell, while new ranks start; a later delivery of the old driver would be dropped."""
POLL_S = 0.05


class SwarmMembership(Protocol):
    """Whether the peer is in the swarm (``participation.Participation``)."""

    @property
    def is_away(self) -> bool: ...

    def leave(self) -> None: ...

    def come_back(self) -> None: ...

    def post(self, event: Event) -> None: ...


class TeamStoppedError(P2pTrainError):
    """The owner stopped the peer while its ranks were being replaced: there is nothing newer to save."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Repeats what failed because of a rank. Belongs to the trainer thread.

    Args:
        team: None: the peer trains in one process.
    """

    team: Team | None
    record: SessionRecorder
    membership: SwarmMembership | None = None
    """None: the run has no exchanges."""

    def run(self, act: Callable[[], None]) -> None:
        """Call ``act`` until it ends without a TeamError. Raises DeviceError, and TeamStoppedError."""
        team = self.team
        if team is None:
            act()
            return
        if self.membership is not None:
            team.watch_line(self.membership.leave)
        while True:
            try:
                act()
                return
            except TeamError as error:
                failure = bare(error)
            except torch.AcceleratorError as error:  # the context of this process's card is lost
                team.close()  # nothing can be saved, and the ranks wait for this one
                raise DeviceError(
                    f"The device {team.devices[0]} failed: {str(error).partition(chr(10))[0]}.",
                    "Start the peer again; if it fails again, check the card with its maker's tools.",
                ) from error
            self._recover(team, failure)

    def drop_deliveries(self) -> None:
        """Drop what the swarm has delivered for ranks that have ended, and tell the protocol core so."""
        if self.team is not None and self.membership is not None:
            for event in self.team.trainer.abandon():
                self.membership.post(event)

    def _recover(self, team: Team, failure: TeamError) -> None:
        self.record.interrupted()
        if self.membership is not None:
            self.membership.leave()
        if not team.recover(failure):
            raise TeamStoppedError
        until = time.monotonic() + LEAVING_S
        while self.membership is not None and not self.membership.is_away and time.monotonic() < until:
            if team.is_stopping():
                raise TeamStoppedError
            self.drop_deliveries()
            time.sleep(POLL_S)
        team.trainer.abandon()
        team.renew()
        self.record.recovered()
        if self.membership is not None:
            self.membership.come_back()
            if team.has_lost_computer:  # while this peer was away: the next collective will fail
                self.membership.leave()
