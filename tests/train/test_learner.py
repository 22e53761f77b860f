"""The learner: the outer algorithm around an inner task, and the effects of exchanges on it."""

import struct
import threading
from dataclasses import replace

import pytest
import torch
from stored import stored

from p2ptrain import codec
from p2ptrain.base.errors import RemoteError, TrainerAwayError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import REWARM_STEPS, Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import PeerState, Terms
from p2ptrain.swarm.events import Adopted, Applied, Commit, ExchangeDue, OuterStepDone, TrainingEnded, Unfit
from sim.learners import QuadraticTask

P = 3000
LINK = LinkId(PeerId("amber"), 1, outbound=True)
TERMS = Terms(1, 0.0, 1.0, float("inf"), True, PeerState.TRAINING)


def quadratic(seed: int = 0, noise: float = 0.1) -> QuadraticTask:
    random = torch.Generator().manual_seed(seed)
    curvature, optimum = 0.2 + torch.rand(P, generator=random), torch.randn(P, generator=random)
    return QuadraticTask(curvature, optimum, noise=noise, seed=seed)


def learner(task=None, *, inner_steps=4, tokens=1000.0, recipe="swarm", momentum=0.9, fragments=2, codec_name="fp32"):
    task = task or quadratic()
    rules = LearnerRules(inner_steps, tokens, OuterRule(0.7, momentum), RECIPES[recipe])
    return Learner(task, rules, slices(len(task.theta), fragments), codec.get(codec_name), MemoryLog())


def slow(each: Learner) -> torch.Tensor:
    return each.slow


def commit(mine: Terms, theirs: Terms, progress: float = 0.0) -> Commit:
    finished = PeerState.FINISHING in (mine.state, theirs.state)
    return Commit(LINK, progress, mine.share(theirs), min(mine.clip_radius, theirs.clip_radius), finished, 0, 0)


def exchange(one: Learner, other: Learner, fragments=(0, 1), progress: float = 0.0) -> None:
    """Make a whole exchange of the current snapshots, delivered to both and not yet applied."""
    snapshots = [each.payloads.current(fragments) for each in (one, other)]
    proposals = [each.payloads.proposals(fragments, shown) for each, shown in zip((one, other), snapshots, strict=True)]
    ours = one.payloads.encode(fragments, *proposals, snapshots[0])
    theirs = other.payloads.encode(fragments, *reversed(proposals), snapshots[1])
    states = [PeerState.FINISHING if each.ended else PeerState.TRAINING for each in (one, other)]
    mine, yours = (replace(TERMS, state=state) for state in states)
    one.inbox.deliver(commit(mine, yours, progress), one.payloads.difference(ours, theirs.parts))
    other.inbox.deliver(commit(yours, mine, -progress), other.payloads.difference(theirs, ours.parts))


def advance(steps: int, *learners: Learner) -> None:
    """Make so many inner steps of each."""
    for _ in range(steps):
        for each in learners:
            each.advance()


def settled(*learners: Learner) -> None:
    """Apply whatever was delivered."""
    for each in learners:
        each.settle()


def test_t8_one_peer_equals_torch_inside_and_outside_bitwise(tiny_run):
    """Check N = 1 against a plain loop: AdamW inside, torch.optim.SGD(nesterov) outside."""
    tiny = tiny_run()
    ours = learner(tiny.task(), inner_steps=3, tokens=1e9)
    for _ in range(12):
        ours.advance()

    reference = tiny.task()
    theta = reference.theta
    x = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True)
    progress = 0
    for _ in range(4):
        for _ in range(3):
            progress += reference.inner_step(float(progress)).tokens
        x.grad = x.detach() - theta
        sgd.step()
        theta.copy_(x.detach())
    assert torch.equal(ours.task.theta, theta)
    assert torch.equal(slow(ours), x.detach())


def test_t8_recipe_local_is_plain_inner_training_bitwise(tiny_run):
    tiny = tiny_run()
    ours = learner(tiny.task(), inner_steps=3, tokens=1e9, recipe="local")
    for _ in range(11):
        ours.advance()
    reference, progress = tiny.task(), 0
    for _ in range(11):
        progress += reference.inner_step(float(progress)).tokens
    assert torch.equal(ours.task.theta, reference.theta)


