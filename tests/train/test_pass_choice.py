"""The choice among ways to compute micro-batches: the fastest is kept, and one that fails costs one step's time."""

import contextlib
import math

import pytest
import torch

from p2ptrain.train.compiled_pass import GAIN, PAIRS, CompiledPassError, PassChoice, compile_choice


def run(task, steps, start=0):
    tokens = task._training.tokens_per_step
    return [task.inner_step((start + step) * tokens).loss for step in range(steps)]


class FakePass:
    """Computes a part by the eager pass and counts; fails from its ``failing``-th call on, with half of it done."""

    def __init__(self, task, size: int, failing: float = math.inf) -> None:
        self.task, self.size, self.failing = task, size, failing
        self.calls = 0

    def takes(self, part):
        return len(part) == self.size

    def run(self, part):
        self.calls += 1
        loss = self.task._eager_pass(part)
        if self.calls >= self.failing:
            raise CompiledPassError("no memory")
        return loss


class Chosen:
    """A choice on a task with what it reported, and a clock by which each way takes its own time."""

    def __init__(self, task, compiled: FakePass, eager_s: float = 2.0, compiled_s: float = 1.0) -> None:
        self.ratios: list[float | None] = []
        self.ways: list[str] = []
        self.failures: list[str] = []
        self._costs, self._readings = (eager_s, compiled_s), []
        self._compiled = compiled
        task.passes = PassChoice({"fake": compiled}, self.decided, self.failures.append, self.clock)

    def decided(self, way: str, ratio: float | None) -> None:
        self.ways.append(way)
        self.ratios.append(ratio)

    def clock(self) -> float:
        self._readings.append(self._compiled.calls)
        if len(self._readings) % 2:
            self._at = 0.0
        else:
            self._at = self._costs[self._readings[-1] > self._readings[-2]]
        return self._at


@pytest.mark.parametrize(
    ("eager_s", "compiled_s", "ratio"),
    [
        ([1.2, 1.2, 1.2], [1.0, 1.0, 1.0], 1.2),
        ([1.2, 9.0, 1.2], [1.0, 1.0, 5.0], 1.2),  # another program disturbed two of the three
        ([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], 2.0),  # the machine slows down: pairs still agree
        ([GAIN], [1.0], GAIN),
        ([1.02], [1.0], None),
        ([1.0], [1.5], None),
    ],
)
def test_the_median_pair_decides(eager_s, compiled_s, ratio):
    assert compile_choice(eager_s, compiled_s) == (None if ratio is None else pytest.approx(ratio))


def test_real_micro_batches_alternate_until_the_faster_way_is_kept(tiny_run):
    tiny = tiny_run()
    eager, task = tiny.task(), tiny.task()
    fake = FakePass(task, size=4)
    chosen = Chosen(task, fake)
    steps = 2 * (PAIRS + 1)
    assert run(task, steps) == run(eager, steps)
    assert (chosen.ways, chosen.ratios) == (["fake"], [2.0])
    assert fake.calls == PAIRS + 1
    run(task, 5, start=steps)
    run(eager, 5, start=steps)
    assert fake.calls == PAIRS + 1 + 5
    assert torch.equal(task.theta, eager.theta)


def test_a_slower_library_is_not_used(tiny_run):
    task = tiny_run().task()
    fake = FakePass(task, size=4)
    chosen = Chosen(task, fake, eager_s=1.0, compiled_s=1.0)
    run(task, 2 * (PAIRS + 1) + 5)
    assert chosen.ratios == [None]
    assert fake.calls == PAIRS + 1
    assert not task.passes._candidates  # nor does it hold memory


def test_a_micro_batch_of_another_size_is_computed_eagerly(tiny_run):
    tiny = tiny_run(training__sequences_per_step=5)
    task = tiny.task(micro_batch=3)  # 3 and 2
    fake = FakePass(task, size=3)
    Chosen(task, fake)
    run(task, 4 * (PAIRS + 1))
    assert fake.calls < 4 * (PAIRS + 1)


def test_a_library_offered_when_memory_ran_short_is_not_used(tiny_run):
    task = tiny_run().task()
    fake = FakePass(task, size=4)
    Chosen(task, fake)
    task._recomputes = True  # after the compiler's thread looked, and before it set the pass
    run(task, 3)
    assert fake.calls == 0


@pytest.mark.parametrize("failing", [1, PAIRS + 4])
def test_after_a_failure_the_same_step_is_made_eagerly(tiny_run, failing):
    tiny = tiny_run()
    eager, task = tiny.task(micro_batch=2), tiny.task(micro_batch=2)
    fake = FakePass(task, size=2, failing=failing)
    chosen = Chosen(task, fake)
    steps = 2 * PAIRS
    assert run(task, steps) == run(eager, steps)
    assert torch.equal(task.theta, eager.theta)
    assert chosen.failures == ["no memory"]
    assert fake.calls == failing


class SeveralWays:
    """Candidates of which each, like the eager pass, takes its own time; reports what was computed how."""

    def __init__(self, costs: dict[str, float], failing: dict[str, int]) -> None:
        self.now, self.costs, self.failing = 0.0, costs, dict(failing)
        self.order: list[str] = []
        self.decisions: list[tuple[str, float | None]] = []
        self.failures: list[str] = []
        self.choice = PassChoice(
            {name: self.way(name) for name in costs if name != "eager"},
            lambda way, ratio: self.decisions.append((way, ratio)),
            self.failures.append,
            lambda: self.now,
        )

    def way(self, name: str):
        outer = self

        class Way:
            def takes(self, part):
                return len(part) == 4

            def run(self, part):
                return outer.compute(name, part)

        return Way()

    def compute(self, name, part):
        self.order.append(name)
        self.now += self.costs[name]
        if self.order.count(name) == self.failing.get(name):
            raise CompiledPassError(f"{name} failed")
        return part.sum()

    def step(self, times: int) -> None:
        for _ in range(times):
            with contextlib.suppress(CompiledPassError):
                self.choice.run(torch.ones(4), lambda part: self.compute("eager", part))


def test_the_fastest_of_several_is_kept_and_the_others_are_dropped():
    ways = SeveralWays({"compiled": 2.0, "graphed": 1.0, "eager": 3.0}, {})
    ways.step(3 * (PAIRS + 1) - 1)
    assert ways.order[:4] == ["compiled", "graphed", "eager", "compiled"]
    assert ways.decisions == []
    ways.step(1)
    assert ways.decisions == [("graphed", 3.0)]
    ways.step(5)
    assert ways.order[-5:] == ["graphed"] * 5
    assert list(ways.choice._candidates) == ["graphed"]


def test_one_of_several_that_fails_leaves_the_choice_to_the_others():
    ways = SeveralWays({"compiled": 2.0, "graphed": 1.0, "eager": 3.0}, {"graphed": 2})
    ways.step(3 * (PAIRS + 1))
    assert ways.decisions == [("compiled", 1.5)]
    assert ways.failures == []
    assert ways.order.count("graphed") == 2


def test_the_last_that_fails_is_reported():
    ways = SeveralWays({"compiled": 2.0, "graphed": 1.0, "eager": 3.0}, {"graphed": 2, "compiled": 4})
    ways.step(3 * (PAIRS + 1))
    assert (ways.failures, ways.decisions) == (["compiled failed"], [])
    assert ways.order[-1] == "eager"
    used = SeveralWays({"graphed": 1.0, "eager": 3.0}, {"graphed": PAIRS + 5})
    used.step(3 * (PAIRS + 1))
    assert (used.decisions, used.failures) == ([("graphed", 3.0)], ["graphed failed"])
