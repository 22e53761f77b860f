"""Trainers of a team: the leader says before each inner step what all ranks do, and each rank's ``Learner`` does it.

All numbers that decide anything are equal on all ranks: progress, loss, the guard's norms and what is applied. So the
ranks reach every collective of the learner at the same point.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from p2ptrain.base.errors import NetworkError, P2pTrainError, TeamError
from p2ptrain.base.ids import LinkId
from p2ptrain.ports import Clock
from p2ptrain.swarm.events import Event
from p2ptrain.team.inbox import TeamDelivery, TeamInbox, delivery_of
from p2ptrain.team.payloads import TeamPayloads
from p2ptrain.team.shard import NOBODY, LocalShard
from p2ptrain.team.turn import MOST_RELEASED, DisplacementRecord, Turn, TurnAction, receive_turn, send_turn
from p2ptrain.train.learner import Learner
from p2ptrain.train.team_group import TeamGroup

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Seconds between the turns of a leader that waits: shorter than a group's timeout, so that silence means a failure."""


class LeadingTrainer:
    """The leader's trainer: ``ports.NetworkedLearner`` for the network, and ``Learner``'s methods for the loop.

    Args:
        learner: of the leader's own fragments.
        group: the team.
        shard: of the leader's own fragments.
        payloads, inbox: the team's.
    """

    def __init__(
        self,
        learner: Learner,
        group: TeamGroup,
        shard: LocalShard,
        payloads: TeamPayloads,
        inbox: TeamInbox,
        clock: Clock = time.monotonic,
    ) -> None:
        self.learner = learner
        self.payloads = payloads
        self.inbox = inbox
        self.peers = 1.0
        """``Learner.peers``, written by the network thread."""
        self._group = group
        self._shard = shard
        self._clock = clock

    @property
    def ended(self) -> bool:
        return self.learner.ended

    @property
    def is_waiting(self) -> bool:
        return self.learner.is_waiting

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def progress(self) -> float:
        return self.learner.progress

    def advance(self) -> list[Event]:
        """Let all ranks do ``Learner.advance``. Raises TeamError."""
        deliveries, _ = self.inbox.drain()
        return self._turn("advance", deliveries)

    def settle(self, wait_s: float = 0.0) -> list[Event]:
        """Let all ranks do ``Learner.settle``, and hear from the leader while it waits. Raises TeamError."""
        until = self._clock() + wait_s
        while True:
            left_s = until - self._clock()
            deliveries, has_come = self.inbox.drain(min(max(left_s, 0.0), HEARTBEAT_S))
            events = self._turn("settle", deliveries)
            if has_come or self._clock() >= until:
                return events

    def evaluate(self, own: Callable[[], float]) -> float:
        """Let all ranks evaluate, a collective of which ``own`` is the leader's part. Raises TeamError."""
        self._turn("evaluate", [])
        return own()

    def save(self, own: Callable[[], object]) -> bool:
        """Let all ranks save, the leader by ``own``; return whether all have. Raises TeamError."""
        self._turn("save", [])
        return _have_saved(self._group, own)

    def stop(self) -> None:
        """Let the other ranks end their loops. Raises TeamError."""
        self._turn("stop", [])

    def _turn(self, action: TurnAction, deliveries: list[TeamDelivery]) -> list[Event]:
        number = self._shard.turn + 1
        released = [self.payloads.released.popleft() for _ in range(min(len(self.payloads.released), MOST_RELEASED))]
        records = [delivery.record for delivery in deliveries]
        turn = Turn(number=number, action=action, peers=self.peers, deliveries=records, released=released)
        send_turn(self._group, turn)
        events = _perform(self.learner, self._shard, 0, turn, [delivery.link for delivery in deliveries])
        self._shard.complete(number, released)
        for record in records:
            if isinstance(record, DisplacementRecord):
                self.payloads.settle(record.serial)
        return events


def follow(
    learner: Learner,
    group: TeamGroup,
    shard: LocalShard,
    evaluate: Callable[[], object] = lambda: None,
    save: Callable[[], object] = lambda: None,
) -> None:
    """Do what the leader says until it says stop; the events are the leader's to report. Raises TeamError.

    Args:
        evaluate: this rank's part of the held-out loss.
        save: this rank's part of a checkpoint.
    """
    while True:
        turn = receive_turn(group, shard.turn + 1)
        if turn.action == "stop":
            return
        _perform(learner, shard, group.rank, turn)
        shard.complete(turn.number, turn.released)  # before the long actions, as the leader does: exchanges wait for it
        if turn.action == "evaluate":
            evaluate()
        elif turn.action == "save":
            _have_saved(group, save)


def _have_saved(group: TeamGroup, save: Callable[[], object]) -> bool:
    """Save this rank's part; return whether all ranks have saved theirs, a collective."""
    has_saved = True
    try:
        save()
    except (OSError, P2pTrainError):
        logger.exception("rank %d could not save its part of a checkpoint", group.rank)
        has_saved = False
    return bool(group.least("checkpoint", has_saved))


def _perform(learner: Learner, shard: LocalShard, rank: int, turn: Turn, links: Sequence[LinkId] = ()) -> list[Event]:
    """Apply a turn's deliveries and do its action with this rank's learner."""
    learner.peers = turn.peers
    try:
        for place, record in enumerate(turn.deliveries):
            learner.inbox.put(delivery_of(record, shard, rank, links[place] if links else NOBODY))
    except NetworkError as error:
        raise TeamError(f"turn {turn.number}", f"rank {rank} lacks its part: {error}") from error
    if turn.action == "advance":
        return learner.advance()
    return learner.settle() if turn.action == "settle" else []