def test_t4_a_displacement_in_mid_phase_leaves_the_pseudo_gradient_alone():
    one, other = (learner(quadratic(seed), recipe="swarm_slow") for seed in (1, 2))
    advance(6, one, other)
    before = slow(one) - one.task.theta
    exchange(one, other)
    moved = slow(one).clone()
    assert [type(event) for event in one.settle()] == [Applied]
    assert not torch.equal(slow(one), moved)
    assert torch.allclose(slow(one) - one.task.theta, before, atol=1e-6)


def test_where_fast_weights_are_mixed_x_follows_in_part_and_the_pseudo_gradient_has_the_rest():
    one, other = learner(quadratic(1)), learner(quadratic(2))
    advance(6, one, other)
    x, theta = slow(one), one.task.theta.clone()
    dx = (other.task.theta - theta) / 2
    exchange(one, other)
    one.settle()
    assert dx.norm() > 1
    assert torch.allclose(one.task.theta, theta + dx, atol=1e-6)
    assert torch.allclose(slow(one), x + RECIPES["swarm"].follow * dx, atol=1e-6)


def test_between_two_that_ended_x_follows_wholly():
    one, other = (learner(quadratic(seed), tokens=8.0) for seed in (1, 2))
    advance(8, one, other)
    assert one.ended
    assert not torch.equal(slow(one), slow(other))
    exchange(one, other)
    settled(one, other)
    assert torch.allclose(slow(one), slow(other), atol=1e-6)
    assert torch.equal(slow(one), one.task.theta)


def test_t3_who_ended_and_who_still_trains_keep_their_mean():
    one, other = learner(quadratic(1), tokens=8.0), learner(quadratic(2))
    advance(10, one, other)
    mean, shown = (slow(one) + slow(other)) / 2, (one.task.theta + other.task.theta) / 2
    exchange(one, other)
    settled(one, other)
    assert torch.allclose((slow(one) + slow(other)) / 2, mean, atol=1e-6)
    assert torch.allclose((one.task.theta + other.task.theta) / 2, shown, atol=1e-6)
    assert torch.equal(slow(one), one.task.theta)


def test_t3_an_exchange_agreed_before_the_end_and_applied_after_it_keeps_the_mean():
    one, other = learner(quadratic(1), tokens=8.0), learner(quadratic(2))
    advance(6, one, other)
    ours, theirs = one.payloads.encode((0, 1)), other.payloads.encode((0, 1))
    late = one.payloads.difference(ours, theirs.parts)  # reaches the trainer after its last outer step
    other.inbox.deliver(commit(TERMS, TERMS), other.payloads.difference(theirs, ours.parts))
    for _ in range(2):
        one.advance()
    assert one.ended
    mean = (slow(one) + slow(other)) / 2
    one.inbox.deliver(commit(TERMS, TERMS), late)
    settled(one, other)
    assert torch.allclose((slow(one) + slow(other)) / 2, mean, atol=1e-6)
    assert torch.equal(slow(one), one.task.theta)


@pytest.mark.parametrize("recipe", ["swarm", "swarm_slow"])
@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8", "modular8", "modular4"])
def test_t3_an_exchange_keeps_the_mean(recipe, codec_name):
    one, other = (learner(quadratic(seed), recipe=recipe, codec_name=codec_name) for seed in (1, 2))
    advance(6, one, other)
    mean, fast_mean = (slow(one) + slow(other)) / 2, (one.task.theta + other.task.theta) / 2
    exchange(one, other)
    one.settle()
    other.settle()
    assert torch.allclose((slow(one) + slow(other)) / 2, mean, atol=1e-6)
    assert torch.allclose((one.task.theta + other.task.theta) / 2, fast_mean, atol=1e-6)


