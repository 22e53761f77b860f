"""Fast weights on a card, with doubles: what partners get and what displacements do is as on the host."""

import pytest
import torch
from late import LateCopies
from streams import CUDA, LazyStreams, lazy_streams

from p2ptrain import codec
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm.events import Applied, Commit, ExchangeDue, OuterStepDone
from p2ptrain.train import fast_weights
from p2ptrain.train.device_copies import CudaCopies
from p2ptrain.train.fast_weights import FastWeights
from p2ptrain.train.learner import Learner
from p2ptrain.train.rules import LearnerRules
from sim.learners import QuadraticTask

__all__ = ["lazy_streams"]

P, H = 3000, 8


def learner(seed=1, recipe="swarm") -> Learner:
    """Return a learner whose exchange is due after the fourth of eight inner steps; it also shows the second's end."""
    generator = torch.Generator().manual_seed(seed)
    task = QuadraticTask(torch.rand(P, generator=generator), torch.randn(P, generator=generator), 0.1)
    rules = LearnerRules(H, 1e9, OuterRule(0.7, 0.9), RECIPES[recipe])
    return Learner(task, rules, slices(P, 2), codec.get("fp32"), MemoryLog())


@pytest.fixture(params=[True, False], ids=["large card", "small card"])
def late_learner(monkeypatch, request):
    """Return ``late_learner(**how)``: a learner whose weights are on a double of a card, and that double."""

    def build(**how):
        double = LateCopies()
        with monkeypatch.context() as patch:
            patch.setattr(fast_weights, "copies_of", lambda device: double)
            patch.setattr(fast_weights, "holds_slow", lambda device, size_bytes: request.param)
            return learner(**how), double

    return build


def shown(each: Learner) -> torch.Tensor:
    return torch.cat(each.payloads.published.parts)


def give(other: Learner, *learners: Learner) -> None:
    """Deliver the displacement of an exchange between the first of the learners and another one to all of them."""
    mine, theirs = (each.payloads.encode((0, 1)) for each in (learners[0], other))
    difference = learners[0].payloads.difference(mine, theirs.parts)
    for each in learners:
        each.inbox.deliver(commit(), difference)


def commit() -> Commit:
    return Commit(LinkId(PeerId("amber"), 1, outbound=True), 0.0, 0.5, float("inf"), False, 0, 0)


def test_a_copy_is_published_when_it_has_arrived_and_then_its_exchange_is_due(late_learner):
    each, double = late_learner()
    before = shown(each)
    for _ in range(3):
        each.advance()
        double.arrive()
    seconds = shown(each)
    assert not torch.equal(seconds, before)
    assert each.advance() == []
    theta = each.task.theta.clone()
    assert each.advance() == []  # the copy is on its way, so the exchange is not due
    assert torch.equal(shown(each), seconds)
    double.arrive()
    assert each.advance() == [ExchangeDue()]
    assert torch.equal(shown(each), theta)
    assert double.waits == []


def test_a_paused_trainer_shows_what_is_on_its_way(late_learner):
    each, _ = late_learner()
    for _ in range(4):
        each.advance()
    each.inbox.wake()
    assert each.settle(wait_s=60.0) == [ExchangeDue()]
    assert torch.equal(shown(each), each.task.theta)


def test_displacements_follow_the_copy_that_was_made_before_them(late_learner):
    prompt, (late, _) = learner(), late_learner()
    for _ in range(4):
        prompt.advance()
        late.advance()
    give(learner(seed=2), prompt, late)
    for each in (prompt, late):
        assert [type(event) for event in each.settle()][-1] is Applied
    assert torch.equal(late.task.theta, prompt.task.theta)
    assert torch.equal(shown(late), shown(prompt))
    assert torch.equal(late.slow, prompt.slow)


