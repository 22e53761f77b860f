"""Data parallelism within a team: several replicas of the pipeline, each with its share of an inner step's sequences.

The ranks of a team are a mesh of replicas and stages. The first replica's ranks lead: each runs the ``Learner`` of its
stage. The others hold weights, gradient and moments alone. Before an inner step the leading rank of a stage tells them
the progress, and sends weights and moments if anything but inner steps has changed them since. In it, the stage's ranks
add their gradients in the order of the replicas, and all take the same step: they stay bitwise equal.

The sum over replicas is that of one process in another order: of the micro-batches of each replica first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from p2ptrain.base.errors import TeamError
from p2ptrain.train.inner import ArrivingStepResult
from p2ptrain.train.pipeline import HOST, PipelineTask
from p2ptrain.train.team_group import TeamGroup

SLICE = 1 << 24
"""Elements of a vector that are on their way at once: 64 MB."""
PATIENCE_S = 10 * 365 * 86_400.0
"""Longest wait for the next inner step. Silence means nothing while a peer rests or evaluates; a leading rank that dies
closes its connections, and the leader misses one that freezes."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Arrangement of a team's ranks: rank = replica x stages + stage."""

    stages: int
    replicas: int = 1

    @classmethod
    def of(cls, ranks: int, stages: int) -> Mesh:
        """Return the mesh of so many ranks. Raises ValueError if the stages do not divide them."""
        if stages < 1 or ranks % stages:
            raise ValueError(f"{stages} stages do not divide {ranks} ranks")
        return cls(stages, ranks // stages)

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return stages if self.replicas == 1 else f"{self.replicas} replicas of {stages}"

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    def stage(self, rank: int) -> int:
        return rank % self.stages

    def replica(self, rank: int) -> int:
        return rank // self.stages

    @property
    def pipelines(self) -> list[range]:
        """Ranks of each replica."""
        return [range(first, first + self.stages) for first in range(0, self.ranks, self.stages)]

    @property
    def columns(self) -> list[range]:
        """Ranks of each stage."""
        return [range(stage, self.ranks, self.stages) for stage in range(self.stages)]


def shares(micro_batches: int, stages: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Return how many micro-batches each replica computes, so that the slowest takes as little time as possible.

    Each has at least as many as stages, which 1F1B needs. Raises ValueError if there are too few.

    Args:
        seconds: of one micro-batch in the slowest stage of each replica.
    """
    counts = [stages] * len(seconds)
    if micro_batches < sum(counts):
        raise ValueError(f"{micro_batches} micro-batches are too few for {len(seconds)} replicas of {stages} stages")
    ends = [((2 * stages) * each, replica) for replica, each in enumerate(seconds)]  # with one more, and the bubble
    heapq.heapify(ends)
    for _ in range(micro_batches - sum(counts)):
        end_s, replica = ends[0]
        counts[replica] += 1
        heapq.heapreplace(ends, (end_s + seconds[replica], replica))
    return tuple(counts)


class Replicas:
    """The ranks that train one stage on different sequences, as one of them sees them.

    Args:
        data: the ranks, in the order of the replicas.
        counts: micro-batches of each replica (``shares``).
    """

    def __init__(self, data: TeamGroup, counts: Sequence[int]) -> None:
        self._data = data
        self._counts = tuple(counts)

    @classmethod
    def of(cls, team: TeamGroup, mesh: Mesh, counts: Sequence[int]) -> Replicas:
        """Connect the ranks of each stage, a collective of all ranks of the team."""
        return cls(team.part("connecting the replicas", mesh.columns), counts)

    @property
    def leads(self) -> bool:
        return self._data.rank == 0

    @property
    def own(self) -> range:
        """Micro-batches of this replica."""
        begin = sum(self._counts[: self._data.rank])
        return range(begin, begin + self._counts[self._data.rank])

    def sum(
        self,
        name: str,
        values: Tensor,  # [k] on any device; overwritten
    ) -> None:
        """Replace the values by their sums over the replicas, the same bits on each. Raises TeamError."""
        for piece in values.split(SLICE):
            total = self._data.sum_in_order(name, piece.to(HOST))
            if total.data_ptr() != piece.data_ptr():
                piece.copy_(total)

    def copy_first(
        self,
        name: str,
        values: Tensor,  # [k] on any device; overwritten on all replicas but the first
    ) -> None:
        """Replace the values by those of the first replica. Raises TeamError."""
        for piece in values.split(SLICE):
            copied = self._data.copy_first(name, piece.to(HOST))
            if not self.leads and copied.data_ptr() != piece.data_ptr():
                piece.copy_(copied)

    def order(self, name: str, numbers: Sequence[float]) -> list[float]:
        """Return the first replica's numbers; the others wait for them as long as it takes. Raises TeamError."""
        values = torch.tensor(numbers, dtype=torch.float64)
        if not self.leads:
            return self._data.receive(name, values, 0, PATIENCE_S).tolist()
        for replica in range(1, self._data.size):
            self._data.send(name, values, replica)
        return values.tolist()


class ReplicatedTask(PipelineTask):
    """``PipelineTask`` of one of several replicas; ``inner_step`` is a collective of all ranks of the team.

    The first replica's is the inner task of a ``Learner``; the others call ``follow_replica``.
    """

    _sent_version: int | None = None
    """Version of theta that the other replicas have; torch counts writes to a tensor and its views."""
    _has_new_state = False

    def inner_step(self, progress: float) -> ArrivingStepResult:
        replicas, name = self._replicas, f"inner step {self.step}: replicas"
        has_weights, has_state = self._version != self._sent_version, self._has_new_state
        replicas.order(name, [progress, has_weights, has_state])
        self._receive(name, has_weights, has_state)
        result = super().inner_step(progress)
        self._sent_version, self._has_new_state = self._version, False
        return result

    def follow_replica(self) -> NoReturn:
        """Make the inner steps that the first replica makes. Raises TeamError, also when that one ends."""
        while True:
            name = f"inner step {self.step}: replicas"
            progress, has_weights, has_state = self._replicas.order(name, [0.0, 0.0, 0.0])
            if not math.isfinite(progress) or not {has_weights, has_state} <= {0.0, 1.0}:
                raise TeamError(name, "the first replica's order is invalid")
            self._receive(name, bool(has_weights), bool(has_state))
            super().inner_step(progress)

    def reset(self, warmup_steps: int) -> None:
        super().reset(warmup_steps)
        self._has_new_state = True

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._has_new_state = True

    @property
    def _version(self) -> int:
        return self.theta._version

    @property
    def _replicas(self) -> Replicas:
        assert self.replicas is not None
        return self.replicas

    def _receive(self, name: str, has_weights: bool, has_state: bool) -> None:
        """Copy what has changed at the first replica."""
        if has_weights:
            self._replicas.copy_first(f"{name}: weights", self.theta)
        if has_state:
            state = self.state_dict()
            for part in state.values():
                self._replicas.copy_first(f"{name}: moments", part)
            if not self._replicas.leads:
                super().load_state_dict(state)