@pytest.mark.parametrize("recipe", ["swarm", "swarm_slow"])
@pytest.mark.parametrize("codec_name", ["fp32", "modular8"])
@pytest.mark.parametrize("applies", ["before", "amid", "after"])
def test_t3_an_exchange_after_another_that_is_not_applied_yet_keeps_the_mean(recipe, codec_name, applies):
    """Check that a snapshot contains the displacements committed before, even if training went on meanwhile."""
    peers = [learner(quadratic(seed), recipe=recipe, codec_name=codec_name, inner_steps=8) for seed in (1, 2, 3)]
    one, *others = peers
    advance(8, *peers)
    before = [[slow(each), each.task.theta.clone()] for each in peers]
    exchange(one, others[0])
    if applies == "before":
        one.settle()
    if applies == "amid":  # the trainer ends an inner step that began before the exchange
        moved = torch.randn(P, generator=torch.Generator().manual_seed(5))
        one.task.theta.add_(moved)
        before[0][1] += moved
        one.state.show(one.step)
    exchange(one, others[1])
    settled(*peers)
    for place in (0, 1):
        after = [slow(each) if place == 0 else each.task.theta for each in peers]
        assert torch.allclose(sum(after), sum(each[place] for each in before), atol=1e-5)
    shown = [torch.cat(each.payloads.current((0, 1)).parts) for each in (one, others[1])]
    if codec_name == "fp32" and recipe == "swarm":
        assert torch.allclose(*shown, atol=1e-6)  # the last exchange made them equal


def test_a_snapshot_contains_a_displacement_once_whenever_it_is_asked_for():
    one, other = (learner(quadratic(seed), recipe="swarm_slow") for seed in (1, 2))
    advance(6, one, other)
    assert one.payloads.current((0, 1)) is one.payloads.published
    exchange(one, other)
    pending = one.payloads.current((0, 1)).parts
    assert not torch.equal(pending[0], one.payloads.published.parts[0])
    assert torch.equal(one.payloads.current((1,)).parts[0], one.payloads.published.parts[0])  # only those asked for
    one.settle()
    assert one.payloads.current((0, 1)) is one.payloads.published
    assert all(map(torch.equal, pending, one.payloads.published.parts))


def test_an_adopting_peer_shows_nothing_of_the_displacements_that_it_drops():
    one, other = (learner(quadratic(seed), recipe="swarm_slow") for seed in (1, 2))
    advance(6, one, other)
    given = other.payloads.weights()
    one.inbox.adopt(LINK, 3, 12.0, [bytearray(part) for part in given])
    exchange(one, other)
    assert [type(event) for event in one.settle()] == [Applied, Adopted]
    assert one.payloads.current((0, 1)) is one.payloads.published
    assert torch.equal(slow(one), torch.cat(other.payloads.published.slow))


def test_a_recipe_that_waits_for_its_partners_shows_one_snapshot_to_all_of_them():
    one, other = (learner(quadratic(seed), recipe="factored_gossip_none_local") for seed in (1, 2))
    advance(4, one, other)
    assert one.is_waiting
    exchange(one, other, fragments=(2, 3))
    assert one.payloads.current((2, 3)) is one.payloads.published


def test_t5_a_lossless_exchange_of_equal_weights_makes_the_snapshots_equal():
    for recipe, weights in ("swarm_slow", slow), ("swarm", lambda each: each.task.theta):
        one, other = (learner(quadratic(seed), recipe=recipe) for seed in (1, 2))
        for _ in range(6):
            one.advance()
            other.advance()
        exchange(one, other)
        one.settle()
        other.settle()
        assert torch.allclose(weights(one), weights(other), atol=1e-6)


def test_fast_weights_are_shown_as_they_come_and_newcomers_get_the_slow_ones():
    rules = LearnerRules(16, 1e9, OuterRule(0.7, 0.5), RECIPES["swarm"], exchanges_per_step=3)
    each = Learner(quadratic(), rules, slices(P, 1), codec.get("fp32"), MemoryLog())
    for step in range(1, 17):
        each.advance()
        shown = torch.frombuffer(bytearray(each.payloads.encode((0,)).parts[0]), dtype=torch.float32)
        assert torch.equal(shown, each.task.theta) == (step in (3, 4, 8, 12, 14, 16))
        given = torch.frombuffer(bytearray(each.payloads.weights()[0]), dtype=torch.float32)
        assert torch.equal(given, slow(each))


