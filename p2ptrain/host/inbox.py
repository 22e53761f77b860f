"""Queue from the network to the trainer: any thread fills it, the trainer empties it between two inner steps.

Three kinds of entries: the displacement of a committed exchange, permission to conclude the outer step that waits for
partners, and a donor's weights. It needs no lock.

Legend: F elements of one fragment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from p2ptrain.base.ids import LinkId
from p2ptrain.host.payloads import Difference, Payloads
from p2ptrain.swarm.events import Commit


@dataclass(frozen=True, slots=True)
class Displacement:
    serial: int
    commit: Commit
    difference: Difference
    follow: float
    """Share of the displacement that x takes at once, if the recipe mixes the fast weights."""


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """End of this outer step's round; its displacements precede this entry in the queue."""

    step: int


@dataclass(frozen=True, slots=True)
class Adoption:
    link: LinkId
    step: int
    progress: float
    weights: tuple[Tensor, ...]  # [F] fp32 each
    left_behind: bool = False  # as in ``events.Adopt``


NOT_HELD = torch.empty(0)
"""A fragment that a keeper does not hold."""

Delivery = Displacement | RoundFinished | Adoption | None
"""One entry of the queue; None only wakes a waiting trainer."""


class Inbox:
    """Queue in order of arrival. Only the trainer calls ``drain`` and ``drop``; any thread may call the others.

    Args:
        follow: the recipe's share of a displacement of theta that x takes at once.
        payloads: learns of each displacement, since partners get the weights that contain it from now on.
    """

    def __init__(self, follow: float, payloads: Payloads) -> None:
        self._follow = follow
        self._payloads = payloads
        self._serials = itertools.count(1)
        self._queue: SimpleQueue[Delivery] = SimpleQueue()

    def deliver(self, commit: Commit, difference: Difference) -> None:
        """Queue a committed exchange's displacement and the progress that it adds. Only one thread may call it."""
        # A finished peer has no pseudo-gradient to come, and both sides must move x by the same share.
        follow = 1.0 if commit.finished else self._follow
        serial = next(self._serials)
        self._payloads.expect(serial, commit, difference)
        self._queue.put(Displacement(serial, commit, difference, follow))

    def proceed(self, step: int) -> None:
        """Let a trainer that waits at this outer step continue with what was delivered before."""
        self._queue.put(RoundFinished(step))

    def adopt(
        self, link: LinkId, step: int, progress: float, parts: Sequence[bytes | bytearray], left_behind: bool = False
    ) -> None:
        """Queue a donor's weights that ``Payloads.check_weights`` accepted."""
        weights = tuple(torch.frombuffer(part, dtype=torch.float32) if len(part) else NOT_HELD for part in parts)
        self._queue.put(Adoption(link, step, progress, weights, left_behind))

    def wake(self) -> None:
        """End a waiting ``drain``, hence ``Learner.settle``. Safe in a signal handler."""
        self._queue.put(None)

    @property
    def has_entries(self) -> bool:
        return not self._queue.empty()

    def drain(self, wait_s: float = 0.0) -> list[Delivery]:
        """Remove and return all entries; wait up to ``wait_s`` seconds for the first one."""
        drained: list[Delivery] = []
        try:
            drained.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                drained.append(self._queue.get_nowait())
        except Empty:
            return drained

    def drop(self, drained: Sequence[Delivery]) -> list[LinkId]:
        """Discard drained entries and all queued ones; return the links whose displacements are lost."""
        lost = [stale for stale in (*drained, *self.drain()) if isinstance(stale, Displacement)]
        for stale in lost:
            self._payloads.settle(stale.serial)
        return [stale.commit.link for stale in lost]
