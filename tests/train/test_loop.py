"""The training loop with a minimal learner: the effects of the signals begin, hold, last and stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from p2ptrain.host.learner import Learner
from p2ptrain.host.loop import Signals, train
from p2ptrain.swarm.events import Event, LeaveRequested, OuterStepDone, TrainingEnded

H = 3
END = 4
"""Number of outer steps."""


class Steps:
    """The part of a learner that the loop uses. Each inner step and each wait may change the signals."""

    def __init__(self, signals: Signals, ended_before: bool = False) -> None:
        self.signals = signals
        self.inner = self.step = self.waits = 0
        self.progress = 0.0
        self.ended = ended_before
        self.is_waiting = self.is_away = self.is_ahead = False
        self.at_step: dict[int, Callable[[], None]] = {}
        self.at_wait: dict[int, Callable[[], None]] = {}

    def advance(self, runs_ahead: bool = False) -> list[Event]:
        self.inner += 1
        self.at_step.get(self.inner, lambda: None)()
        if self.inner % H:
            return []
        self.step += 1
        self.ended = self.step == END
        events: list[Event] = [OuterStepDone(self.step, 0.0, H)]
        return [*events, TrainingEnded(self.step, 0.0)] if self.ended else events

    def settle(self, wait_s: float = 0.0) -> list[Event]:
        if wait_s:
            self.waits += 1
            assert self.waits < 100, "the loop waits for ever"
            self.at_wait.get(self.waits, lambda: None)()
        return []


class Scene:
    """A loop whose network side ends as soon as it is asked to, and the events that it received."""

    def __init__(self, **how: Any) -> None:
        self.signals = Signals()
        self.steps = Steps(self.signals, **how)
        self.posted: list[str] = []
        self.holds: list[tuple[bool, int]] = []
        self.turns = 0
        self.left: list[tuple[int, list[str]]] = []
        """The outer step at which leaving was announced, and the events before it."""
        self.concludes: Callable[[], None] | None = None
        """What happens while the final loss is read; None: the final gossip ends with everything else."""
        self.gives_on: list[bool] = []

    def post(self, event: Event) -> None:
        self.posted.append(type(event).__name__)
        if isinstance(event, TrainingEnded) and self.concludes is not None:
            self.signals.over.set()
        elif isinstance(event, LeaveRequested | TrainingEnded):
            self.signals.finished.set()
        if isinstance(event, LeaveRequested):
            self.gives_on.append(event.gives_on)

    is_due = False

    def inner_step_done(self) -> None: ...

    def outer_step_done(self) -> None: ...

    def training_ended(self) -> None: ...

    def turned(self) -> None:
        self.turns += 1

    def held(self, is_held: bool) -> None:
        self.holds.append((is_held, self.steps.inner))

    def leaving(self) -> None:
        self.left.append((self.steps.inner, list(self.posted)))

    def conclude(self) -> None:
        assert self.concludes is not None
        self.posted.append("concluded")
        self.concludes()

    def play(self) -> None:
        train(cast(Learner, self.steps), self.signals, self.post, self)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_it_begins_when_it_may_and_trains_to_the_end(scene: Scene) -> None:
    scene.steps.at_wait[3] = scene.signals.begin.set
    scene.play()
    assert scene.steps.inner == H * END
    assert scene.posted == ["OuterStepDone"] * END + ["TrainingEnded"]
    assert scene.holds == []
    assert scene.turns >= H * END + 3


def test_hold_stops_after_the_inner_step_and_begin_goes_on(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.steps.at_step[4] = scene.signals.begin.clear
    scene.steps.at_wait[5] = scene.signals.begin.set
    scene.play()
    assert scene.holds == [(True, 4), (False, 4)]
    assert scene.steps.inner == H * END


def test_last_ends_with_the_outer_step(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.steps.at_step[H + 1] = scene.signals.last.set
    scene.play()
    assert scene.steps.inner == 2 * H
    assert scene.posted == ["OuterStepDone"] * 2 + ["LeaveRequested"]


def test_last_at_the_end_of_an_outer_step_is_that_one(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.steps.at_step[H] = scene.signals.last.set
    scene.play()
    assert scene.steps.inner == H


def test_who_rests_has_no_step_to_end(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.steps.at_step[4] = scene.signals.begin.clear
    scene.steps.at_wait[2] = scene.signals.last.set
    scene.play()
    assert scene.steps.inner == 4
    assert scene.posted[-1] == "LeaveRequested"


def test_last_before_it_begins_leaves_without_a_step(scene: Scene) -> None:
    scene.steps.at_wait[1] = scene.signals.last.set
    scene.play()
    assert scene.steps.inner == 0
    assert scene.posted == ["LeaveRequested"]
    assert scene.holds == []


def test_stop_while_it_rests(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.steps.at_step[4] = scene.signals.begin.clear
    scene.steps.at_wait[2] = scene.signals.stop.set
    scene.play()
    assert scene.steps.inner == 4
    assert scene.posted[-1] == "LeaveRequested"


@pytest.mark.parametrize(("signal", "inner"), [("stop", H + 1), ("last", 2 * H)])
def test_what_comes_before_the_goodbye_is_called_once_and_before_it(scene: Scene, signal: str, inner: int) -> None:
    scene.signals.begin.set()
    scene.steps.at_step[H + 1] = getattr(scene.signals, signal).set
    scene.play()
    assert scene.left == [(inner, scene.posted[:-1])]
    assert scene.posted[-1] == "LeaveRequested"


def test_who_comes_to_the_end_by_itself_is_not_leaving(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.play()
    assert scene.left == []


def test_the_final_loss_is_read_after_the_gossip_and_before_the_goodbye(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.concludes = lambda: None
    scene.play()
    assert scene.posted[-3:] == ["TrainingEnded", "concluded", "LeaveRequested"]
    assert (scene.gives_on, scene.left) == ([True], [])


def test_an_owner_who_stops_while_the_final_loss_is_read_does_not_wait_for_newcomers(scene: Scene) -> None:
    scene.signals.begin.set()
    scene.concludes = scene.signals.stop.set
    scene.play()
    assert scene.posted[-3:] == ["concluded", "LeaveRequested", "LeaveRequested"]
    assert scene.gives_on == [True, False]


def test_resumed_after_the_end_only_the_gossip_is_left() -> None:
    scene = Scene(ended_before=True)
    scene.signals.begin.set()
    scene.play()
    assert scene.posted == ["TrainingEnded"]


def test_last_in_the_final_gossip_leaves_at_once() -> None:
    scene = Scene(ended_before=True)
    scene.signals.last.set()
    scene.play()
    assert scene.posted == ["LeaveRequested"]
