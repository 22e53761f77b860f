"""The trainer thread of a simulated peer: inner steps that take time, one after the other.

A step's work is done at the instant it ends. Trainers whose steps end at the same instant are served together, so that
a learner that can batch them may (``StepBatcher``). A learner that only counts tells how many steps lie before the next
one that matters; these are passed in one event, and made up for when something arrives in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from math import inf, isnan, nan
from typing import Any, Protocol

from p2ptrain.base.ids import LinkId
from p2ptrain.sim.world import World
from p2ptrain.swarm import Terms
from p2ptrain.swarm.events import Event, OuterStepDone


class SimulatedPayloads(Protocol):
    """What a learner's partners get of it: ``train.payloads.Payloads``, or what counts in its place."""

    published: Any
    """What partners may have now; the trainer replaces it."""

    def wishes(self, fragments: Sequence[int], snapshot: Any) -> Sequence[Any]: ...

    def wish_sizes(self, fragments: Sequence[int]) -> list[int]: ...

    def encode(self, fragments: Sequence[int], mine: Sequence[Any], theirs: Sequence[Any], snapshot: Any) -> Any: ...

    def difference(self, mine: Any, theirs: Sequence[Any]) -> Any: ...

    def weights(self) -> Sequence[Sized]: ...


class SimulatedInbox(Protocol):
    """The queue of results that the simulator fills and the learner empties (``train.inbox``)."""

    def deliver(self, link: LinkId, difference: Any, mine: Terms, theirs: Terms, progress: float) -> None: ...

    def proceed(self, step: int) -> None: ...

    def adopt(self, link: LinkId, step: int, progress: float, parts: Sequence[Any]) -> None: ...


class SimulatedLearner(Protocol):
    """What the simulator asks of a learner: ``train.Learner``, or ``sim.counting.CountingLearner`` in its place.

    Payloads, differences and weights are the learner's own business; the simulator hands them from one to the other.
    """

    step: int
    progress: float
    tokens: int
    loss: float
    ended: bool

    @property
    def is_waiting(self) -> bool: ...

    @property
    def payloads(self) -> SimulatedPayloads: ...

    @property
    def inbox(self) -> SimulatedInbox: ...

    def advance(self) -> list[Event]: ...

    def settle(self) -> list[Event]: ...


class Counting(Protocol):
    """What a learner offers besides when most of its inner steps only count."""

    def steps_ahead(self) -> int:
        """How many inner steps there are up to the next that does more, that one included."""

    def count(self, steps: int) -> None:
        """Make so many of those that only count."""


class StepBatcher:
    """Ends inner steps at their times; those of one instant together."""

    def __init__(self, world: World, prepare: Callable[[list[SimulatedTrainer]], None] | None = None) -> None:
        self.world = world
        self._prepare = prepare
        """Told of all trainers whose inner step ends now, after they have taken in what came and before they step."""
        self.on_outer_step: Callable[[], None] | None = None
        """Told of every outer step."""
        self._due: dict[float, dict[SimulatedTrainer, None]] = {}

    def at(self, time: float, trainer: SimulatedTrainer) -> None:
        trainers = self._due.get(time)
        if trainers is None:
            self._due[time] = {trainer: None}
            self.world.at(time, self._beat, time)
        else:
            trainers[trainer] = None

    def _beat(self, time: float) -> None:
        trainers = [trainer for trainer in self._due.pop(time) if trainer.is_due(time)]
        if self._prepare is not None and len(trainers) > 1:
            for trainer in trainers:
                trainer.settle()
            self._prepare([trainer for trainer in trainers if trainer.is_training])
        for trainer in trainers:
            trainer.end_step()


