"""Queue from a team's network thread to its leader's trainer, which tells all ranks of each entry."""

from __future__ import annotations

import itertools
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from p2ptrain.base.ids import LinkId
from p2ptrain.swarm.events import Commit
from p2ptrain.team.payloads import Lease, TeamDifference, TeamDownload, TeamPayloads
from p2ptrain.team.shard import NOBODY, NOTHING, LocalShard
from p2ptrain.team.turn import MOST_DELIVERIES, AdoptionRecord, DeliveryRecord, DisplacementRecord, RoundRecord
from p2ptrain.train.inbox import Adoption, Delivery, Displacement, RoundFinished


@dataclass(frozen=True, slots=True)
class TeamDelivery:
    """Queued delivery: the record that all ranks receive, and what the leader keeps with it."""

    record: DeliveryRecord
    link: LinkId = NOBODY
    commit: Commit | None = None
    kept: TeamDifference | Lease | None = None
    """Keeps the exchange or the download open at the shards until the trainer has applied it."""


class TeamInbox:
    """``ports.Deliveries`` of a team. Only the trainer calls ``drain``; any thread may call the others.

    Args:
        follow: the recipe's share of a displacement of theta that x takes at once.
        payloads: learns of each displacement, as in ``train.inbox.Inbox``.
    """

    def __init__(self, follow: float, payloads: TeamPayloads) -> None:
        self._follow = follow
        self._payloads = payloads
        self._serials = itertools.count(1)
        self._queue: SimpleQueue[TeamDelivery | None] = SimpleQueue()
        self._later: deque[TeamDelivery] = deque()
        """Drained entries that did not fit into a turn."""

    def deliver(self, commit: Commit, difference: TeamDifference) -> None:
        """Queue a committed exchange (``Inbox.deliver``). Only one thread may call it."""
        serial = next(self._serials)
        record = DisplacementRecord(
            serial=serial,
            exchange=difference.snapshot.lease.number,
            owners=list(difference.snapshot.owners),
            share=commit.share,
            clip_radius=commit.clip_radius if math.isfinite(commit.clip_radius) else None,
            progress=commit.progress_displacement,
            finished=commit.finished,
            follow=1.0 if commit.finished else self._follow,
        )
        self._payloads.expect(serial, commit, difference)
        self._queue.put(TeamDelivery(record, commit.link, commit, difference))

    def proceed(self, step: int) -> None:
        """Let trainers that wait at this outer step continue with what was delivered before."""
        self._queue.put(TeamDelivery(RoundRecord(step=step)))

    def adopt(self, link: LinkId, step: int, progress: float, parts: TeamDownload, left_behind: bool = False) -> None:
        """Queue a donor's weights that ``TeamPayloads.check_weights`` accepted."""
        lease = parts.lease
        record = AdoptionRecord(adoption=lease.number, step=step, progress=progress, left_behind=left_behind)
        self._queue.put(TeamDelivery(record, link, kept=lease))

    def wake(self) -> None:
        """End a waiting ``drain``. Safe in a signal handler."""
        self._queue.put(None)

    def clear(self) -> list[TeamDelivery]:
        """Remove and return all entries: the ranks that they were for have ended. Only the trainer calls it."""
        cleared = [*self._later]
        self._later.clear()
        with suppress(Empty):
            while True:
                if (entry := self._queue.get_nowait()) is not None:
                    cleared.append(entry)
        return cleared

    def drain(self, wait_s: float = 0.0) -> tuple[list[TeamDelivery], bool]:
        """Remove and return entries for one turn, and whether anything came, if only to wake the trainer.

        Wait up to ``wait_s`` seconds for the first one.
        """
        has_come = bool(self._later)
        try:
            while True:
                waits = wait_s > 0 and not has_come
                entry = self._queue.get(timeout=wait_s) if waits else self._queue.get_nowait()
                has_come = True
                if entry is not None:
                    self._later.append(entry)
        except Empty:
            return [self._later.popleft() for _ in range(min(len(self._later), MOST_DELIVERIES))], has_come


def delivery_of(record: DeliveryRecord, shard: LocalShard, rank: int, link: LinkId = NOBODY) -> Delivery:
    """Return what a rank's learner applies. Raises NetworkError if the shard does not have its part."""
    match record:
        case DisplacementRecord():
            radius = math.inf if record.clip_radius is None else record.clip_radius
            commit = Commit(link, record.progress, record.share, radius, record.finished, 0, 0)
            difference = shard.take(record.exchange) if rank in record.owners else NOTHING
            return Displacement(record.serial, commit, difference, record.follow)
        case RoundRecord():
            return RoundFinished(record.step)
        case AdoptionRecord():
            return Adoption(link, record.step, record.progress, shard.adopted(record.adoption), record.left_behind)
