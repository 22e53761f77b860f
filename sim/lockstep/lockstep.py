"""All peers in lockstep: the recipes that average over all peers at once, and an ideal network for the others.

There are no messages and no clock: after H inner steps of all peers, each average is a matrix product or a mean.
Recipes with a global average are simulated in this way (``bench.cost`` computes the cost of their waiting), and tests
check the invariants of the recipes on it. The arithmetic of an outer step is the learner's own
(``host.outer_phase``), on all peers' weights stacked.

Legend: N peers, P parameters, F elements of one fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.base.ids import PeerId
from p2ptrain.host.outer_phase import OuterPhase
from p2ptrain.outer.mixing import displaced, late_momentum, late_pseudo_gradient
from p2ptrain.outer.step import OuterRule, OuterState, outer_step, pseudo_gradient
from p2ptrain.ports import InnerTask
from p2ptrain.recipes import Mix, Recipe, Stream
from p2ptrain.swarm.topology import Topology, planned_partners

Send = Callable[[Stream, int, Tensor], Tensor]
"""View that others have of a stream's fragment of this number, [N, F], through a codec and back."""

Reach = Callable[[int, int, int], bool]
"""Whether the exchange between two peers (by index) at this outer step succeeds; symmetric in the peers."""


@dataclass(frozen=True, slots=True)
class LockstepRules:
    """Rules of all peers."""

    recipe: Recipe
    outer: OuterRule
    inner_steps: int
    """Inner steps per outer step, H, unless given for an outer step."""
    topology: Topology = "random"
    partners: int = 1
    fragments: tuple[slice, ...] = ()
    """Slices of [0, P), one per fragment; empty: a single one. Only recipes that average each fragment by itself read
    it."""
    late_steps: int = 5
    """Inner steps until a fragment's average arrives: Streaming DiLoCo's tau (arXiv 2501.18512 overlaps 1 to 10)."""
    alpha: float = 0.5
    """Weight of the fast weights where a late average is merged: Streaming DiLoCo's alpha."""
    seed: str = ""
    """Seed of the pairings."""


