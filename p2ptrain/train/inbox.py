"""Queue from the network to the trainer: any thread fills it, the trainer empties it between two inner steps.

Three kinds of entries: the displacement of a committed exchange, permission to conclude the outer step that waits for
partners, and a donor's weights. Only here do the two threads of a peer meet, without a lock.

Legend: F elements of one fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from p2ptrain.base.ids import LinkId
from p2ptrain.outer import share
from p2ptrain.swarm import PeerState, Terms
from p2ptrain.train.payloads import Difference


@dataclass(frozen=True, slots=True)
class Displacement:
    link: LinkId
    difference: Difference
    share: float
    """Share of the difference by which this peer moves towards the partner."""
    follow: float
    """Share of the displacement that x takes at once, if the recipe mixes the fast weights."""
    clip_radius: float
    progress: float


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


Delivery = Displacement | RoundFinished | Adoption | None
"""One entry of the queue; None only wakes a waiting trainer."""


class Inbox:
    """Queue in order of arrival. Only the trainer calls ``take`` and ``drop``; any thread may call the others.

    Args:
        follow: the recipe's share of a displacement of theta that x takes at once.
    """

    def __init__(self, follow: float) -> None:
        self._follow = follow
        self._queue: SimpleQueue[Delivery] = SimpleQueue()

    def deliver(self, link: LinkId, difference: Difference, mine: Terms, theirs: Terms, progress: float) -> None:
        """Queue a committed exchange's displacement and the progress that it adds."""
        clip_radius = min(mine.clip_radius, theirs.clip_radius)
        portion = share(mine.weight, mine.weight_of(theirs), max(mine.partners, theirs.partners))
        # A finished peer has no pseudo-gradient to come, and both sides must move x by the same share.
        finished = PeerState.FINISHING in (mine.state, theirs.state)
        follow = 1.0 if finished else self._follow
        self._queue.put(Displacement(link, difference, portion, follow, clip_radius, progress))

    def proceed(self, step: int) -> None:
        """Let a trainer that waits at this outer step continue with what was delivered before."""
        self._queue.put(RoundFinished(step))

    def adopt(self, link: LinkId, step: int, progress: float, parts: Sequence[bytes | bytearray]) -> None:
        """Queue a donor's weights that ``Payloads.check_weights`` accepted."""
        self._queue.put(Adoption(link, step, progress, tuple(torch.frombuffer(p, dtype=torch.float32) for p in parts)))

    def wake(self) -> None:
        """End a waiting ``take``, hence ``Learner.settle``. Safe in a signal handler."""
        self._queue.put(None)

    def take(self, wait_s: float = 0.0) -> Delivery:
        """Return the first entry; wait up to ``wait_s`` seconds for it. Raises ``queue.Empty`` if there is none."""
        return self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()

    def drop(self) -> list[LinkId]:
        """Discard all entries; return the links whose displacements are lost."""
        links: list[LinkId] = []
        try:
            while True:
                stale = self._queue.get_nowait()
                if isinstance(stale, Displacement):
                    links.append(stale.link)
        except Empty:
            return links
