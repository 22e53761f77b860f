"""1F1B: the order in which a stage computes micro-batches forward and backward (Narayanan et al., arXiv 2104.04473).

A stage first computes some micro-batches forward, then one backward and one forward in turn, then the rest backward::

    stage 0    F0 F1 F2 B0 F3 B1 F4 B2    B3    B4
    stage 1       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

Every stage computes backward in the order of the micro-batches, so gradients are summed as in one process, whatever
the number of first ones, the warm-up. With ``S - s`` of them on stage s of S (Narayanan et al.) stages wait for each
other's tensors; with ``2 (S - s) - 1`` (eager 1F1B: Zhuang et al., arXiv 2211.05322) tensors travel meanwhile.

Activations and gradients travel in groups of their own, because one gloo connection carries one direction at a time: in
a single group a line of 100 Mbit/s each way moves 48 + 48 Mbit/s, in two 91 + 91 (our measurement). Sends do not wait,
and receives begin before their tensor is needed. Shapes are known, so nothing is asked for or pickled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from p2ptrain.train.team_group import Direction, TeamGroup, TensorTransfer

RECEIVES_AHEAD = 2
"""Tensors of each direction that may arrive before they are needed. Guess: lines of other rates and delays would settle
it."""

Computation = tuple[Literal["forward", "backward"], int]
"""What to compute next, of which micro-batch."""


class StageComputation(Protocol):
    """What a stage computes of one step's micro-batches; each forward first, in their order, then backward."""

    def buffer(self) -> Tensor:
        """Return memory for what another stage sends, on the host."""
        ...

    def forward(self, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """Return activations for the next stage; the last one returns None, the first one receives None."""
        ...

    def backward(self, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """Return a gradient for the stage before; the first one returns None, the last one receives None."""
        ...


def warm_up(stage: int, stages: int, micro_batches: int, is_eager: bool) -> int:
    """Return the micro-batches that a stage computes forward before the first backward: the most that it keeps."""
    after = stages - stage
    return min(micro_batches, 2 * after - 1 if is_eager else after)


def computations(first: int, micro_batches: int) -> Iterator[Computation]:
    """Yield what a stage computes, in order, after a warm-up of ``first`` micro-batches."""
    for index in range(first):
        yield "forward", index
    for index in range(micro_batches):
        yield "backward", index
        if first + index < micro_batches:
            yield "forward", first + index


@dataclass(slots=True)
class Receiver:
    """Tensors of one direction from a neighbour, received ahead."""

    group: TeamGroup
    direction: Direction
    source: int | None
    """Rank; None: nothing comes from this side."""
    micro_batches: int
    what: str
    """Name of the step and the tensors, for errors."""
    computation: StageComputation
    _coming: deque[TensorTransfer] = field(default_factory=deque)
    _begun: int = 0

    def begin(self) -> None:
        """Begin to receive up to ``RECEIVES_AHEAD`` tensors."""
        while self.source is not None and len(self._coming) < RECEIVES_AHEAD and self._begun < self.micro_batches:
            name = f"{self.what} of micro-batch {self._begun} from rank {self.source}"
            buffer = self.computation.buffer()
            self._coming.append(self.group.begin_receive(name, buffer, self.source, self.direction, self._begun))
            self._begun += 1

    def next(self) -> Tensor | None:
        """Wait for the next tensor. Raises TeamError."""
        if self.source is None:
            return None
        received = self._coming.popleft().wait()
        self.begin()
        return received


def run_schedule(
    name: str,  # of the step, for errors
    group: TeamGroup,  # one rank per stage, in their order
    micro_batches: int,
    computation: StageComputation,
    is_eager: bool = True,
) -> None:
    """Compute one step's micro-batches on this rank's stage, a collective. Raises TeamError."""
    stage, last = group.rank, group.size - 1
    before, after = (stage - 1 if stage else None), (stage + 1 if stage < last else None)
    activations = Receiver(group, "forward", before, micro_batches, f"{name}, activations", computation)
    gradients = Receiver(group, "backward", after, micro_batches, f"{name}, gradient", computation)
    activations.begin()
    gradients.begin()
    sends = deque[TensorTransfer]()
    most_sends = 4 * group.size  # both neighbours have received older ones, or no tensor of ours keeps them from it
    for what, index in computations(warm_up(stage, group.size, micro_batches, is_eager), micro_batches):
        if what == "forward":
            sent, to, kind = computation.forward(index, activations.next()), after, "activations"
        else:
            sent, to, kind = computation.backward(index, gradients.next()), before, "gradient"
        if sent is not None and to is not None:
            title = f"{name}, {kind} of micro-batch {index} to rank {to}"
            sends.append(group.begin_send(title, sent, to, what, index))
        if len(sends) > most_sends:
            sends.popleft().wait()
    for each in sends:
        each.wait()
