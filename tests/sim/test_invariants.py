"""The recipes against their published updates and against each other, in double precision (docs/ALGORITHMS.md)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from p2ptrain.host.outer_phase import OuterPhase
from p2ptrain.outer.forms import consensus_step
from p2ptrain.outer.step import OuterRule, OuterState
from p2ptrain.recipes import RECIPES
from sim.learners import QuadraticTask
from sim.lockstep.lockstep import Lockstep, LockstepRules

N, P, H, ROUNDS = 4, 12, 5, 20
ROUNDING = 1e-12


def problem(peer: int, equal_curvature: bool = True) -> QuadraticTask:
    random = torch.Generator().manual_seed(100 + peer)
    optimum = torch.randn(P, generator=random, dtype=torch.float64)
    spread = 0.0 if equal_curvature else 0.5
    curvature = 0.3 + spread * torch.rand(P, generator=random, dtype=torch.float64)
    return QuadraticTask(curvature, optimum, noise=0.05, seed=peer)


def lockstep(recipe: str, momentum: float = 0.6, equal_curvature: bool = True, **rules) -> Lockstep:
    tasks = [problem(peer, equal_curvature) for peer in range(N)]
    outer = OuterRule(0.7, momentum)
    return Lockstep(
        tasks,
        LockstepRules(RECIPES[recipe], outer, rules.pop("inner_steps", H), **rules),
        advance=lambda progress: [task.inner_step(progress).loss for task in tasks],
        tokens_per_step=1.0,
    )


def ran(each: Lockstep, rounds: int = ROUNDS) -> Tensor:
    """Return all peers' slow weights after so many outer steps, [N, P]."""
    for _ in range(rounds):
        each.outer_step()
    return each.slow


