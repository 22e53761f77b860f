"""What the network has for the trainer: a queue that any thread fills, and the trainer empties between two inner steps.

Three things come: the displacement of a committed exchange, leave to conclude the outer step that waits for partners,
and a donor's weights. Here alone the two threads of a peer meet, and nobody waits for a lock.

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
    """What a committed exchange moves us by."""

    link: LinkId
    difference: Difference
    share: float
    """Of the difference: how far we come towards the partner."""
    follow: float
    """The part of the displacement that x takes at once, where the recipe mixes the fast weights."""
    clip_radius: float
    progress: float
    """What it adds to ours."""


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """The round of this outer step is over; what it brought lies before this in the queue."""

    step: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """A donor's weights, to replace ours."""

    link: LinkId
    step: int
    progress: float
    weights: tuple[Tensor, ...]  # [F] fp32 each


Delivery = Displacement | RoundFinished | Adoption | None
"""One entry of the queue; None only wakes who waits for one."""


class Inbox:
    """In order of arrival. ``take`` and ``drop`` are the trainer's; any thread may call the others.

    Args:
        follow: the recipe's share of a displacement of theta that x takes at once.
    """

    def __init__(self, follow: float) -> None:
        self._follow = follow
        self._queue: SimpleQueue[Delivery] = SimpleQueue()

    def deliver(self, link: LinkId, difference: Difference, mine: Terms, theirs: Terms, progress: float) -> None:
        """Queue a committed exchange's displacement, with what it adds to progress."""
        clip_radius = min(mine.clip_radius, theirs.clip_radius)
        portion = share(mine.weight, mine.weight_of(theirs), max(mine.partners, theirs.partners))
        # Who has finished has no pseudo-gradient to come, and both must move x by the same share.
        finished = PeerState.FINISHING in (mine.state, theirs.state)
        follow = 1.0 if finished else self._follow
        self._queue.put(Displacement(link, difference, portion, follow, clip_radius, progress))

    def proceed(self, step: int) -> None:
        """Let a trainer that waits at this outer step go on, with what was delivered before."""
        self._queue.put(RoundFinished(step))

    def adopt(self, link: LinkId, step: int, progress: float, parts: Sequence[bytes | bytearray]) -> None:
        """Queue a donor's weights, as ``Payloads.check_weights`` passed them."""
        self._queue.put(Adoption(link, step, progress, tuple(torch.frombuffer(p, dtype=torch.float32) for p in parts)))

    def wake(self) -> None:
        """End a waiting ``take``. Safe in a signal handler too."""
        self._queue.put(None)

    def take(self, wait_s: float = 0.0) -> Delivery:
        """What came first. Raises ``queue.Empty`` where nothing came, with ``wait_s`` after so many seconds."""
        return self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()

    def drop(self) -> list[LinkId]:
        """Throw away all that came; the links whose displacements are lost by it."""
        links: list[LinkId] = []
        try:
            while True:
                stale = self._queue.get_nowait()
                if isinstance(stale, Displacement):
                    links.append(stale.link)
        except Empty:
            return links


__all__ = ["Adoption", "Delivery", "Displacement", "Inbox", "RoundFinished"]