def test_a_copy_does_not_outlive_its_phase_or_the_weights_that_a_checkpoint_replaces(late_learner):
    each, double = late_learner()
    for _ in range(H):
        each.advance()
    assert torch.equal(shown(each), each.slow)
    double.arrive()
    each.settle()
    assert torch.equal(shown(each), each.slow)
    saved = each.state_dict()
    whole = {name: torch.cat(list(part)) if isinstance(part, list) else part.clone() for name, part in saved[0].items()}
    for _ in range(2):
        each.advance()
    each.load_state_dict(whole, saved[1])
    assert torch.equal(shown(each), each.slow)
    double.arrive()
    each.settle()
    assert torch.equal(shown(each), each.slow)


@pytest.mark.parametrize("recipe", ["swarm", "swarm_slow", "noloco", "diloco", "gasloc"])
def test_training_on_a_card_is_as_on_the_host(late_learner, recipe):
    prompt, (late, _) = learner(recipe=recipe), late_learner(recipe=recipe)
    other = learner(seed=2, recipe=recipe)
    for step in range(3 * H):
        events = []
        if step % 5 == 3 and recipe in ("swarm", "swarm_slow"):
            give(other, prompt, late)
        for each in (prompt, late):
            events.append(each.advance())
            if each.is_waiting:
                each.inbox.proceed(each.step + 1)
                each.settle()
        assert torch.equal(late.task.theta, prompt.task.theta)
        assert [e for e in events[0] if isinstance(e, OuterStepDone)] == [
            e for e in events[1] if isinstance(e, OuterStepDone)
        ]
        assert late._weights.distance() == pytest.approx(prompt._weights.distance(), rel=1e-5, abs=1e-5)
    assert torch.equal(late.slow, prompt.slow)
    assert late.step == prompt.step == 3
    resumed, _ = late_learner(recipe=recipe)
    tensors, numbers = late.state_dict()
    whole = {name: torch.cat(list(each)) if isinstance(each, list) else each.clone() for name, each in tensors.items()}
    resumed.load_state_dict(whole, numbers)
    assert resumed._weights.distance() == pytest.approx(late._weights.distance())


def test_weights_of_a_phase_that_broke_on_the_card_are_shown_to_nobody(late_learner):
    each, _ = late_learner()
    each.advance()
    before = shown(each)
    each.task.theta[5] = torch.nan
    for _ in range(3):
        each.advance()
    each.inbox.wake()
    each.settle(wait_s=60.0)
    assert torch.equal(shown(each), before)
    while each.step == 0:
        each.advance()
    assert each._notebook.kinds() == ["discarded"]


def test_the_order_of_streams_is_right_whatever_the_card_does_first(lazy_streams: LazyStreams):
    """Show, displace and go on training while no stream has run; each copy has the weights of its own moment."""
    task = QuadraticTask(torch.zeros(4), torch.ones(4), 0.1)
    fast = FastWeights(task, slices(4, 1, 1))
    fast._copies, fast._slow = CudaCopies(CUDA), task.theta.clone()
    with lazy_streams:
        task.theta.add_(1.0)
        first = fast.copy()
        fast.displace(0, torch.full((4,), 2.0), torch.full((4,), 0.5))
        second = fast.copy()
        task.theta.mul_(10.0)
        parts = second.parts, first.parts
        distances = [each.distances.wait()[0] for each in (first, second)]
    assert [part[0].tolist() for part in parts] == [[3.0] * 4, [1.0] * 4]
    assert [each.item() for each in distances] == [2.0, 5.0]
    lazy_streams.compute.finish()
    assert task.theta.tolist() == [30.0] * 4


def test_fragments_are_copied_one_ahead(late_learner):
    each, double = late_learner()
    count = len(double.events)
    parts = each._weights.fast
    first = next(parts)
    assert [event.name for event in double.events[count:]] == ["snapshot 0", "snapshot 1"]
    assert double.waits[-1:] == ["snapshot 0"]
    assert torch.equal(torch.cat([first, *parts]), each.task.theta)