def torch_diloco(momentum: float = 0.6, equal_curvature: bool = True, rounds: int = ROUNDS) -> Tensor:
    """Return DiLoCo's weights (arXiv 2311.08105, algorithm 1), computed with torch's own SGD, [P]."""
    tasks = [problem(peer, equal_curvature) for peer in range(N)]
    slow = torch.nn.Parameter(torch.zeros(P, dtype=torch.float64))
    optimizer = torch.optim.SGD([slow], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(rounds):
        for task in tasks:
            task.theta.copy_(slow.detach())
            for _ in range(H):
                task.inner_step(0.0)
        slow.grad = slow.detach() - torch.stack([task.theta for task in tasks]).mean(0)
        optimizer.step()
    return slow.detach()


def everybody(row: Tensor) -> Tensor:
    return row.expand(N, -1)


def test_t1_diloco_is_torch_sgd_on_the_mean_pseudo_gradient() -> None:
    torch.testing.assert_close(ran(lockstep("diloco")), everybody(torch_diloco()), rtol=0, atol=ROUNDING)


def test_t1_also_as_gossip_on_the_complete_graph() -> None:
    """Check Mix2 with the complete graph's weights 1 / n, which is the exact mean."""
    gossip = lockstep("factored_gossip_none_local", topology="complete")
    torch.testing.assert_close(ran(gossip), everybody(torch_diloco()), rtol=0, atol=ROUNDING)


def test_t6_noloco_is_its_published_update() -> None:
    """Check equations 2 and 3 of arXiv 2506.10911, whose drift is theta - x, for a pair and three steps."""
    random = torch.Generator().manual_seed(7)
    eta, mu = 0.7, 0.5
    x = torch.randn(2, P, generator=random, dtype=torch.float64)
    velocity = torch.zeros_like(x)
    states = [OuterState(row.clone(), torch.zeros_like(row)) for row in x]
    for _ in range(3):
        drift = 0.1 * torch.randn(2, P, generator=random, dtype=torch.float64)
        phases = [
            OuterPhase.begin(RECIPES["noloco"], OuterRule(eta, mu), [state], [state.slow + step])
            for state, step in zip(states, drift, strict=True)
        ]
        moves = [
            [
                (stream, (theirs.snapshots(stream)[0] - mine.snapshots(stream)[0]) / 2)
                for stream in RECIPES["noloco"].blocking
            ]
            for mine, theirs in (phases, phases[::-1])
        ]
        for phase, taken in zip(phases, moves, strict=True):
            for stream, displacement in taken:
                phase.take(stream, 0, displacement)
        states = [phase.conclude()[0] for phase in phases]

        velocity = mu * velocity + eta * drift.mean(0) + eta * (x.mean(0) - x)
        x = x + velocity
        torch.testing.assert_close(torch.stack([state.slow for state in states]), x, rtol=0, atol=ROUNDING)


def test_t6_the_pull_is_the_only_new_thing_in_a_consensus_step() -> None:
    state = OuterState(torch.ones(3), torch.tensor([1.0, 0.0, -1.0]))
    g, none = torch.full((3,), 0.5), torch.zeros(3)
    after = consensus_step(state, g, none, OuterRule(0.5, 0.5))
    assert torch.equal(after.momentum, torch.tensor([1.0, 0.5, 0.0]))
    assert torch.equal(after.slow, torch.tensor([0.5, 0.75, 1.0]))
    pulled = consensus_step(state, g, torch.full((3,), 0.25), OuterRule(0.5, 0.5))
    assert torch.equal(pulled.slow - after.slow, torch.full((3,), 0.125))


@pytest.mark.parametrize("topology", ["random", "ring"])
def test_t7_gasloc_moves_the_mean_as_diloco_does_on_a_quadratic(topology: str) -> None:
    """Check one curvature, for which the mean pseudo-gradient is that of the mean."""
    gossip = ran(lockstep("gasloc", momentum=0.0, topology=topology))
    torch.testing.assert_close(gossip.mean(0), torch_diloco(momentum=0.0), rtol=0, atol=ROUNDING)
    assert float((gossip - gossip.mean(0)).norm()) > 1e-3, "the peers themselves differ"


def test_t7_needs_the_one_curvature() -> None:
    gossip = ran(lockstep("gasloc", momentum=0.0, equal_curvature=False, topology="ring"))
    other = torch_diloco(momentum=0.0, equal_curvature=False)
    assert float((gossip.mean(0) - other).abs().max()) > 1e-6


def test_t10_factored_gossip_with_both_mixes_global_is_diloco() -> None:
    both = ran(lockstep("factored_gossip_global_global"))
    torch.testing.assert_close(both, everybody(torch_diloco()), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("topology", ["random", "ring", "complete"])
def test_t10_factored_gossip_with_both_mixes_alike_and_no_momentum_is_gasloc(topology: str) -> None:
    factored = ran(lockstep("factored_gossip", momentum=0.0, topology=topology, equal_curvature=False))
    gasloc = ran(lockstep("gasloc", momentum=0.0, topology=topology, equal_curvature=False))
    torch.testing.assert_close(factored, gasloc, rtol=0, atol=ROUNDING)


def test_t12_momentum_on_the_mixed_iterate_is_diloco() -> None:
    z_form = ran(lockstep("gasloc_z", topology="complete"))
    torch.testing.assert_close(z_form, everybody(torch_diloco()), rtol=0, atol=ROUNDING)


def test_t12_momentum_on_the_unmixed_iterate_is_not() -> None:
    y_form = ran(lockstep("gasloc_y", topology="complete"))
    assert float((y_form - torch_diloco()).abs().max()) > 1e-3


def test_eager_diloco_is_diloco_when_all_peers_are_one() -> None:
    """Check n = 1: the own share is all there is, and it is current."""
    task, other = problem(0), problem(0)
    rule = OuterRule(0.7, 0.6)
    runs = [
        Lockstep([t], LockstepRules(RECIPES[name], rule, H), lambda p, t=t: [t.inner_step(p).loss], 1.0)
        for t, name in ((task, "eager_diloco"), (other, "diloco"))
    ]
    torch.testing.assert_close(ran(runs[0]), ran(runs[1]), rtol=0, atol=ROUNDING)


def test_dilocox_uses_the_average_of_the_phase_before() -> None:
    late = lockstep("dilocox_global", momentum=0.0)
    late.outer_step()
    assert torch.equal(late.slow, torch.zeros(N, P, dtype=torch.float64)), "there is no average yet"
    late.outer_step()
    at_once = lockstep("diloco", momentum=0.0)
    at_once.outer_step()
    torch.testing.assert_close(late.slow, at_once.slow, rtol=0, atol=ROUNDING)


def test_dilocox_with_all_as_partners_is_the_average_of_all() -> None:
    gossip = ran(lockstep("dilocox", topology="complete"))
    torch.testing.assert_close(gossip, ran(lockstep("dilocox_global")), rtol=0, atol=ROUNDING)
    pairs = lockstep("dilocox", topology="random")
    assert float((ran(pairs) - pairs.slow.mean(0)).norm()) > 1e-3, "peers of pairs differ"


def test_what_a_step_was_taken_by_is_known_after_it() -> None:
    """Check that a step uses the average that has arrived, and that the first step has none."""
    late, at_once = lockstep("dilocox_global", momentum=0.0), lockstep("diloco", momentum=0.0)
    late.outer_step()
    at_once.outer_step()
    assert len(late.average) == 0
    before = late.slow
    late.outer_step()
    torch.testing.assert_close(late.average, at_once.average, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(late.slow, before - 0.7 * late.average, rtol=0, atol=ROUNDING)


def test_an_outer_step_may_have_a_number_of_inner_steps_of_its_own() -> None:
    for recipe in ("diloco", "dilocox_global", "streaming_diloco"):
        told, ruled = lockstep(recipe), lockstep(recipe, inner_steps=3)
        for _ in range(4):
            told.outer_step(3)
            ruled.outer_step()
        assert told.progress == ruled.progress == 12.0
        assert torch.equal(told.slow, ruled.slow)


def test_streaming_diloco_with_one_fragment_nothing_late_and_no_merging_is_diloco() -> None:
    streaming = lockstep("streaming_diloco", late_steps=0, alpha=0.0)
    torch.testing.assert_close(ran(streaming), everybody(torch_diloco()), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("topology", ["random", "ring", "exponential", "complete"])
@pytest.mark.parametrize("partners", [1, 2])
def test_mixing_weights_are_symmetric_and_doubly_stochastic(topology: str, partners: int) -> None:
    each = lockstep("gasloc", topology=topology, partners=partners)
    for each.step in range(6):
        weights = each.weights()
        assert torch.equal(weights, weights.T)
        torch.testing.assert_close(weights.sum(1), torch.ones(N, dtype=torch.float64), rtol=0, atol=ROUNDING)
        assert float(weights.min()) >= 0
        assert float(torch.linalg.eigvalsh(weights)[0]) > -1 + 1e-9, "an eigenvalue -1 would never settle"


@pytest.mark.parametrize("recipe", ["gasloc", "factored_gossip", "noloco", "swarm_both", "dilocox", "dpsgd"])
def test_t3_failed_exchanges_leave_the_mean_alone(recipe: str) -> None:
    """Check a learning rate near zero: the mean stays, whichever exchanges fail."""
    tasks = [problem(peer) for peer in range(N)]
    rules = LockstepRules(RECIPES[recipe], OuterRule(1e-300, 0.5), 1)
    each = Lockstep(
        tasks,
        rules,
        advance=lambda progress: [0.0] * N,
        tokens_per_step=1.0,
        reach=lambda step, one, other: (step + one + other) % 3 > 0,
    )
    start = torch.randn(N, P, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    each._states = [OuterState(start.clone(), torch.zeros_like(start))]
    each._set_theta()
    ran(each)
    if recipe != "noloco":  # its mean moves by eta times the pull, which sums to zero as well
        assert float((each.slow - each.slow.mean(0)).norm()) < 0.5 * float((start - start.mean(0)).norm())
    torch.testing.assert_close(each.slow.mean(0), start.mean(0), rtol=0, atol=ROUNDING)
