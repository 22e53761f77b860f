"""Host state of one peer: slow weights x, momentum and fast weights theta, and what changes or shows them.

A phase's end, a showing, a displacement and an adoption each have one method; the recipe decides what they do
(``outer_phase``). Slow weights are immutable tensors that are replaced; fast ones are the task's vector theta, written
in place. ``Payloads`` holds the last published snapshot for any thread to read. One thread calls this module, that
which asks the trainer for inner steps.

Legend: P parameters (padded), F elements of one fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from p2ptrain.codec import Codec, is_adaptive, is_decodable, weighted_ranks
from p2ptrain.host.inbox import Displacement
from p2ptrain.host.outer_phase import Entry, OuterPhase, PhaseGuard, entry_of
from p2ptrain.host.payloads import Encoded, Payloads, Snapshot
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.adaptive import AdaptiveRank
from p2ptrain.outer.mixing import displaced, displacement, l2_distance, late_momentum, late_pseudo_gradient
from p2ptrain.outer.step import OuterState, initial_state
from p2ptrain.ports import InnerTask, Notebook, RemoteInnerTask

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

T = TypeVar("T")


class HostState:
    """All weights of one peer but those that partners have sent.

    Args:
        task: its ``theta`` [P], on the host, becomes the initial slow weights.
        rules: the recipe and its numbers.
        fragments: slices of [0, P), one per fragment.
        payloads: publishes snapshots for partners.
        gradient_codec: for pseudo-gradients; None: they are not exchanged.
        notebook: receives a note for each discarded inner phase.
        remote: the task, if it is in another process.
    """

    def __init__(
        self,
        task: InnerTask,
        rules: LearnerRules,
        fragments: Sequence[slice],
        payloads: Payloads,
        gradient_codec: Codec | None,
        notebook: Notebook,
        remote: RemoteInnerTask | None = None,
    ) -> None:
        self.phase: OuterPhase | None = None
        """Outer step in progress while the recipe waits for partners; displacements of x are then applied to it."""
        self.inner_steps = rules.inner_steps
        """H of the current phase."""
        self._task = task
        self._remote = remote
        self._rules = rules
        self._slices = tuple(fragments)
        self._payloads = payloads
        self._notebook = notebook
        self._guard = PhaseGuard()
        self.states = tuple(initial_state(task.theta[piece]) for piece in self._slices)
        """State of each fragment after the last outer step and the exchanges since."""
        self.late = [torch.zeros_like(x) for x in self._slow] if rules.recipe.uses_late_gradients else []
        """[F] each: pseudo-gradients of the last phase, mixed since, by which the next outer step moves; or empty."""
        feeds_back = gradient_codec is not None and is_decodable(gradient_codec) and gradient_codec.needs_feedback
        self._left_out = [torch.zeros_like(x) for x in self._slow] if feeds_back else []
        """[F] each: what pseudo-gradient messages have left out so far, if the codec needs that fed back."""
        self._applied = [0] * len(self._slices)
        """Serial number of the last displacement that each fragment's weights contain."""
        self._adaptive: AdaptiveRank | None = None
        if gradient_codec is not None and is_adaptive(gradient_codec):
            self._adaptive = AdaptiveRank(gradient_codec.rank, rules.inner_steps)
        self._publish(0)

    @property
    def slow(self) -> Tensor:
        """Slow weights, [P], a copy."""
        return torch.cat(self._slow)

    @property
    def _slow(self) -> list[Tensor]:
        return [state.slow for state in self.states]

    @property
    def _fast(self) -> list[Tensor]:
        """Views of theta, [F] each; ``_fetch`` first if it may be a copy of a card's weights."""
        return [self._task.theta[piece] for piece in self._slices]

    def _fetch(self) -> None:
        if self._remote is not None:
            self._remote.store()

    def distance(self) -> float:
        """Return the L2 norm of the inner phase's pseudo-gradient so far."""
        self._fetch()
        norms = [l2_distance(x, theta) for x, theta in zip(self._slow, self._fast, strict=True)]
        return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))

    # --- a phase's end ------------------------------------------------------------------------------------------------

    def end_phase(self, step: int) -> None:
        """Make outer step ``step`` + 1, or its first half if the recipe waits for partners: ``phase`` is then set."""
        recipe, rule, faulty = self._rules.recipe, self._rules.outer, False
        if recipe.outer != "hand_over":
            fault = self._guard.fault(self.distance())
            if faulty := fault is not None:
                self._notebook.note("discarded", step=step + 1, why=fault)
        else:
            self._fetch()
        if not recipe.blocks and self._payloads.streams == 1:  # one fragment after the other: little memory is needed
            before = self._slow
            for fragment, theta in enumerate(self._fast):
                (state,) = OuterPhase.begin(recipe, rule, (self.states[fragment],), (theta,), faulty).conclude()
                self.states = (*self.states[:fragment], state, *self.states[fragment + 1 :])
            self._begin_phase(step + 1, before)
            return
        if self._adaptive is not None:
            self._adapt(self._adaptive)
        phase = OuterPhase.begin(recipe, rule, self.states, self._fast, faulty, self.late)
        if recipe.blocks:
            self.phase = phase
            self._publish(step, phase)
        else:
            self._conclude(phase, step)

    def proceed(self, step: int) -> None:
        """Conclude the outer step that waits for partners, with what was delivered meanwhile."""
        phase, self.phase = self.phase, None
        assert phase is not None
        self._conclude(phase, step)

    def _conclude(self, phase: OuterPhase, step: int) -> None:
        self.states = phase.conclude()
        if self.late:
            self.late = list(phase.gradients)
        self._begin_phase(step + 1, [state.slow for state in phase.before], phase)

    def _begin_phase(self, step: int, before: Sequence[Tensor], phase: OuterPhase | None = None) -> None:
        """Let the next inner phase begin at the slow weights, and show them; ``before``: those of the last phase."""
        if self._payloads.lacks_widths:
            self._payloads.predict_widths(x - old for x, old in zip(self._slow, before, strict=True))
        if self._rules.recipe.outer != "hand_over" or self._rules.recipe.exchanges:
            self._load(self._slow)
            self._guard.begin()
        self._publish(step, phase)

    def restart_phase(self, step: int, why: str) -> None:
        """Drop the fast weights of this inner phase, which begins again at the slow ones.

        As with a faulty phase, what displacements of theta have not yet given x is lost.
        """
        self._notebook.note("discarded", step=step + 1, why=why)
        self._load(self._slow)
        self._guard.begin()
        self._publish(step)

    def _adapt(self, adaptive: AdaptiveRank) -> None:
        """Choose rank and H of the next phase by the effective rank of the average that this outer step uses."""
        terms = [self._payloads.terms(len(self.states) + fragment) for fragment in range(len(self.states))]
        ranks = [weighted_ranks(g, each) for g, each in zip(self.late, terms, strict=True)]
        weighted, counted = zip(*ranks, strict=True)
        if rank := math.fsum(weighted) / max(1.0, math.fsum(counted)):
            adaptive.follow(rank)
            self._payloads.rank, self.inner_steps = adaptive.rank, adaptive.inner_steps

    # --- a showing ----------------------------------------------------------------------------------------------------

    def show(self, step: int) -> None:
        """Publish the fast weights in the middle of a phase, beside the slow ones, unless the phase has failed."""
        if self._guard.fault_so_far(self.distance()) is not None:
            return
        fast = tuple(theta.clone() for theta in self._fast)
        if self._payloads.lacks_widths:
            self._payloads.predict_widths(theta - x for theta, x in zip(fast, self._slow, strict=True))
        self._payloads.publish(Snapshot(step, fast, self._payloads.published.slow, tuple(self._applied)))

    def _publish(self, step: int, phase: OuterPhase | None = None) -> None:
        """Publish, between phases, the slow weights and, if the recipe mixes them, the last pseudo-gradients.

        If their codec needs error feedback, the pseudo-gradients include what it left out before.

        Args:
            step: outer steps made so far.
            phase: the outer step that these weights and pseudo-gradients belong to; None: no outer step yet.
        """
        slow = tuple(self._slow if phase is None else (state.slow for state in phase.states))
        if phase is not None:
            gradients = phase.snapshots("pseudo_gradient")
        elif self.late:
            gradients = tuple(self.late)
        else:
            gradients = tuple(torch.zeros_like(part) for part in slow) if self._payloads.streams == 2 else ()
        if gradients and self._left_out:
            gradients = tuple(g + left for g, left in zip(gradients, self._left_out, strict=True))
        self._payloads.publish(Snapshot(step, slow + gradients, slow, tuple(self._applied)))

    # --- a displacement -----------------------------------------------------------------------------------------------

    def apply(self, ready: Displacement, step: int, ended: bool) -> None:
        """Displace what the recipe says (``outer_phase.ENTRIES``), and show the result.

        Args:
            step: outer steps made so far; pseudo-gradients of another one come too late.
            ended: whether the run is over. No later phase can then deliver what x does not take at once, so theta moves
                as x does on both sides.
        """
        difference, commit, rule = ready.difference, ready.commit, self._rules.outer
        ahead: dict[int, float] = {}  # L2 norms by which theta moves further than x
        for number, part, norm in zip(difference.fragments, difference.parts, difference.norms, strict=True):
            stream, fragment = self._payloads.place(number)
            if stream == "pseudo_gradient":
                self._remember_left_out(fragment, difference.mine, number)
            dx = displacement(part, commit.share, commit.clip_radius, norm)
            state = (self.states if self.phase is None else self.phase.states)[fragment]
            match entry_of(self._rules.recipe, stream, self.phase is not None):
                case Entry.ROUND:
                    assert self.phase is not None
                    self.phase.take(stream, fragment, dx)
                case Entry.ALIKE:
                    state = displaced(state, dx)
                    self._move(fragment, state, dx, state.slow, ready.serial)
                case Entry.FAST:
                    moved = dx if ready.follow == 1.0 else dx * ready.follow
                    taken = moved if ended else dx
                    shown = self._payloads.published.parts[fragment] + taken
                    self._move(fragment, displaced(state, moved), taken, shown, ready.serial)
                    ahead[fragment] = l2_distance(taken, moved)
                case _ if difference.mine.step != step:
                    pass
                case Entry.NEXT:
                    self._mix_late(fragment, dx)
                case Entry.MOMENTUM:
                    self._keep(fragment, late_momentum(state, dx))
                case Entry.AFTERWARDS:
                    state, follow = late_pseudo_gradient(state, dx, rule)
                    self._move(fragment, state, follow, state.slow, ready.serial)
        for fragment in sorted(ahead):
            self._guard.added(ahead[fragment])

    def _move(
        self,
        fragment: int,
        state: OuterState,
        taken: Tensor,  # [F]: displacement of theta
        shown: Tensor,  # [F]: weights that partners get
        serial: int,
    ) -> None:
        """Replace a fragment's state, displace its fast weights, and publish both.

        ``serial``: number of the displacement (``Payloads.expect``).
        """
        self._applied[fragment] = serial
        self._keep(fragment, state)
        if self._remote is None:
            self._task.theta[self._slices[fragment]].add_(taken)
        else:
            self._remote.add(self._slices[fragment], taken)
        published = self._payloads.published
        parts = (*published.parts[:fragment], shown, *published.parts[fragment + 1 :])
        slow = (*published.slow[:fragment], state.slow, *published.slow[fragment + 1 :])
        self._payloads.publish(Snapshot(published.step, parts, slow, tuple(self._applied)))

    def _keep(self, fragment: int, state: OuterState) -> None:
        """Replace a fragment's state."""
        if self.phase is not None:
            self.phase.states[fragment] = state
        else:
            self.states = (*self.states[:fragment], state, *self.states[fragment + 1 :])

    def _mix_late(
        self,
        fragment: int,
        dx: Tensor,  # [F]
    ) -> None:
        """Displace a fragment's late pseudo-gradient; partners from now on get the result."""
        self.late[fragment] = self.late[fragment] + dx
        published, number = self._payloads.published, len(self.states) + fragment
        parts = (*published.parts[:number], self.late[fragment], *published.parts[number + 1 :])
        self._payloads.publish(Snapshot(published.step, parts, published.slow, published.applied))

    def _remember_left_out(self, fragment: int, mine: Encoded, number: int) -> None:
        """Store the part of a fragment that a message to a partner omitted; later messages add it (error feedback)."""
        codec, place, published = self._payloads.codec(number), mine.fragments.index(number), self._payloads.published
        if self._left_out and is_decodable(codec) and mine.step == published.step:
            said = codec.decode(mine.parts[place], mine.terms[place])
            self._left_out[fragment] = published.parts[number] - said

    # --- an adoption --------------------------------------------------------------------------------------------------

    def adopt(
        self,
        slow: Sequence[Tensor],  # [F] each
        step: int,
    ) -> None:
        """Restart from a donor's weights, and drop everything that belongs to the old ones."""
        self.states = tuple(initial_state(weights) for weights in slow)
        self.phase = None
        self._left_out = [torch.zeros_like(part) for part in self._left_out]
        self.late = [torch.zeros_like(part) for part in self.late]
        self._load(self._slow)
        self._payloads.forget_fits()
        self._guard.forget()
        self._publish(step)

    def try_on(self, weights: Sequence[Tensor], tell: Callable[[], T]) -> T:
        """Return the result of ``tell`` with these weights, [F] each, as the fast ones; restore the fast weights."""
        self._fetch()
        ours = [theta.clone() for theta in self._fast]
        try:
            self._load(weights)
            return tell()
        finally:
            self._load(ours)

    def at_slow(self, tell: Callable[[], T]) -> T:
        """Return the result of ``tell`` with the slow weights as the fast ones."""
        return self.try_on(self._slow, tell)

    def _load(
        self,
        parts: Sequence[Tensor],  # [F] each
    ) -> None:
        """Replace the fast weights."""
        for theta, part in zip(self._fast, parts, strict=True):
            theta.copy_(part)
        if self._remote is not None:
            self._remote.load()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        """Return everything that a resumed peer needs: tensors, [P] each, views of live memory, and JSON values."""
        tensors: dict[str, Saved] = {
            "slow": self._slow,
            "momentum": [state.momentum for state in self.states],
            "theta": self._task.theta.detach(),
            **({"left_out": list(self._left_out)} if self._left_out else {}),
            **({"late": list(self.late)} if self.late else {}),
        }
        ranks = {} if self._adaptive is None else {"effective_ranks": list(self._adaptive.effective_ranks)}
        return tensors, {**self._guard.state_dict(), **ranks}

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], step: int) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit."""
        slow, momentum, theta = tensors["slow"], tensors["momentum"], tensors["theta"]
        if not slow.shape == momentum.shape == theta.shape == self._task.theta.shape:
            raise ValueError(f"{tuple(slow.shape)} weights, but the model has {tuple(self._task.theta.shape)}")
        self.states = tuple(OuterState(slow[piece].clone(), momentum[piece].clone()) for piece in self._slices)
        if self._left_out:
            self._left_out = [tensors["left_out"][piece].clone() for piece in self._slices]
        if self.late:
            self.late = [tensors["late"][piece].clone() for piece in self._slices]
        self._guard.load_state_dict(numbers)
        if self._adaptive is not None:
            self._adaptive.resume(numbers["effective_ranks"])
            self._payloads.rank, self.inner_steps = self._adaptive.rank, self._adaptive.inner_steps
        self._load([theta[piece] for piece in self._slices])
        self._publish(step)
