"""The ranks of one trainer on several devices: a mesh of replicas and stages over torch.distributed.

torch's launcher has started them (``torch.distributed.run``). Rank 0 speaks with the node; ``Ranks.follow`` lets the
others do what it does. Small numbers and what stages evaluate travel by gloo, gradients on cards by NCCL.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from p2ptrain.base.errors import DeviceError, UserError

T = TypeVar("T")
Json = Any
"""What JSON can hold."""
Answer = Callable[..., Any]
HOST = torch.device("cpu")
MOST_BYTES = 1 << 20
"""Longest message between ranks."""

PATIENCE = timedelta(seconds=600)
"""Longest wait for another rank in a collective; torch's launcher ends all ranks once one has died. Guess: the slowest
micro-batch of a computer that swaps."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Arrangement of the ranks: rank = replica x stages + stage."""

    stages: int = 1
    replicas: int = 1

    @classmethod
    def of(cls, ranks: int, stages: int) -> Self:
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


def backend_of(kinds: set[str]) -> str:
    """Return torch's backend for collectives on devices of these kinds; gloo needs their tensors on the host."""
    if kinds == {"cuda"} and dist.is_nccl_available():
        return "nccl"
    return "xccl" if kinds == {"xpu"} and dist.is_xccl_available() else "gloo"


class Ranks:
    """This process's place in the mesh, and its collectives."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = Mesh(1, self.size)
        self._host = dist.group.WORLD
        """All ranks, for tensors on the host."""
        self._backend = "gloo"

    def arrange(self, mesh: Mesh, device: torch.device = HOST) -> None:
        """Arrange the ranks, a collective of all. Raises ValueError if there are more or fewer.

        ``device``: this rank's. Raises DeviceError if stages have devices of several kinds.
        """
        if self.size != mesh.ranks:
            raise ValueError(f"{self.size} ranks cannot be {mesh}")
        self.mesh = mesh
        kinds = set(self.gather(device.type))
        if mesh.stages > 1 and len(kinds) > 1:
            raise DeviceError(
                f"Stages on devices of several kinds ({', '.join(sorted(kinds))}) cannot exchange activations.",
                "Name devices of one kind, or give --stages 1.",
            )
        self._backend = backend_of(kinds)
        pipelines = [range(first, first + mesh.stages) for first in range(0, mesh.ranks, mesh.stages)]
        columns = [range(stage, mesh.ranks, mesh.stages) for stage in range(mesh.stages)]
        self.pipeline, self._pipeline_host = self._part(pipelines)
        self._column, _ = self._part(columns)

    def _part(self, parts: Sequence[range]) -> tuple[Any, Any]:
        """Return this rank's group of the parts, on devices and on the host; a collective of all ranks."""
        own: tuple[Any, Any] = None, None
        for part in parts:
            ranks = list(part)
            host = dist.new_group(ranks, timeout=PATIENCE, backend="gloo")
            on_device = host
            if self._backend != "gloo":
                on_device = dist.new_group(ranks, timeout=PATIENCE, backend=self._backend)
            own = (on_device, host) if self.rank in part else own
        return own

    @property
    def stage(self) -> int:
        return self.mesh.stage(self.rank)

    @property
    def replica(self) -> int:
        return self.mesh.replica(self.rank)

    # --- all ranks ----------------------------------------------------------------------------------------------------

    def share(self, value: Json) -> Any:
        """Return what rank 0 gives."""
        data = _bytes(value)
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=self._host)
        if self.rank:
            data = torch.zeros(_checked(int(length)), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._host)
        return json.loads(bytes(data))

    def gather(self, value: Json) -> list[Any]:
        """Return what each rank gives, in order."""
        data = _bytes(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._host)
        longest = _checked(max(int(each) for each in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self._host)
        return [json.loads(bytes(each[: int(length)])) for each, length in zip(found, lengths, strict=True)]

    def in_turn(self, measure: Callable[[], Json]) -> list[Any]:
        """Return what each rank measures, one after the other."""
        own: Json = None
        for rank in range(self.size):
            if rank == self.rank:
                own = measure()
            dist.barrier(group=self._host)
        return self.gather(own)

    def together(self, name: str, answer: Answer) -> Answer:
        """Return rank 0's answer to a question, after all ranks have answered; see ``follow``."""

        def answered(**arguments: Json) -> Any:
            self.share([name, arguments])
            found = answer(**arguments)
            dist.barrier(group=self._host)  # the node may then read or change all weights
            return found

        return answered

    def follow(self, answers: Mapping[str, Answer]) -> None:
        """Answer what rank 0 answers, until it calls ``end``. Raises RuntimeError if it dies, from a collective."""
        while (asked := self.share(None)) is not None:
            name, arguments = asked
            answers[name](**arguments)
            dist.barrier(group=self._host)

    def end(self) -> None:
        """End the others' ``follow``."""
        with contextlib.suppress(RuntimeError):  # one has died
            self.share(None)

    def all_or_none(self, make: Callable[[], T]) -> T:
        """Return what this rank makes; if one rank cannot, all raise its UserError."""
        made, problem = list[T](), None
        try:
            made.append(make())
        except UserError as error:
            problem = [error.problem, error.remedy]
        for rank, found in enumerate(self.gather(problem)):
            if found is not None:
                whose = "" if rank == self.rank else f"Rank {rank}: "
                raise UserError(whose + str(found[0]), str(found[1]))
        return made[0]

    def send_to(self, values: Tensor, rank: int) -> None:
        """Send values on the host to another rank."""
        dist.send(values, rank, group=self._host)

    def receive_from(self, buffer: Tensor, rank: int) -> None:
        """Fill a contiguous buffer on the host with what another rank sends."""
        dist.recv(buffer, rank, group=self._host)

    def broadcast(self, values: Tensor, within_replica: bool = False) -> Tensor:
        """Return values on the host that rank 0 gives, a collective of all ranks, or of those of the first replica.

        Others give a tensor of their shape and type, which is overwritten.
        """
        dist.broadcast(values, group=self._pipeline_host if within_replica else self._host, group_src=0)
        return values

    # --- this replica's stages, this stage's replicas -----------------------------------------------------------------

    def send(self, values: Tensor, stage: int) -> None:
        """Send values on the host to another stage of this replica."""
        dist.send(values.contiguous(), group=self._pipeline_host, group_dst=stage)

    def receive(self, buffer: Tensor, stage: int) -> Tensor:
        """Fill a buffer on the host with what another stage of this replica sends; return it."""
        dist.recv(buffer, group=self._pipeline_host, group_src=stage)
        return buffer

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums over this replica's stages of values on the host; overwrites them."""
        dist.all_reduce(values, group=self._pipeline_host)
        return values

    def sum_replicas(self, values: Tensor) -> None:
        """Replace values, on the device, by their sums over this stage's replicas."""
        if self.mesh.replicas == 1:
            return
        if values.device != HOST and self._backend == "gloo":
            on_host = values.to(HOST)
            dist.all_reduce(on_host, group=self._column)
            values.copy_(on_host)
        else:
            dist.all_reduce(values, group=self._column)


def _bytes(value: Json) -> Tensor:
    """Return a value as JSON, [k] uint8; torch's own collectives of objects would run what another rank pickles."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _checked(length: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise ValueError(f"another rank says {length} bytes")
    return length


def is_lost(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has ended, as torch's backends report it."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def launched_ranks() -> int:
    """Return how many ranks torch's launcher has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))
