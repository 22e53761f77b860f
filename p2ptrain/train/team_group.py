"""Collectives among the ranks of one team: torch's gloo over the loopback interface, with timeouts and names.

Every call that waits for other ranks has the group's timeout and a name, which the error of a failed one states. A rank
that dies closes its connections, which the others notice at once; one that freezes is noticed after the timeout.

A group serves one generation: after an error it is closed, and the ranks that live and those that replace the dead
connect to a new one. Its rendezvous is a file in a folder of the owner's, so nothing listens but gloo, on loopback
alone; ranks on several computers meet through ``team.store`` and listen on one private address. Objects are never sent,
because torch would pickle them.
"""

from __future__ import annotations

import copy
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar, get_args

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from p2ptrain.base.errors import TeamError

T = TypeVar("T")

Direction = Literal["forward", "backward"]
"""Direction of tensors between stages; each has a group, since one gloo connection carries one direction at a time."""

HEARTBEAT_S = 2.0
"""Seconds between signs of life of ranks that wait: shorter than a group's timeout, so that silence means a failure."""

COMING_POLL_S = 0.02
"""Seconds between two looks at which ranks have come."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable that tells gloo where to listen."""


RENDEZVOUS_TIMEOUT = "Wait timeout"
"""Message of torch's FileStore where a rank does not come in time."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one generation of a team meet, and one rank's place among them."""

    folder: Path
    """Folder of the rendezvous files, which only the owner can write to."""
    rank: int
    size: int
    generation: int = 0
    """Number of the group among those of this team; a group of another number never meets this one."""
    store: dist.Store | None = None
    """Rendezvous of several computers; None: a file in ``folder``."""
    interface: str | None = None
    """Network interface of the connections; None: loopback."""

    @property
    def file(self) -> Path:
        return self.folder / f"generation-{self.generation}.rendezvous"