@dataclass(slots=True, eq=False)
class SimulatedTrainer:
    """One peer's inner steps.

    Args:
        step_s: seconds of the next inner step.
        handle: takes in what the learner has to say.
        counting: the learner, if it can tell which inner steps only count; if not, each of them is an event, also when
            there is no more training.
    """

    metronome: StepBatcher
    learner: SimulatedLearner
    step_s: Callable[[], float]
    handle: Callable[[Event], None]
    counting: Counting | None = None
    begun: bool = False
    stopped: bool = False
    frozen: bool = False
    compute_s: float = 0.0
    """Seconds spent on inner steps."""
    frozen_s: float = 0.0
    begun_at: float = nan
    ended_at: float = nan
    _ends: list[float] = field(default_factory=list)
    """When the inner steps under way end, ..."""
    _lasting: list[float] = field(default_factory=list)
    """... and how long each takes."""
    _due: float = inf
    """Which of these ends is the next to be served."""
    _rests_since: float | None = None
    """Training has ended; what comes is taken in at the end of a step that was never scheduled."""

    @property
    def is_training(self) -> bool:
        return self.begun and not self.learner.ended

    def begin(self) -> None:
        """The core lets training begin: with the step that is under way."""
        self.begun = True
        self.begun_at = self.metronome.world.now

    def stop(self) -> None:
        """No further step ends."""
        self.catch_up()
        self.stopped = True
        self._end()

    def utilization(self, now: float) -> float | None:
        """Seconds of inner steps per second of the time that there was for them; None before it began."""
        lasted = (now if isnan(self.ended_at) else self.ended_at) - self.begun_at - self.frozen_s
        return min(self.compute_s / lasted, 1.0) if lasted > 0 else None

    def is_due(self, time: float) -> bool:
        return time == self._due and not self.stopped

    def start(self) -> None:
        """Begin the next steps."""
        if self.counting is not None and self.learner.ended:
            self._rests_since = self.metronome.world.now
            return
        count = self.counting.steps_ahead() if self.counting is not None and self.is_training else 1
        time = self.metronome.world.now
        for _ in range(count):
            seconds = self.step_s()
            time += seconds
            self._ends.append(time)
            self._lasting.append(seconds)
        self._serve_at(time)

    def settle(self) -> None:
        """Take in what came."""
        self._take(self.learner.settle())

    def end_step(self) -> None:
        """A step ends now: do what it does, and begin the next."""
        self._do(bisect_right(self._ends, self.metronome.world.now))
        if self.stopped or self.learner.is_waiting:
            return
        if self._ends:
            self._serve_at(self._ends[-1])
        else:
            self.start()

    def go_on(self) -> None:
        """What the learner may wait for has come: if it did wait, the next steps begin now."""
        was_waiting = self.learner.is_waiting
        self._take(self.learner.settle())
        if was_waiting and not self.stopped and not self.learner.is_waiting:
            self.start()

    def catch_up(self) -> None:
        """Do what the steps do that have ended by now; they only count, or they would have been served."""
        if len(self._ends) > 1 and not self.frozen:
            self._do(bisect_right(self._ends, self.metronome.world.now, hi=len(self._ends) - 1))

    def interrupt(self) -> None:
        """Something is about to come for the learner: it takes it in at the end of the step that it is in."""
        self.catch_up()
        if self._rests_since is not None:
            end, self._rests_since = self._rests_since, None
            while end <= self.metronome.world.now:
                seconds = self.step_s()
                end += seconds
            self._ends, self._lasting = [end], [seconds]
        if self._ends and self._due != self._ends[0]:
            self._serve_at(self._ends[0])

    def freeze(self) -> None:
        """No step ends until ``thaw``."""
        self.catch_up()
        self.frozen, self._due = True, inf

    def thaw(self, seconds: float) -> None:
        """Go on where it stopped so many seconds ago."""
        self.frozen = False
        self.frozen_s += seconds if self.is_training else 0.0
        self._ends = [end + seconds for end in self._ends]
        if self._ends:
            self._serve_at(self._ends[0])

    def _do(self, steps: int) -> None:
        lasted = self._lasting[:steps]
        del self._ends[:steps], self._lasting[:steps]
        learner, training = self.learner, self.is_training
        if self.counting is not None and training:
            only_count = min(self.counting.steps_ahead() - 1, steps)
            self.counting.count(only_count)
            for seconds in lasted[:only_count]:
                self.compute_s += seconds
            del lasted[:only_count]
        for seconds in lasted:
            if training:
                self.compute_s += seconds
                events = learner.advance()
            else:
                events = learner.settle()
            if events:
                self._take(events)
                training = self.is_training

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self.handle(event)
            if type(event) is OuterStepDone and self.metronome.on_outer_step is not None:
                self.metronome.on_outer_step()
        if self.learner.ended:
            self._end()

    def _end(self) -> None:
        if isnan(self.ended_at):
            self.ended_at = self.metronome.world.now

    def _serve_at(self, time: float) -> None:
        self._due = time
        self.metronome.at(time, self)