class Watch:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTask(QuadraticTask):
    """A task whose inner step takes a second."""

    watch: Watch

    def inner_step(self, progress: float):
        self.watch.now += 1.0
        return super().inner_step(progress)


def watched(inner_steps: int, tokens: float = 1e9) -> tuple[Learner, Watch]:
    task, watch = TimedTask(torch.ones(P), torch.ones(P)), Watch()
    task.watch = watch
    rules = LearnerRules(inner_steps, tokens, OuterRule(0.7, 0.9), RECIPES["swarm_slow"])
    return Learner(task, rules, slices(P, 2), codec.get("fp32"), MemoryLog(), watch), watch


def takes(monkeypatch: pytest.MonkeyPatch, one: Learner, watch: Watch, seconds: float) -> None:
    """Let each displacement from now on take so long."""
    original = Learner._apply

    def slowly(self: Learner, ready: object) -> Applied:
        watch.now += seconds
        return original(self, ready)

    monkeypatch.setattr(one, "_apply", slowly.__get__(one))


def test_the_longest_wait_is_what_lay_between_two_inner_steps(monkeypatch):
    (one, watch), other = watched(100), learner(quadratic(2), recipe="swarm_slow")
    takes(monkeypatch, one, watch, 5.0)
    exchange(one, other)
    one.advance()  # before the first inner step nothing is blocked
    assert (one.blocked_s, one.longest_blocked_s, one.inner_step_s) == (5.0, 0.0, 1.0)
    takes(monkeypatch, one, watch, 0.25)
    for times in (1, 3, 2):
        for _ in range(times):
            exchange(one, other)
        one.advance()
    assert one.longest_blocked_s == 0.75  # three together
    assert one.blocked_s == 6.5


def test_what_is_applied_after_the_last_inner_step_holds_nobody_up(monkeypatch):
    (one, watch), other = watched(2, tokens=4.0), learner(quadratic(2), recipe="swarm_slow")
    while not one.ended:
        one.advance()
    takes(monkeypatch, one, watch, 5.0)
    exchange(one, other)
    one.settle()
    one.advance()
    assert one.blocked_s == 5.0
    assert one.longest_blocked_s == 0.0


def shown(each: Learner) -> torch.Tensor:
    return torch.cat(each.payloads.published.parts)


def test_what_was_displaced_is_shown_at_once_and_given_to_newcomers():
    one, other = (learner(quadratic(seed), inner_steps=16) for seed in (1, 2))
    advance(7, one, other)
    before = shown(one)
    assert not torch.equal(before, one.task.theta), "theta went on since it was shown"
    dx = (shown(other) - before) / 2
    exchange(one, other)
    one.settle()
    assert torch.allclose(shown(one), before + dx, atol=1e-6)
    given = torch.cat([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in one.payloads.weights()])
    assert torch.equal(given, slow(one))


def test_the_first_exchange_knows_how_wide_its_steps_must_be():
    """Check the exchange before the first outer step: the size of the weights does not tell how far peers are apart."""

    def far_out(seed: int) -> QuadraticTask:
        base, random = torch.logspace(4, -4, P), torch.Generator().manual_seed(seed)
        task = QuadraticTask(torch.full((P,), 0.2), base + torch.randn(P, generator=random), noise=0.1, seed=seed)
        task.theta.copy_(base)
        return task

    one, other = (learner(far_out(seed), inner_steps=8, codec_name="modular8") for seed in (1, 2))
    advance(4, one, other)
    for fragment in (0, 1):
        proposals = [each.payloads.proposals((fragment,)) for each in (one, other)]
        ours = one.payloads.encode((fragment,), *proposals)
        theirs = other.payloads.encode((fragment,), *reversed(proposals))
        found = one.payloads.difference(ours, theirs.parts)
        apart = other.payloads.published.parts[fragment] - one.payloads.published.parts[fragment]
        assert float((found.parts[0] - apart).norm()) < 0.2 * float(apart.norm())


