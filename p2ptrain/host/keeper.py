"""Keeper: the learner of a peer that holds some fragments and does not train (``swarm.keeping``).

It has the slow weights of its fragments in fp32 and nothing else: no model, no momentum, no optimizer. Other fragments
are empty tensors. Threads meet as in ``host.learner``: the training thread calls ``settle`` and is the only writer.

Legend: F elements of one fragment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from p2ptrain.codec import Codec, Matrices
from p2ptrain.host.inbox import NOT_HELD, Adoption, Delivery, Displacement, Inbox
from p2ptrain.host.payloads import Payloads, Snapshot
from p2ptrain.outer.mixing import displacement
from p2ptrain.ports import Clock
from p2ptrain.recipes import Recipe, Stream
from p2ptrain.swarm.events import Adopted, Applied, Event
from p2ptrain.swarm.keeping import ranges_of

if TYPE_CHECKING:
    from p2ptrain.ports import Saved


T = TypeVar("T")


class Keeper:
    """Weights of some fragments that follow the trainers' average.

    Args:
        fragments: slices of [0, P), one per fragment of the model.
        held: those that this peer holds.
        codec: for weights in exchanges.
        matrices: the matrices in each fragment (``rules.matrices_of``).
        recipe: the run's.
    """

    ended = False
    is_waiting = is_away = is_ahead = False
    tokens = 0
    loss = float("nan")
    longest_blocked_s = 0.0
    inner_step_s = 0.0

    def __init__(
        self,
        fragments: Sequence[slice],
        held: frozenset[int],
        codec: Codec,
        matrices: Sequence[Matrices],
        recipe: Recipe,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.held = held
        lengths = [piece.stop - piece.start for piece in fragments]
        shown: Stream = "slow" if recipe.mix("fast") is None else "fast"
        self.payloads = Payloads(lengths, codec, None, matrices, shown, adds_pending=True, held=held)
        self.inbox = Inbox(1.0, self.payloads)
        self.step = 0
        self.progress = 0.0
        self.progress_displacement = 0.0
        self.peers = 1.0
        self.changes = 0
        self.blocked_s = 0.0
        self._lengths = lengths
        self._clock = clock
        self._slow = [torch.zeros(length) if each in held else NOT_HELD for each, length in enumerate(lengths)]
        self._applied = [0] * len(lengths)
        self._publish()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without copies on their way."""
        return sum(4 * part.numel() for part in self._slow)

    def advance(self, runs_ahead: bool = False) -> list[Event]:
        """Apply what is ready: a keeper makes no inner steps."""
        return self.settle()

    def settle(self, wait_s: float = 0.0) -> list[Event]:
        """Apply what is ready; wait up to ``wait_s`` seconds for the first entry or for ``inbox.wake``."""
        events: list[Event] = []
        deliveries = deque(self.inbox.drain(wait_s))
        started = self._clock()
        while deliveries:
            match deliveries.popleft():
                case Displacement() as ready:
                    events.append(self._apply(ready))
                case Adoption() as ready:
                    events.extend(self._adopt(ready, deliveries))
        self.blocked_s += self._clock() - started
        return events

    def _apply(self, ready: Displacement) -> Applied:
        commit = ready.commit
        found = ready.difference
        for fragment, part, norm in zip(found.fragments, found.parts, found.norms, strict=True):
            self._slow[fragment] = self._slow[fragment] + displacement(part, commit.share, commit.clip_radius, norm)
            self._applied[fragment] = ready.serial
        if commit.keeper_step is not None:
            self.step = max(self.step, commit.keeper_step)  # checkpoints are named by it
        self._publish()
        self.payloads.settle(ready.serial)
        self.progress += commit.progress_displacement
        self.progress_displacement += commit.progress_displacement
        self.changes += 1
        return Applied(commit.link, self.progress)

    def _adopt(self, ready: Adoption, later: deque[Delivery]) -> list[Event]:
        """Replace the weights by donors', and drop what was based on the old ones."""
        stale = self.inbox.drop(tuple(later))
        later.clear()
        self._slow = [part if each in self.held else NOT_HELD for each, part in enumerate(ready.weights)]
        self.payloads.forget_fits()
        self.step, self.progress = ready.step, ready.progress
        self.changes += 1
        self._publish()
        return [*(Applied(link, self.progress) for link in stale), Adopted(ready.link, self.step, self.progress)]

    def _publish(self) -> None:
        slow = tuple(self._slow)
        self.payloads.publish(Snapshot(self.step, slow, slow, tuple(self._applied)))

    # --- checkpoints (training thread) --------------------------------------------------------------------------------

    def at_slow(self, tell: Callable[[], T]) -> T:
        return tell()

    def state_dict(self) -> tuple[dict[str, Saved], dict[str, Any]]:
        """Return everything that a resumed keeper needs."""
        tensors: dict[str, Saved] = {f"kept.{each}": self._slow[each] for each in sorted(self.held)}
        kept = [list(each) for each in ranges_of(self.held)]
        return tensors, {"step": self.step, "progress": self.progress, "kept": kept}

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit."""
        parts = {each: tensors[f"kept.{each}"] for each in sorted(self.held)}
        for each, part in parts.items():
            if part.shape != (self._lengths[each],):
                raise ValueError(f"fragment {each} has {self._lengths[each]:,} weights, but {part.numel():,} are saved")
        step, progress = int(numbers["step"]), float(numbers["progress"])
        for each, part in parts.items():
            self._slow[each] = part.clone()
        self.step, self.progress = step, progress
        self._publish()
