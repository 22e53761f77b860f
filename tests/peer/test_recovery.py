"""Recovery of a peer whose ranks failed, with everything around it faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.base.errors import DeviceError, TeamError
from p2ptrain.swarm.events import Unfit
from p2ptrain.team.shard import NOBODY
from peer.team.recovery import Recovery, TeamStoppedError

UNFIT = Unfit(NOBODY, "the ranks of this peer were replaced")


class FakeTeam:
    """Ranks that always come back; the owner may stop the peer meanwhile."""

    devices = (torch.device("cpu"), torch.device("cpu"))

    def __init__(self) -> None:
        self.did: list[str] = []
        self.stops = self.has_lost_computer = False
        self.trainer = SimpleNamespace(abandon=lambda: [UNFIT])

    def is_stopping(self) -> bool:
        return self.stops

    def watch_line(self, leave: Any) -> None:
        self.leave = leave

    def recover(self, error: TeamError) -> bool:
        assert error.__traceback__ is None
        assert error.__cause__ is None
        self.did.append("recover")
        return True

    def close(self) -> None:
        self.did.append("close")

    def renew(self) -> None:
        self.did.append("renew")


class FakeMembership:
    """Membership of a peer whose farewell ends after so many looks at it."""

    def __init__(self, looks: float) -> None:
        self.looks = looks
        self.did: list[Any] = []

    @property
    def is_away(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def leave(self) -> None:
        self.did.append("leave")

    def come_back(self) -> None:
        self.did.append("come back")

    def post(self, event: Any) -> None:
        self.did.append(event)


def recovery(team: FakeTeam, membership: FakeMembership) -> Recovery:
    record = SimpleNamespace(interrupted=lambda: None, recovered=lambda: None)
    return Recovery(team, record, membership)  # type: ignore[arg-type]


def failing(times: int, error: Exception) -> Any:
    left = [error] * times

    def act() -> None:
        if left:
            raise left.pop() from ValueError("a cause")

    return act


def test_a_peer_leaves_recovers_and_returns() -> None:
    team, membership = FakeTeam(), FakeMembership(2)
    recovery(team, membership).run(failing(1, TeamError("turn 5", "a rank is gone")))
    assert team.did == ["recover", "renew"]
    assert membership.did == ["leave", UNFIT, UNFIT, "come back"]


def test_a_computer_whose_line_is_cut_makes_the_peer_leave_before_a_collective_fails() -> None:
    team, membership = FakeTeam(), FakeMembership(2)
    recovery(team, membership).run(lambda: team.leave())
    assert (team.did, membership.did) == ([], ["leave"])


def test_a_computer_that_is_lost_while_the_peer_recovers_keeps_it_out_of_the_swarm() -> None:
    team, membership = FakeTeam(), FakeMembership(0)
    team.has_lost_computer = True
    recovery(team, membership).run(failing(1, TeamError("turn 5", "a rank is gone")))
    assert membership.did == ["leave", "come back", "leave"]


def test_a_farewell_that_does_not_end_ends_with_a_stop() -> None:
    team, membership = FakeTeam(), FakeMembership(float("inf"))

    def stops(event: Any) -> None:
        team.stops = True

    membership.post = stops  # type: ignore[method-assign]
    with pytest.raises(TeamStoppedError):
        recovery(team, membership).run(failing(1, TeamError("turn 5", "a rank is gone")))
    assert team.did == ["recover"]


def test_a_lost_card_of_the_leader_is_an_error_with_its_name_and_no_recovery() -> None:
    team, membership = FakeTeam(), FakeMembership(0)
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with ...")
    with pytest.raises(DeviceError, match=r"The device cpu failed: CUDA error: unspecified launch failure\.\n"):
        recovery(team, membership).run(failing(1, lost))
    assert (team.did, membership.did) == (["close"], [])