def broken(theta: torch.Tensor, how: str) -> torch.Tensor:
    """Return the damage of this kind that is added, [P]."""
    damage = torch.zeros_like(theta)
    if how == "across":  # its length shows in no norm of theta
        damage = torch.randn(len(theta), generator=torch.Generator().manual_seed(1))
        damage -= damage.dot(theta) / theta.dot(theta) * theta
        return damage * 500 / damage.norm()
    damage[7] = float(how)
    return damage


@pytest.mark.parametrize("how", ["nan", "1e6", "across"])
def test_fast_weights_of_a_broken_inner_phase_are_shown_to_nobody(how):
    each = learner(fragments=1)
    for _ in range(4 * 12):
        each.advance()
    before = each.payloads.encode((0,)).parts
    each.task.theta += broken(each.task.theta, how)
    again = learner(fragments=1)
    again.load_state_dict(*stored(each))
    assert torch.equal(shown(again), slow(each)), "nor after a resume"
    for _ in range(3):
        each.advance()
        assert each.payloads.encode((0,)).parts == before
    each.advance()
    assert torch.equal(shown(each), slow(each))
    each.advance()
    assert each.payloads.encode((0,)).parts != before


def test_a_partner_from_far_away_is_no_fault_of_the_inner_phase():
    """Check parts of a swarm that were separated: their exchanges pass, however far they have moved."""
    one, other = learner(quadratic(1)), learner(quadratic(2))
    advance(4 * 12 + 1, one, other)
    there = other.payloads.published
    other.payloads.publish(replace(there, parts=tuple(part + 1e3 for part in there.parts)))
    before = slow(one)
    exchange(one, other)
    for _ in range(4):
        one.advance()
    assert float((slow(one) - before).mean()) > 300  # 125 if the phase were dropped


def test_a_snapshot_does_not_change_while_training_goes_on():
    each = learner()
    each.advance()
    before = each.payloads.encode((0, 1))
    snapshot = each.payloads.published.parts
    kept = [part.clone() for part in snapshot]
    for _ in range(8):
        each.advance()
    assert all(torch.equal(part, copy) for part, copy in zip(snapshot, kept, strict=True))
    assert each.payloads.encode((0, 1)).parts != before.parts


def test_another_thread_always_encodes_one_whole_snapshot():
    """Check that all fragments of one encode belong to one snapshot, however the trainer races.

    With a constant gradient, all elements of x are equal at any moment.
    """
    task = QuadraticTask(torch.full((4096,), 0.5), torch.ones(4096))
    each = learner(task, inner_steps=1, tokens=1e9, fragments=4)
    seen, stop = [], threading.Event()

    def encode() -> None:
        while not stop.is_set():
            seen.append(b"".join(each.payloads.encode((0, 1, 2, 3)).parts))

    thread = threading.Thread(target=encode)
    thread.start()
    steps = 0
    while (steps < 300 or len(seen) <= 10) and thread.is_alive():  # on a busy machine the thread starts late
        each.advance()
        steps += 1
    stop.set()
    thread.join()
    assert len(seen) > 10
    for message in seen:
        assert len(set(torch.frombuffer(bytearray(message), dtype=torch.float32).tolist())) == 1


def test_what_is_delivered_is_applied_at_the_next_step_and_reported():
    one, other = learner(quadratic(1)), learner(quadratic(2))
    other.advance()
    exchange(one, other, progress=5.0)
    events = one.advance()
    assert events == [Applied(LINK, 5.0)]
    assert one.progress == 6.0  # and one token of its own
    assert one.progress_displacement == 5.0


def test_outer_steps_and_the_end_are_reported_once():
    each = learner(recipe="swarm_slow", inner_steps=2, tokens=5.0)
    events = [event for _ in range(8) for event in each.advance()]
    assert events == [
        OuterStepDone(1, 2.0, 2),
        OuterStepDone(2, 4.0, 2),
        OuterStepDone(3, 6.0, 2),
        TrainingEnded(3, 6.0),
    ]
    assert each.tokens == 6