class TeamGroup:
    """Connected ranks of one generation. Owned by the trainer thread; a process has one at a time.

    Args:
        rendezvous: this rank.
        timeout_s: longest wait for another rank, in the constructor and in each collective.
        is_stopping: whether to give up waiting for the others to come.

    Raises TeamError if not all ranks connect in time.
    """

    def __init__(
        self, rendezvous: Rendezvous, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.timeout_s = timeout_s
        self.within: dist.ProcessGroup | None = None
        """The group among all connected ranks; None: all of them."""
        self._parts: list[TeamGroup] = []
        self.is_local = rendezvous.store is None
        """Whether all ranks are on one computer."""
        wait = timedelta(seconds=timeout_s)
        interface = rendezvous.interface or loopback_interface()
        with self.named("connecting the team"), _gloo_on(interface):
            store = rendezvous.store or dist.FileStore(str(rendezvous.file), self.size)
            self._await_ranks(store, is_stopping)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=wait)
            self._directions = self._joined([range(self.size)])

    def part(self, name: str, parts: Sequence[Sequence[int]]) -> TeamGroup:
        """Return this rank's group among ``parts`` of the team, a collective of all ranks; ``close`` ends it, too.

        Args:
            name: of the connection, for errors.
            parts: numbers of ranks; each rank is in one of them, and counts from 0 in their order.
        """
        group = copy.copy(self)
        own = next(part for part in parts if self.rank in part)
        group.rank, group.size = own.index(self.rank), len(own)
        with self.named(name), _gloo_on(loopback_interface()):
            for part in parts:
                made = dist.new_group(list(part), timeout=timedelta(seconds=self.timeout_s), backend="gloo")
                group.within = made if part is own else group.within
            group._directions = self._joined(parts)
        self._parts.append(group)
        return group

    def _joined(self, parts: Sequence[Sequence[int]]) -> dict[Direction, dist.ProcessGroup]:
        """Return the groups of both directions among this rank's part."""
        found: dict[Direction, dist.ProcessGroup] = {}
        for direction, part in product(get_args(Direction), parts):
            made = dist.new_group(list(part), timeout=timedelta(seconds=self.timeout_s), backend="gloo")
            if self.rank in part:
                found[direction] = made
        return found

    def _await_ranks(self, store: dist.Store, is_stopping: Callable[[], bool]) -> None:
        """Wait until all ranks are there, a wait that can be given up, unlike torch's. Raises TeamError."""
        until, keys = time.monotonic() + self.timeout_s, [f"here-{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], "")
        while missing := [key for key in keys if not store.check([key])]:
            if is_stopping() or time.monotonic() >= until:
                why = "the owner stops this peer" if is_stopping() else f"ranks did not come in {self.timeout_s:.0f} s"
                raise TeamError("connecting the team", f"{why}: {', '.join(missing).replace('here-', 'rank ')}")
            time.sleep(COMING_POLL_S)

    def close(self) -> None:
        """Disconnect, so that the other ranks notice at once; waits for nobody. Safe to call twice."""
        self._directions.clear()  # gloo closes connections only when nothing refers to their group
        while self._parts:
            part = self._parts.pop()
            part.within = None
            part._directions.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Raise TeamError with this name where the connection to another rank fails in the body.

        After any error there the ranks are no longer at one point of the program, and the group must be closed.
        """
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            _release_frames(error)
            if not isinstance(error, RuntimeError) or not is_connection_failure(error):
                raise
            reason = str(error).partition("\n")[0]
            seconds = time.monotonic() - began
            raise TeamError(name, f"rank {self.rank} of {self.size} gave up after {seconds:.1f} s: {reason}") from error

    def together(self, name: str, work: Callable[[], T]) -> T:
        """Do work that takes each rank its own time, such as reading a file; return once all ranks are done.

        Every ``HEARTBEAT_S`` the ranks hear from each other, so that the group's timeout means that one has failed, not
        that it is slow. ``work`` runs in a thread and uses no collective; what it raises ends this rank's team.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="together") as worker:
            future = worker.submit(work)
            while True:
                wait([future], HEARTBEAT_S)
                if self.least(name, future.done()):
                    return future.result()

    def sum(
        self,
        name: str,
        values: Tensor,  # on the CPU, equally long on all ranks; overwritten
    ) -> Tensor:
        """All-reduce: return the sums over the ranks, the same bits on each."""
        with self.named(name):
            dist.all_reduce(values, group=self.within)
        return values

    def least(self, name: str, number: int) -> int:
        """Return the least number of all ranks."""
        values = torch.tensor([number], dtype=torch.int64)
        with self.named(name):
            dist.all_reduce(values, dist.ReduceOp.MIN, group=self.within)
        return int(values)

    def gather(
        self,
        name: str,
        values: Tensor,  # [k] on the CPU; k may differ between ranks
    ) -> Tensor:
        """All-gather: return the values of all ranks in the order of the ranks, the same bits on each."""
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(values)
        self.sum(name, counts)
        parts = [torch.empty(int(counts.max()), dtype=values.dtype) for _ in range(self.size)]
        padded = torch.zeros_like(parts[0])
        padded[: len(values)] = values
        with self.named(name):
            dist.all_gather(parts, padded, group=self.within)
        return torch.cat([part[:length] for part, length in zip(parts, counts.tolist(), strict=True)])

    def broadcast(self, name: str, body: bytes, at_most: int) -> bytes:
        """Return rank 0's bytes on all ranks; the others' are not read.

        Raises ValueError, on all ranks, if they are more than ``at_most``.
        """
        length = torch.tensor([len(body)], dtype=torch.int64)
        with self.named(name):
            dist.broadcast(length, group=self.within, group_src=0)
            if length > at_most:
                raise ValueError(f"{name}: {int(length)} bytes, at most {at_most} expected")
            values = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == 0:
                values.numpy()[:] = memoryview(body)
            if len(values):
                dist.broadcast(values, group=self.within, group_src=0)
        return values.numpy().tobytes()

    def copy_first(
        self,
        name: str,
        values: Tensor,  # contiguous, on the CPU; overwritten on all ranks but the first
    ) -> Tensor:
        """Broadcast: return rank 0's values on all ranks."""
        with self.named(name):
            dist.broadcast(values, group=self.within, group_src=0)
        return values

    def sum_in_order(
        self,
        name: str,
        values: Tensor,  # [k] contiguous, on the CPU, equally long on all ranks; overwritten
    ) -> Tensor:
        """All-reduce that adds the ranks' values in the order of the ranks: return the sums, the same bits on each.

        Each rank adds one slice and gathers the others; gloo's own all-reduce begins each slice at another rank.
        """
        if self.size <= 2:  # two numbers have one order
            return self.sum(name, values)
        length = -(-len(values) // self.size)
        given = functional.pad(values, (0, length * self.size - len(values)))
        parts = torch.empty(self.size, length, dtype=values.dtype)
        with self.named(name):
            dist.all_to_all_single(parts.view(-1), given, group=self.within)
            total = parts[0]
            for part in parts[1:]:
                total += part
            dist.all_gather(list(given.view(self.size, length)), total, group=self.within)
        return values.copy_(given[: len(values)])

    def send(
        self,
        name: str,
        values: Tensor,  # contiguous, on the CPU
        to: int,
    ) -> None:
        with self.named(name):
            dist.send(values, group=self.within, group_dst=to)

    def receive(
        self,
        name: str,
        into: Tensor,  # contiguous, on the CPU; overwritten
        source: int,
        patience_s: float | None = None,  # None: the group's timeout
    ) -> Tensor:
        with self.named(name):
            if patience_s is None:
                dist.recv(into, group=self.within, group_src=source)
            else:
                coming = dist.irecv(into, group=self.within, group_src=source)
                assert coming is not None, "this rank is in the group"
                coming.wait(timedelta(seconds=patience_s))
        return into

    def begin_send(self, name: str, values: Tensor, to: int, direction: Direction, number: int) -> TensorTransfer:
        """Send values that do not change until the transfer ends, without waiting; see ``begin_receive``."""
        with self.named(name):
            work = dist.isend(values, group=self._directions[direction], tag=number, group_dst=to)
            return TensorTransfer(self, name, values, work)

    def begin_receive(self, name: str, into: Tensor, source: int, direction: Direction, number: int) -> TensorTransfer:
        """Receive without waiting.

        Args:
            into: contiguous, on the CPU; overwritten.
            number: by which sends and receives of one direction find each other.
        """
        with self.named(name):
            work = dist.irecv(into, group=self._directions[direction], tag=number, group_src=source)
            return TensorTransfer(self, name, into, work)


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """Values on their way to or from another rank, which must not be read or changed until ``wait`` returns."""

    group: TeamGroup
    name: str
    values: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Return the values once they have been sent or received. Raises TeamError."""
        assert self.work is not None, "this rank belongs to the group"
        with self.group.named(self.name):
            self.work.wait()
        return self.values


def _release_frames(error: BaseException) -> None:
    """Drop the local variables of the functions that failed, which would keep connections open and memory in use."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def is_connection_failure(error: RuntimeError) -> bool:
    """Return whether gloo, or a rendezvous, failed: a rank died, froze or never came."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error) or str(error).startswith(RENDEZVOUS_TIMEOUT)


def loopback_interface() -> str:
    """Return the name of the interface that has 127.0.0.1: ``lo`` on Linux, ``lo0`` on macOS."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == "127.0.0.1" for each in addresses):
            return name
    raise TeamError("connecting the team", "no network interface of this machine has the address 127.0.0.1")


@contextmanager
def _gloo_on(interface: str) -> Iterator[None]:
    """Let gloo listen on one interface; it reads the environment when a group is made."""
    before = os.environ.get(INTERFACE_VARIABLE)
    os.environ[INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE_VARIABLE]
        else:
            os.environ[INTERFACE_VARIABLE] = before
