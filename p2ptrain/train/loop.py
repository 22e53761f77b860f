"""The training loop of one peer, top to bottom. Runs in the main thread, which is torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from p2ptrain.swarm.events import Event, LeaveRequested, OuterStepDone, TrainingEnded
from p2ptrain.train.learner import Learner

NAP_S = 60.0
"""A waiting trainer looks around this often even when nothing wakes it."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What others tell the trainer. Set one, then ``learner.wake()``."""

    begin: threading.Event = field(default_factory=threading.Event)
    """The swarm was found, or there is none: train. Cleared, it stops the trainer after the inner step under way."""
    stop: threading.Event = field(default_factory=threading.Event)
    """The owner wants to leave: end after the inner step under way."""
    last: threading.Event = field(default_factory=threading.Event)
    """The owner wants to leave: end after the outer step under way; at once where the trainer does not train."""
    finished: threading.Event = field(default_factory=threading.Event)
    """The network side has nothing more to do."""


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """What happens once in a while, in the trainer thread."""

    inner_step_done: Callable[[], None]
    outer_step_done: Callable[[], None]
    training_ended: Callable[[], None]
    """At the run's end, before the final gossip."""
    held: Callable[[bool], None] = _nothing
    """The trainer stopped in the middle of the run (true), and goes on (false)."""
    turned: Callable[[], None] = _nothing
    """After each turn of the loop: what was delivered before its beginning is applied."""
    leaving: Callable[[], None] = _nothing
    """The owner wants to leave, and the goodbye, which may take long, has not begun."""


def train(learner: Learner, signals: Signals, post: Callable[[Event], None], hooks: Hooks) -> None:
    """Train until the run's end, ``stop`` or ``last``; then take in what the final gossip brings until ``finished``.

    Args:
        post: hands an event to the protocol core; returns at once.
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

    while not learner.ended and not leaves and not signals.stop.is_set() and not signals.finished.is_set():
        if held is signals.begin.is_set():
            held = not held
            hooks.held(held)
        if held and signals.last.is_set():
            leaves = True
            continue
        idle = held or learner.is_waiting
        events = learner.settle(wait_s=NAP_S) if idle else learner.advance()
        if any(isinstance(event, OuterStepDone) for event in events):
            hooks.outer_step_done()
            leaves = signals.last.is_set()
        if not idle:
            hooks.inner_step_done()
        if learner.ended:
            hooks.training_ended()
        tell(events)

    said_goodbye = False
    while not signals.finished.is_set():
        if (signals.stop.is_set() or signals.last.is_set()) and not said_goodbye:
            said_goodbye = True
            hooks.leaving()
            post(LeaveRequested())
        tell(learner.settle(wait_s=NAP_S))
    tell(learner.settle())