@pytest.mark.parametrize(
    ("inner_steps", "exchanges", "due"), [(10, 1, (5,)), (10, 2, (3, 8)), (1, 1, (1,)), (1, 2, (1, 1)), (3, 1, (2,))]
)
def test_exchanges_fall_due_in_the_middles_of_equal_parts_of_a_phase(inner_steps, exchanges, due):
    rules = LearnerRules(inner_steps, 1e9, OuterRule(0.7, 0.5), RECIPES["swarm"], exchanges)
    each = Learner(quadratic(), rules, slices(P, 1), codec.get("fp32"), MemoryLog())
    for _ in range(2):
        seen = []
        for step in range(1, inner_steps + 1):
            events = each.advance()
            seen += [step] * events.count(ExchangeDue())
            if ExchangeDue() in events:
                shown = torch.frombuffer(bytearray(each.payloads.encode((0,)).parts[0]), dtype=torch.float32)
                assert torch.equal(shown, each.task.theta)
        assert tuple(seen) == due
    assert replace(rules, recipe=RECIPES["swarm_slow"]).due == ()


def test_a_wake_ends_a_wait_and_changes_nothing():
    each = learner()
    threading.Timer(0.0, each.inbox.wake).start()
    assert each.settle(wait_s=30.0) == []


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_broken_inner_phase_is_dropped_and_training_goes_on(poison):
    each = learner(inner_steps=2)
    for _ in range(20):
        each.advance()
    before = slow(each).clone()
    each.advance()
    each.task.theta[7] = poison
    each.advance()
    assert torch.equal(slow(each), before)
    assert torch.equal(each.task.theta, before)
    assert each.state._notebook.kinds() == ["discarded"]
    for _ in range(4):
        each.advance()
    assert torch.isfinite(slow(each)).all()
    assert not torch.equal(slow(each), before)


@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8"])
def test_a_partner_that_sends_nonsense_is_refused(codec_name):
    each = learner(codec_name=codec_name)
    mine = each.payloads.encode((0,))
    size = each.payloads.encoded_sizes((0,))[0]
    with pytest.raises(RemoteError):
        each.payloads.difference(mine, [b"\xff" * size])
    with pytest.raises(RemoteError):
        each.payloads.difference(mine, [bytes(size - 1)])


def test_adopting_replaces_everything_and_frees_what_was_under_way():
    donor, newcomer, other = learner(quadratic(1)), learner(quadratic(2)), learner(quadratic(3))
    for _ in range(8):
        donor.advance()
        newcomer.advance()
        other.advance()
    parts = [bytearray(part) for part in donor.payloads.weights()]
    newcomer.payloads.check_weights(parts)
    newcomer.inbox.adopt(LINK, step=2, progress=8.0, parts=parts)
    exchange(newcomer, other)
    events = newcomer.settle()
    assert events == [Applied(LINK, 8.0), Adopted(LINK, 2, 8.0)]
    assert torch.equal(slow(newcomer), slow(donor))
    assert torch.equal(newcomer.task.theta, slow(donor))
    assert not stored(newcomer)[0]["momentum"].any()
    assert newcomer.progress_displacement == 0, "a donor's progress does not count as exchanged"
    assert newcomer.task.resets == 1
    assert REWARM_STEPS > 0


class Judge:
    """Task whose held-out loss depends on whose weights the fast ones are."""

    guessing = 5.5

    def __init__(self, task, of_others, of_own=5.6):
        self.task, self.own, self.of_others, self.of_own = task, task.theta.clone(), of_others, of_own

    def loss(self):
        return self.of_own if torch.equal(self.task.theta, self.own) else self.of_others


def offered(of_others, of_own=5.6, left_behind=False):
    """Return a learner that gets a donor's weights with this held-out loss."""
    task, donor = quadratic(2), learner(quadratic(1))
    rules = LearnerRules(4, 1000.0, OuterRule(0.7, 0.9), RECIPES["swarm"])
    judge = Judge(task, of_others, of_own)
    each = Learner(task, rules, slices(P, 2), codec.get("fp32"), MemoryLog(), held_out=judge)
    advance(8, donor)
    parts = [bytearray(part) for part in donor.payloads.weights()]
    each.inbox.adopt(LINK, step=2, progress=8.0, parts=parts, left_behind=left_behind)
    return each, donor, each.settle()


