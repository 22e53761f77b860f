"""Training loop of one peer. Runs in the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from p2ptrain.swarm.events import Event, LeaveRequested, OuterStepDone, TrainingEnded

if TYPE_CHECKING:
    from p2ptrain.host.tasks import PeerLearner

NAP_S = 60.0
"""Longest wait of an idle trainer, in seconds, before it checks its signals again."""


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals to the trainer. Set one, then call ``learner.inbox.wake()``."""

    begin: threading.Event = field(default_factory=threading.Event)
    """Train: the swarm was found, or there is none. Clearing it stops the trainer after the current inner step."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Leave after the current inner step, at the owner's request."""
    last: threading.Event = field(default_factory=threading.Event)
    """Leave after the current outer step, at the owner's request; at once if the trainer does not train."""
    over: threading.Event = field(default_factory=threading.Event)
    """The final gossip is over: the weights are final, and newcomers can have them until the peer leaves."""
    finished: threading.Event = field(default_factory=threading.Event)


class Hooks(Protocol):
    """What the loop calls."""

    def inner_step_done(self) -> None: ...

    def outer_step_done(self) -> None: ...

    def training_ended(self) -> None:
        """Called at the run's end, before the final gossip."""

    def held(self, is_held: bool) -> None:
        """Called with True when the trainer stops in the middle of the run, with False when it resumes."""

    def turned(self) -> None:
        """Called after each turn of the loop: everything delivered before the turn is applied."""

    def leaving(self) -> None:
        """Called when the owner wants to leave, before the farewell, which may take long."""

    def conclude(self) -> None:
        """Called after the final gossip, before the farewell, so that newcomers can have the weights meanwhile."""

    @property
    def is_due(self) -> bool:
        """Whether ``inner_step_done`` needs weights at rest: the trainer then begins no step before it."""


def train(learner: PeerLearner, signals: Signals, post: Callable[[Event], None], hooks: Hooks) -> None:
    """Train until the run's end, ``stop`` or ``last``; then apply the results of the final gossip until ``finished``.

    Args:
        post: passes an event to the protocol core; must return at once.
    """

    def tell(events: list[Event]) -> None:
        for event in events:
            post(event)
        hooks.turned()

    while not any(each.is_set() for each in (signals.begin, signals.stop, signals.last, signals.finished)):
        tell(learner.settle(wait_s=NAP_S))

    leaves, held = signals.last.is_set() and not signals.begin.is_set(), False
    if learner.ended and not leaves and not signals.stop.is_set():  # resumed after the end
        post(TrainingEnded(learner.step, learner.progress))

    def ends() -> bool:
        return signals.stop.is_set() or signals.finished.is_set()

    while not learner.ended and not leaves and (learner.is_ahead or not ends()):
        if held is signals.begin.is_set() and not learner.is_ahead:
            held = not held
            hooks.held(held)
        if held and signals.last.is_set():
            leaves = True
            continue
        idle = held or learner.is_waiting or learner.is_away
        runs_ahead = signals.begin.is_set() and not ends() and not signals.last.is_set() and not hooks.is_due
        events = learner.settle(wait_s=NAP_S) if idle else learner.advance(runs_ahead)
        if any(isinstance(event, OuterStepDone) for event in events):
            hooks.outer_step_done()
            leaves = signals.last.is_set()
        if not idle and not learner.is_away:
            hooks.inner_step_done()
        if learner.ended:
            hooks.training_ended()
        tell(events)

    has_concluded = said_goodbye = False
    while not signals.finished.is_set():
        if signals.over.is_set() and not has_concluded and not said_goodbye:
            has_concluded = True
            tell(learner.settle())  # the last exchanges
            hooks.conclude()
            post(LeaveRequested(gives_on=True))
        if (signals.stop.is_set() or signals.last.is_set()) and not said_goodbye:
            said_goodbye = True
            hooks.leaving()
            post(LeaveRequested())
        tell(learner.settle(wait_s=NAP_S))
    tell(learner.settle())