class Lockstep:
    """A group of N peers, one outer step at a time.

    Args:
        tasks: the peers' inner optimizations; all begin at the first one's weights.
        rules: rules of all peers.
        advance: makes one inner step of all tasks at this progress, in one batch if possible; returns their losses.
        send: returns what the others see of a stream.
        reach: tells which exchanges between partners succeed. An average over all peers is repeated until it succeeds.
    """

    def __init__(
        self,
        tasks: Sequence[InnerTask],
        rules: LockstepRules,
        advance: Callable[[float], Sequence[float]],
        tokens_per_step: float,
        send: Send = lambda stream, fragment, values: values,
        reach: Reach = lambda step, one, other: True,
    ) -> None:
        assert all(mix.stream != "fast" and mix.share == 1 for mix in rules.recipe.mixes), (
            "the recipe has no common steps"
        )
        self.step = 0
        self.progress = 0.0
        """Tokens of all peers."""
        self.loss = float("nan")
        """Mean training loss of all peers' last inner phase."""
        self.average = tasks[0].theta[:0].clone()
        """[P] mean of the pseudo-gradients as sent, used in the first peer's last outer step; empty before it."""
        self._tasks = tuple(tasks)
        self._rules = rules
        self._advance = advance
        self._tokens = tokens_per_step
        self._send = send
        self._reach = reach
        self._peers = [PeerId(f"{place:06d}") for place in range(len(tasks))]
        first = tasks[0].theta
        is_cut = rules.recipe.delay == "inner_steps" and rules.fragments
        self._slices = rules.fragments if is_cut else (slice(0, len(first)),)
        slow = first.clone().expand(len(tasks), -1)
        self._states = [OuterState(slow[:, f].clone(), torch.zeros_like(slow[:, f])) for f in self._slices]
        self._before: list[tuple[Tensor, Tensor] | None] = [None for _ in self._slices]
        """Mean and own pseudo-gradient of the previous phase, by fragment."""
        self._set_theta()

    @property
    def slow(self) -> Tensor:
        """Slow weights of all peers, [N, P]."""
        return torch.cat([state.slow for state in self._states], dim=1)

    def outer_step(self, inner_steps: int | None = None) -> None:
        """Run one outer step of all peers: ``inner_steps`` inner steps (default H), then the outer update."""
        recipe = self._rules.recipe
        steps = inner_steps or self._rules.inner_steps
        if recipe.delay == "inner_steps":
            losses = self._stream(steps)
        else:
            overlapped = [mix for mix in recipe.mixes if mix.when == "overlapped" and mix.stream == "slow"]
            pulls = [self._displacement(mix, self._states[0].slow) for mix in overlapped]
            losses = [self._inner_step() for _ in range(steps)]
            for pull in pulls:  # as late as possible: the inner phase has not seen it
                self._states[0] = displaced(self._states[0], pull)
                self._move(pull)
            if recipe.delay == "none":
                self._mix()
            else:
                self._use_late_average()
            self._set_theta()
        self.loss = sum(losses) / len(losses)
        self.step += 1

    # --- three kinds of outer step ----------------------------------------------------------------------------------

    def _mix(self) -> None:
        recipe = self._rules.recipe
        phase = OuterPhase.begin(recipe, self._rules.outer, self._states, [self._theta()])
        for mix in recipe.mixes:
            if (mix.stream, mix.when, mix.who) == ("pseudo_gradient", "blocking", "all"):
                phase.gradients[0] = self._mean(self._send(mix.stream, 0, phase.gradients[0]))  # bitwise equal for all
                self.average = phase.gradients[0][0].clone()
            elif mix.when == "blocking":
                phase.take(mix.stream, 0, self._displacement(mix, phase.snapshots(mix.stream)[0]))
        self._states = list(phase.conclude())
        late = recipe.mix("pseudo_gradient")
        if late is not None and late.when == "overlapped":
            correction = self._displacement(late, phase.snapshots("pseudo_gradient")[0])
            if recipe.mix("slow") is not None:
                self._states[0] = late_momentum(self._states[0], correction)
            else:
                self._states[0], _ = late_pseudo_gradient(self._states[0], correction, self._rules.outer)

    def _use_late_average(self) -> None:
        """Step by the average of the previous phase; in the first phase there is none."""
        g = pseudo_gradient(self._states[0], self._theta())
        mix = self._rules.recipe.mix("pseudo_gradient")
        if mix is not None and mix.who != "all":
            mixed = torch.zeros_like(g)
            if self._before[0] is not None:
                own = self._before[0][1]
                mixed = own + self._displacement(mix, own)
                self.average = mixed[0].clone()
            self._before[0] = g, g
            self._states[0] = outer_step(self._states[0], mixed, self._rules.outer)
            return
        sent = self._send("pseudo_gradient", 0, g)
        mean_before, own_before = self._before[0] or (torch.zeros_like(g), torch.zeros_like(g))
        if self._rules.recipe.delay == "phase_own_fresh":
            use = _own_fresh(mean_before, own_before, sent, len(self._tasks))
        else:
            use = mean_before
        if self._before[0] is not None:
            self.average = mean_before[0].clone()
        self._before[0] = self._mean(sent), sent
        self._states[0] = outer_step(self._states[0], use, self._rules.outer)

    def _stream(self, steps: int) -> list[float]:
        """End fragment f's phase f / F of the way through the phase; its average arrives some inner steps later."""
        rules, losses = self._rules, []
        count = len(self._slices)
        for inner in range(steps):
            losses.append(self._inner_step())
            for fragment, piece in enumerate(self._slices):
                sent_at = (fragment + 1) * steps // count - 1
                if inner == sent_at:
                    g = pseudo_gradient(self._states[fragment], self._theta()[:, piece])
                    self._before[fragment] = self._mean(self._send("pseudo_gradient", fragment, g)), g
                arrived = self._before[fragment]
                if arrived is not None and inner == (sent_at + rules.late_steps) % steps:
                    self._states[fragment] = outer_step(self._states[fragment], arrived[0], rules.outer)
                    fresh = _merged(self._theta()[:, piece], self._states[fragment].slow, rules.alpha)
                    for task, row in zip(self._tasks, fresh, strict=True):
                        task.theta[piece].copy_(row)
                    self._before[fragment] = None
        return losses

    # --- averages -----------------------------------------------------------------------------------------------------

    def _displacement(self, mix: Mix, own: Tensor) -> Tensor:
        """Return the [N, F] displacement by which this average changes the own values.

        The mean of all peers replaces their values, and is equal for all peers whatever was lost in sending. Partners
        add the difference of what both sent, which keeps the mean unchanged.
        """
        sent = self._send(mix.stream, 0, own)
        return self._mean(sent) - own if mix.who == "all" else self._neighbours_mean(sent) - sent

    def _mean(self, sent: Tensor) -> Tensor:
        """Return the [N, F] mean of all peers, for each of them."""
        return sent.mean(0).expand_as(sent).clone()

    def _neighbours_mean(self, sent: Tensor) -> Tensor:
        """Return ``W sent``, [N, F], with the Metropolis weights of this outer step's plan."""
        return (self.weights().to(sent.dtype) @ sent).to(sent.dtype)

    def weights(self) -> Tensor:
        """Return the [N, N] matrix W of this outer step: symmetric, doubly stochastic."""
        rules, peers = self._rules, self._peers
        place = {peer: at for at, peer in enumerate(peers)}
        plans = [
            {place[p] for p in planned_partners(rules.topology, rules.partners, me, peers, rules.seed, self.step + 1)}
            for me in peers
        ]
        mixing = torch.eye(len(peers), dtype=torch.float64)
        for one, others in enumerate(plans):
            for other in others:
                if self._reach(self.step, min(one, other), max(one, other)):
                    share = 1.0 / (1 + max(len(plans[one]), len(plans[other])))
                    mixing[one, other] += share
                    mixing[one, one] -= share
        return mixing

    # --- fast weights -------------------------------------------------------------------------------------------------

    def _inner_step(self) -> float:
        losses = self._advance(self.progress)
        self.progress += self._tokens
        return float(sum(losses)) / len(losses)

    def _theta(self) -> Tensor:
        return torch.stack([task.theta for task in self._tasks])

    def _set_theta(self) -> None:
        for task, row in zip(self._tasks, self.slow, strict=True):
            task.theta.copy_(row)

    def _move(self, displacement: Tensor) -> None:
        for task, row in zip(self._tasks, displacement, strict=True):
            task.theta.add_(row)


def _own_fresh(
    mean_before: Tensor,  # [N, F] fp32: all peers' mean pseudo-gradient of the phase before
    own_before: Tensor,  # [N, F] fp32: the own share of it
    own: Tensor,  # [N, F] fp32: the own pseudo-gradient of this phase
    peers: int,
) -> Tensor:
    """Compute Eager DiLoCo's pseudo-gradient [N, F] (arXiv 2502.12996): only the own share is of this phase."""
    return mean_before + (own - own_before) / peers


def _merged(
    theta: Tensor,  # [N, F] fp32: fast weights, some inner steps past the averaged snapshot
    slow: Tensor,  # [N, F] fp32: the slow weights that resulted from the average
    alpha: float,
) -> Tensor:
    """Merge the late average: ``theta <- alpha theta + (1 - alpha) x`` [N, F]; Streaming DiLoCo, arXiv 2501.18512."""
    return alpha * theta + (1 - alpha) * slow