@pytest.mark.parametrize(("loss", "own", "is_taken"), [(4.1, 4.0, False), (4.0, 4.0, False), (3.9, 4.0, True)])
def test_weights_that_left_behind_are_only_taken_if_they_do(loss, own, is_taken):
    each, donor, events = offered(loss, of_own=own, left_behind=True)
    assert isinstance(events[-1], Adopted if is_taken else Unfit)
    assert torch.equal(slow(each), slow(donor) if is_taken else quadratic(2).theta)
    assert (each.step, each.progress) == ((2, 8.0) if is_taken else (0, 0.0))


@pytest.mark.parametrize("loss", [9.1, float("nan"), float("inf")])
def test_a_donors_weights_that_do_worse_than_guessing_are_not_taken(loss):
    each, _, events = offered(loss)
    assert events == [Unfit(LINK, f"its weights do worse than guessing: held-out loss {loss:.3f}")]
    assert torch.equal(each.task.theta, quadratic(2).theta)
    assert torch.equal(slow(each), quadratic(2).theta)
    assert (each.step, each.progress, each.task.resets) == (0, 0.0, 0)


@pytest.mark.parametrize(
    ("loss", "ours"),
    [
        (2.1, 5.6),
        (2.1, 1.9),  # a little worse than before, but the swarm's
        (5.55, 5.6),  # a run that has just begun: as bad as uniform guessing, and better than ours
    ],
)
def test_a_donors_weights_that_have_learned_anything_are_taken(loss, ours):
    each, donor, events = offered(loss, ours)
    assert events == [Adopted(LINK, 2, 8.0)]
    assert torch.equal(each.task.theta, slow(donor))


def test_a_donors_bad_weights_are_refused():
    each = learner()
    good = [bytearray(part) for part in each.payloads.weights()]
    with pytest.raises(RemoteError, match="shapes"):
        each.payloads.check_weights(good[:1])
    for bad in (float("nan"), float("inf"), 1e38):  # no codec accepts 1e38, so it would end our own exchanges
        good[0][:4] = struct.pack("<f", bad)
        with pytest.raises(RemoteError, match="finite"):
            each.payloads.check_weights(good)


def test_adopting_weights_of_the_runs_end_is_the_end():
    donor, newcomer = learner(tokens=8.0), learner(tokens=8.0)
    for _ in range(8):
        donor.advance()
    newcomer.inbox.adopt(LINK, step=2, progress=8.0, parts=[bytearray(part) for part in donor.payloads.weights()])
    assert newcomer.advance() == [Adopted(LINK, 2, 8.0), TrainingEnded(2, 8.0)]
    assert newcomer.advance() == []
    assert newcomer.tokens == 0


def test_weights_that_come_after_the_end_do_not_undo_it():
    """Check a pull that takes until the end of the run: no donor was free, so the newcomer trained on."""
    donor, newcomer, other = (learner(quadratic(seed), tokens=8.0) for seed in (1, 2, 3))
    while not newcomer.ended:
        newcomer.advance()
        other.advance()
    parts = [bytearray(part) for part in donor.payloads.weights()]
    before = slow(newcomer)
    newcomer.inbox.adopt(LINK, step=1, progress=4.0, parts=parts)
    assert newcomer.settle() == [Unfit(LINK, "the run's end came first")]
    assert newcomer.ended
    assert (newcomer.step, newcomer.progress) == (2, 8.0)
    assert torch.equal(slow(newcomer), before)
    newcomer.inbox.adopt(LINK, step=1, progress=4.0, parts=parts)
    exchange(newcomer, other)
    assert [type(event) for event in newcomer.settle()] == [Unfit, Applied], "the final gossip goes on"


