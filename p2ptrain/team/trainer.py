"""Trainers of a team: the leader says before each inner step what all ranks do, and each rank's ``Learner`` does it.

All numbers that decide anything are equal on all ranks: progress, loss, the guard's norms and what is applied. So the
ranks reach every collective of the learner at the same point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.base.errors import NetworkError, TeamError
from p2ptrain.base.ids import LinkId
from p2ptrain.ports import Clock
from p2ptrain.swarm.events import Applied, Event, Unfit
from p2ptrain.team.inbox import TeamDelivery, TeamInbox, delivery_of
from p2ptrain.team.payloads import TeamPayloads
from p2ptrain.team.shard import NOBODY, LocalShard
from p2ptrain.team.turn import (
    MOST_RELEASED,
    AdoptionRecord,
    DisplacementRecord,
    Turn,
    TurnAction,
    receive_turn,
    send_turn,
)
from p2ptrain.train.learner import Learner
from p2ptrain.train.team_group import HEARTBEAT_S, TeamGroup

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

T = TypeVar("T")

GATHERING = "gathering the model"


@dataclass(frozen=True, slots=True)
class LastFigures:
    """What a learner last said of itself, in its place between two generations of ranks."""

    changes: int
    tokens: int
    loss: float
    progress_displacement: float
    blocked_s: float
    longest_blocked_s: float
    inner_step_s: float
    ended: bool
    is_waiting: bool
    step: int
    progress: float

    @classmethod
    def of(cls, learner: Learner | LastFigures) -> LastFigures:
        return cls(*(getattr(learner, each.name) for each in fields(cls)))


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
        self._learner: Learner | LastFigures = learner
        self.payloads = payloads
        self.inbox = inbox
        self.peers = 1.0
        """``Learner.peers``, written by the network thread."""
        self._group: TeamGroup | None = group
        self._shard: LocalShard | None = shard
        self._clock = clock
        self._earlier_changes = 0
        self._applying: list[TeamDelivery] = []
        """Deliveries of a turn that is not complete."""

    @property
    def learner(self) -> Learner:
        """The leader's learner in the current generation."""
        learner = self._learner
        assert not isinstance(learner, LastFigures), "between generations"
        return learner

    def interrupt(self) -> None:
        """Drop the learner of ranks that have ended, and its weights; its figures stay until ``restart``."""
        self._learner = LastFigures.of(self._learner)
        self._group = self._shard = None
        self.payloads.disconnect()

    def restart(self, learner: Learner, group: TeamGroup, shard: LocalShard) -> None:
        """Lead a new generation of ranks; arguments as for the class."""
        self._earlier_changes = self.changes + 1
        self._learner, self._group, self._shard = learner, group, shard

    def abandon(self) -> list[Event]:
        """Drop what was delivered for the ranks that have ended; return what the protocol core waits for."""
        lost, self._applying = [*self._applying, *self.inbox.clear()], []
        events: list[Event] = []
        for delivery in lost:
            match delivery.record:
                case DisplacementRecord():
                    events.append(Applied(delivery.link, self.progress))
                case AdoptionRecord():
                    events.append(Unfit(delivery.link, "the ranks of this peer were replaced"))
        return events

    @property
    def changes(self) -> int:
        """``Learner.changes``; a new generation is a change."""
        return self._earlier_changes + self._learner.changes

    @property
    def tokens(self) -> int:
        return self._learner.tokens

    @property
    def loss(self) -> float:
        return self._learner.loss

    @property
    def progress_displacement(self) -> float:
        return self._learner.progress_displacement

    @property
    def blocked_s(self) -> float:
        return self._learner.blocked_s

    @property
    def longest_blocked_s(self) -> float:
        return self._learner.longest_blocked_s

    @property
    def inner_step_s(self) -> float:
        return self._learner.inner_step_s

    def state_dict(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        """Return ``Learner.state_dict`` of the leader's own fragments."""
        return self.learner.state_dict()

    @property
    def ended(self) -> bool:
        return self._learner.ended

    is_away = is_ahead = False
    """A team without ranks stands still, and with them it makes one step at a time."""

    @property
    def is_waiting(self) -> bool:
        return self._learner.is_waiting

    @property
    def step(self) -> int:
        return self._learner.step

    @property
    def progress(self) -> float:
        return self._learner.progress

    def advance(self, runs_ahead: bool = False) -> list[Event]:
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

    def at_slow(self, tell: Callable[[], T]) -> T:
        """Return the result of ``tell``: each rank evaluates with its slow weights."""
        return tell()

    def evaluate(self, tokens: int, own: Callable[[], T]) -> T:
        """Let all ranks read so many held-out tokens with their slow weights; ``own`` is the leader's part.

        A collective. Raises TeamError.
        """
        self._turn("evaluate", [], tokens)
        return self.learner.at_slow(own)

    def save(self, own: Callable[[], T]) -> T:
        """Let all ranks save, a collective of which ``own`` is the leader's part. Raises TeamError."""
        self._turn("save", [])
        return own()

    def save_trained(self, own: Callable[[], T]) -> T:
        """Let all ranks save the slow weights alone, at the end of training, as ``save``."""
        self._turn("save_trained", [])
        return own()

    def gather(self, work: Callable[[], T]) -> T:
        """Let the other ranks wait while the leader reads their shards in ``work``. Raises TeamError."""
        self._turn("gather", [])
        assert self._group is not None, "within a generation"
        return self._group.together(GATHERING, work)

    def stop(self) -> None:
        """Let the other ranks end their loops. Raises TeamError."""
        self._turn("stop", [])

    def _turn(self, action: TurnAction, deliveries: list[TeamDelivery], tokens: int = 0) -> list[Event]:
        group, shard = self._group, self._shard
        assert group is not None, "between generations"
        assert shard is not None
        number = shard.turn + 1
        released = [self.payloads.released.popleft() for _ in range(min(len(self.payloads.released), MOST_RELEASED))]
        records = [delivery.record for delivery in deliveries]
        turn = Turn(
            number=number, action=action, peers=self.peers, tokens=tokens, deliveries=records, released=released
        )
        self._applying = deliveries
        send_turn(group, turn)
        events = _perform(self.learner, shard, 0, turn, [delivery.link for delivery in deliveries])
        shard.complete(number, released)
        self._applying = []
        for record in records:
            if isinstance(record, DisplacementRecord):
                self.payloads.settle(record.serial)
        return events


def _nothing(*_: object) -> None:
    pass


def follow(
    learner: Learner,
    group: TeamGroup,
    shard: LocalShard,
    evaluate: Callable[[int], object] = _nothing,
    save: Callable[[], object] = _nothing,
    save_trained: Callable[[], object] = _nothing,
) -> None:
    """Do what the leader says until it says stop; the events are the leader's to report. Raises TeamError.

    Args:
        evaluate: this rank's part of the held-out loss of so many tokens.
        save: this rank's part of a checkpoint; an OSError is the leader's to report.
        save_trained: this rank's part of the slow weights at the end of training, as ``save``.
    """
    while True:
        turn = receive_turn(group, shard.turn + 1)
        if turn.action == "stop":
            return
        _perform(learner, shard, group.rank, turn)
        shard.complete(turn.number, turn.released)  # before the long actions, as the leader does: exchanges wait for it
        if turn.action == "evaluate":
            evaluate(turn.tokens)
        elif turn.action == "gather":
            group.together(GATHERING, _nothing)
        elif turn.action in ("save", "save_trained"):
            with suppress(OSError):
                (save if turn.action == "save" else save_trained)()


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
