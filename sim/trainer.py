"""The trainer of a simulated peer: inner steps that take time, one after another.

A step's work is done at the instant the step ends. Trainers whose steps end at the same instant are served together, so
that a learner can batch them (``StepBatcher``). A learner without weights tells how many steps pass before the next one
that does more than count; these pass in one event, and are counted one by one if something arrives in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isnan, nan

from p2ptrain.host.keeper import Keeper
from p2ptrain.host.learner import Learner
from p2ptrain.swarm.events import Event, OuterStepDone
from sim.counting import CountingLearner
from sim.world import World

SimulatedLearner = Learner | CountingLearner | Keeper
"""A peer's learner. Its payloads, differences and weights are opaque to the simulator."""


class StepBatcher:
    """Ends inner steps at their times; steps that end at the same instant end together."""

    def __init__(self, world: World, prepare: Callable[[list[SimulatedTrainer]], None] | None = None) -> None:
        self.world = world
        self._prepare = prepare
        """Called with all trainers whose inner step ends now, after they have settled and before they step."""
        self.on_outer_step: Callable[[], None] | None = None
        """Called after every outer step."""
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
    """Trainer of one simulated peer.

    Args:
        step_s: returns the seconds of the next inner step.
        handle: called with each event of the learner.
    """

    step_batcher: StepBatcher
    learner: SimulatedLearner
    step_s: Callable[[], float]
    handle: Callable[[Event], None]
    begun: bool = False
    stopped: bool = False
    frozen: bool = False
    compute_s: float = 0.0
    """Seconds spent on inner steps."""
    frozen_s: float = 0.0
    begun_at: float = nan
    ended_at: float = nan
    counting: CountingLearner | None = field(init=False)
    """The learner, if it tells which inner steps only count; otherwise each is an event, even after training ended."""
    _ends: list[float] = field(default_factory=list)
    """End times of the inner steps under way."""
    _lasting: list[float] = field(default_factory=list)
    """Durations of the inner steps under way, seconds."""
    _due: float = inf
    """Entry of ``_ends`` that is served next."""
    _rests_since: float | None = None
    """Time since which no step is scheduled because training has ended; arrivals wait for the end of a virtual step."""

    def __post_init__(self) -> None:
        self.counting = self.learner if isinstance(self.learner, CountingLearner) else None

    @property
    def is_training(self) -> bool:
        return self.begun and not self.learner.ended

    def begin(self) -> None:
        self.begun = True
        self.begun_at = self.step_batcher.world.now

    def stop(self) -> None:
        """Stop: no further step ends."""
        self.catch_up()
        self.stopped = True
        self._end()

    def utilization(self, now: float) -> float | None:
        """Return seconds of inner steps per second available for them; None before training began."""
        lasted = (now if isnan(self.ended_at) else self.ended_at) - self.begun_at - self.frozen_s
        return min(self.compute_s / lasted, 1.0) if lasted > 0 else None

    def is_due(self, time: float) -> bool:
        return time == self._due and not self.stopped

    def start(self) -> None:
        if self.counting is not None and self.learner.ended:
            self._rests_since = self.step_batcher.world.now
            return
        count = self.counting.steps_ahead() if self.counting is not None and self.is_training else 1
        time = self.step_batcher.world.now
        for _ in range(count):
            seconds = self.step_s()
            time += seconds
            self._ends.append(time)
            self._lasting.append(seconds)
        self._serve_at(time)

    def settle(self) -> None:
        self._take(self.learner.settle())

    def end_step(self) -> None:
        """End the current step, do its work and begin the next one."""
        self._do(bisect_right(self._ends, self.step_batcher.world.now))
        if self.stopped or self.learner.is_waiting:
            return
        if self._ends:
            self._serve_at(self._ends[-1])
        else:
            self.start()

    def go_on(self) -> None:
        """Resume if the learner was waiting and has now received what it waited for."""
        was_waiting = self.learner.is_waiting
        self._take(self.learner.settle())
        if was_waiting and not self.stopped and not self.learner.is_waiting:
            self.start()

    def catch_up(self) -> None:
        """Do the work of all steps that have ended by now; these only count, or they would have been served."""
        if len(self._ends) > 1 and not self.frozen:
            self._do(bisect_right(self._ends, self.step_batcher.world.now, hi=len(self._ends) - 1))

    def interrupt(self) -> None:
        """Make the current step end separately, because a delivery to the learner is about to arrive."""
        self.catch_up()
        if self._rests_since is not None:
            end, self._rests_since = self._rests_since, None
            while end <= self.step_batcher.world.now:
                seconds = self.step_s()
                end += seconds
            self._ends, self._lasting = [end], [seconds]
        if self._ends and self._due != self._ends[0]:
            self._serve_at(self._ends[0])

    def freeze(self) -> None:
        self.catch_up()
        self.frozen, self._due = True, inf

    def thaw(self, seconds: float) -> None:
        """Resume after a suspend of ``seconds``."""
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
            if type(event) is OuterStepDone and self.step_batcher.on_outer_step is not None:
                self.step_batcher.on_outer_step()
        if self.learner.ended:
            self._end()

    def _end(self) -> None:
        if isnan(self.ended_at):
            self.ended_at = self.step_batcher.world.now

    def _serve_at(self, time: float) -> None:
        self._due = time
        self.step_batcher.at(time, self)