@pytest.mark.parametrize("recipe", ["swarm", "swarm_slow"])
def test_a_resumed_learner_goes_on_as_if_never_stopped(recipe):
    steady = learner(quadratic(4), recipe=recipe)
    for _ in range(6):
        steady.advance()
    tensors, numbers = stored(steady)
    resumed = learner(quadratic(4), recipe=recipe)
    resumed.load_state_dict(tensors, numbers)
    for _ in range(9):
        assert steady.advance() == resumed.advance()
    assert torch.equal(steady.task.theta, resumed.task.theta)
    assert torch.equal(slow(steady), slow(resumed))


def after_a_displacement() -> Learner:
    """Return a learner in its 13th phase, which a partner far away has just moved by 250 per weight."""
    one, other = learner(quadratic(1)), learner(quadratic(2))
    advance(4 * 12 + 1, one, other)
    there = other.payloads.published
    other.payloads.publish(replace(there, parts=tuple(part + 500 for part in there.parts)))
    exchange(one, other)
    one.settle()
    return one


def test_a_resumed_guard_knows_what_was_usual_and_what_was_displaced():
    steady = after_a_displacement()
    tensors, numbers = stored(steady)
    pulled, spoilt = learner(quadratic(1)), learner(quadratic(1))
    for each in pulled, spoilt:
        each.load_state_dict(tensors, numbers)
        each.advance()
    before = slow(pulled)
    spoilt.task.theta += 1000
    for each in pulled, spoilt:
        for _ in range(2):
            each.advance()
    assert float((slow(pulled) - before).mean()) > 50, "the displacement was taken for a fault"
    assert torch.equal(slow(spoilt), before), "what else went wrong was not found"


def test_a_guard_forgets_what_was_usual_before_the_weights_were_replaced():
    each = after_a_displacement()
    each.inbox.adopt(LINK, step=2, progress=8.0, parts=[bytearray(part) for part in each.payloads.weights()])
    each.settle()
    for _ in range(2):
        each.advance()
    each.task.theta += 30
    before = slow(each)
    for _ in range(2):
        each.advance()
    assert float((slow(each) - before).mean()) > 5


def test_a_checkpoint_of_another_model_does_not_fit():
    tensors, numbers = stored(learner())
    tensors["slow"] = tensors["slow"][:-1]
    with pytest.raises(ValueError, match="weights"):
        learner().load_state_dict(tensors, numbers)


def test_its_changes_tell_whether_a_checkpoint_would_hold_the_same() -> None:
    one, other = learner(quadratic(seed=1)), learner(quadratic(seed=2))
    advance(3, one, other)
    one.inbox.proceed(0)
    one.settle()
    assert one.changes == 3
    one.inbox.wake()
    one.settle()
    one.settle()
    assert one.changes == 3
    exchange(one, other)
    one.settle()
    assert one.changes == 4
    one.inbox.adopt(LINK, step=2, progress=8.0, parts=[bytearray(part) for part in other.payloads.weights()])
    one.settle()
    assert one.changes == 5


class MortalTask(QuadraticTask):
    """Task whose trainer dies in one step, after it has moved half of the weights."""

    dies = False

    def inner_step(self, progress):
        if self.dies:
            self.theta[: P // 2] += 100.0
            raise TrainerAwayError(is_torn=True)
        return super().inner_step(progress)


@pytest.mark.parametrize("recipe", ["swarm", "diloco", "dpsgd", "dilocox"])
def test_a_phase_whose_weights_a_trainer_left_torn_begins_again_at_the_slow_ones(recipe):
    task = MortalTask(torch.ones(P), torch.randn(P, generator=torch.Generator().manual_seed(1)))
    each = learner(task, recipe=recipe)
    x = slow(each)
    each.advance()
    each.advance()
    task.dies = True
    assert each.advance() == []
    assert each.is_away
    assert torch.equal(task.theta, x)
    assert task.resets == 1
    assert torch.equal(torch.cat(each.payloads.published.parts[:2]), x)
    assert each.settle() == []
    assert not each.is_away
    task.dies = False
    assert [each.advance() for _ in range(3)] == [[ExchangeDue()] * (each._due == (step,)) for step in (1, 2, 3)]
    assert each.tokens == 5
