"""Payloads of a team: ``ports.LearnerPayloads`` over the shards of all ranks.

Each request goes to the owners of its fragments, all at once, and their answers are joined in the order of the
fragments, so that every number is bitwise what one process computes. The leader holds encoded payloads, which pass
through it anyway, and never another rank's weights.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.base.errors import MISFIT, MisfitError, NetworkError, RemoteError
from p2ptrain.swarm.download_plan import Span
from p2ptrain.swarm.events import Commit
from p2ptrain.team.shard import PendingExchange, Shard
from p2ptrain.team.sharding import Sharding
from p2ptrain.train.fragment_codecs import FragmentCodecs
from p2ptrain.train.payloads import TINY, fingerprint_of
from p2ptrain.train.widths import WidthFeedback, judge

if TYPE_CHECKING:
    from p2ptrain.codec import Codec, Matrices
    from p2ptrain.recipes import Stream

T = TypeVar("T")


class Lease:
    """Number of something that is open at shards until no object here refers to it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int, released: deque[int]) -> None:
        self.number = number
        weakref.finalize(self, released.append, number).atexit = False


@dataclass(frozen=True, slots=True)
class TeamSnapshot:
    """Exchange that is open at its owners' shards."""

    lease: Lease
    places: tuple[tuple[int, int], ...]
    """Owner of each fragment, and the fragment's number there."""

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.places}))

    def of(self, rank: int, items: Sequence[T]) -> list[T]:
        """Return a rank's items, of one item a fragment."""
        return [item for (owner, _), item in zip(self.places, items, strict=True) if owner == rank]

    def join(self, by_rank: dict[int, Sequence[T]]) -> tuple[T, ...]:
        """Return one item a fragment, of each rank's items."""
        queues = {rank: iter(items) for rank, items in by_rank.items()}
        return tuple(next(queues[rank]) for rank, _ in self.places)


@dataclass(frozen=True, slots=True)
class TeamEncoded:
    """``ports.EncodedPayload`` of a team."""

    snapshot: TeamSnapshot
    parts: tuple[bytes, ...]
    norms: tuple[float, ...]

    @property
    def norm(self) -> float:
        return math.hypot(*self.norms)

    @property
    def size_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class TeamDifference:
    """``ports.PayloadDifference`` of a team; the owners have the vectors."""

    snapshot: TeamSnapshot
    norm: float
    distance: float
    fingerprint: bytes
    sketched: float


@dataclass(frozen=True, slots=True)
class TeamSlow:
    """Slow weights that all shards keep."""

    lease: Lease


class GenerationShards:
    """Shards of all ranks of one generation. Any thread may use them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self.ranks = len(self._shards)

    def of(self, rank: int) -> Shard:
        """Return a rank's. Raises NetworkError once the generation has ended."""
        if not (shards := self._shards):
            raise NetworkError("the ranks of this peer are being replaced")
        return shards[rank]

    def close(self) -> None:
        """Drop the shards, and with them the leader's weights."""
        self._shards = ()


@dataclass(frozen=True, slots=True)
class TeamDownload:
    """``ports.PieceStore`` of a team: pieces of a donor's weights at the shards of their owners."""

    lease: Lease
    sharding: Sharding
    shards: GenerationShards

    @property
    def whole(self) -> TeamDownload:
        return self

    def store(self, span: Span, piece: bytes | bytearray | memoryview) -> None:
        """Give a piece to its owner."""
        rank, own = _at_owner(self.sharding, span)
        self.shards.of(rank).store(self.lease.number, own, piece)

    def sketch(self, span: Span, seed: int) -> bytes:
        """Return its owner's sketch of a stored piece."""
        rank, own = _at_owner(self.sharding, span)
        return self.shards.of(rank).sketch_stored(self.lease.number, own, seed)


class TeamPayloads(FragmentCodecs):
    """What the network sends of a team's learner. Any thread may call it, except ``applied``: the trainer.

    Args:
        lengths, codec, gradient_codec, matrices, shown: as for FragmentCodecs, of the whole model.
        sharding: owners of the fragments.
        shards: of all ranks, this process's first.
        version: returns the number of the leader's last complete turn.
        adds_pending: as for Payloads.
    """

    def __init__(
        self,
        codec: Codec,
        gradient_codec: Codec | None,
        matrices: Sequence[Matrices],
        shown: Stream,
        sharding: Sharding,
        shards: Sequence[Shard],
        version: Callable[[], int],
        adds_pending: bool,
    ) -> None:
        lengths = [piece.stop - piece.start for piece in sharding.fragments]
        super().__init__(lengths, codec, gradient_codec, matrices, shown)
        self._sharding = sharding
        self._shards = GenerationShards(shards)
        self._version = version
        self._adds_pending = adds_pending
        self._pending: dict[int, tuple[Commit, TeamDifference]] = {}
        self._numbers = itertools.count(1)
        self.released: deque[int] = deque()
        """Numbers that no object refers to any more, for the next turn."""
        self._askers = ThreadPoolExecutor(max(1, 2 * len(shards)), thread_name_prefix="shard")

    def disconnect(self) -> None:
        """Drop the shards of a generation that has ended; until ``reconnect`` every request is a NetworkError.

        Only the trainer calls it.
        """
        self._shards.close()
        self._pending.clear()

    def reconnect(self, shards: Sequence[Shard]) -> None:
        """Use the shards of a new generation; what is open at the old ones is lost. Only the trainer calls it."""
        self._shards = GenerationShards(shards)
        self._pending.clear()
        self.released.clear()

    def close(self) -> None:
        """End the threads that ask shards; waits for questions under way."""
        self._askers.shutdown()

    # --- committed exchanges that the trainer has not applied yet ----------------------------------------------------

    def expect(self, serial: int, commit: Commit, difference: TeamDifference) -> None:
        """Record a committed exchange, so that later snapshots contain its displacement (``Payloads.expect``)."""
        if self._adds_pending:
            self._pending[serial] = commit, difference

    def settle(self, serial: int) -> None:
        """Forget an exchange that the current version contains, or that was dropped. Only the trainer calls it."""
        self._pending.pop(serial, None)

    # --- one exchange -------------------------------------------------------------------------------------------------

    def current(self, fragments: Sequence[int]) -> TeamSnapshot:
        """Open an exchange of these fragments at their owners' shards, with all committed displacements."""
        pending = list(self._pending.items())  # read first: the trainer completes a turn before it settles
        turn = self._version()
        snapshot = TeamSnapshot(self._lease(), tuple(self._sharding.place(number) for number in fragments))

        def ask(rank: int) -> None:
            own = [
                PendingExchange(serial, difference.snapshot.lease.number, commit.share, commit.clip_radius)
                for serial, (commit, difference) in pending
                if rank in difference.snapshot.owners
            ]
            local = [number for owner, number in snapshot.places if owner == rank]
            self._shards.of(rank).open(snapshot.lease.number, turn, local, own)

        self._ask_all(snapshot.owners, ask)
        return snapshot

    def proposals(self, fragments: Sequence[int], snapshot: TeamSnapshot) -> tuple[bytes, ...]:
        """Return ``Payloads.proposals`` of all owners."""
        if not self.proposal_sizes(fragments):
            return ()
        exchange = snapshot.lease.number

        def ask(rank: int) -> Sequence[bytes]:
            none = [b""] * len(snapshot.of(rank, snapshot.places))
            return self._shards.of(rank).proposals(exchange) or none

        return snapshot.join(self._ask_all(snapshot.owners, ask))

    def encode(
        self,
        fragments: Sequence[int],
        mine: Sequence[bytes],
        theirs: Sequence[bytes | bytearray],
        snapshot: TeamSnapshot,
    ) -> TeamEncoded:
        """Return ``Payloads.encode`` of all owners."""
        exchange, none = snapshot.lease.number, [b""] * len(fragments)

        def ask(rank: int) -> tuple[Sequence[bytes], Sequence[float]]:
            ours, others = snapshot.of(rank, mine or none), snapshot.of(rank, theirs or none)
            return self._shards.of(rank).encode(exchange, ours, others)

        answers = self._ask_all(snapshot.owners, ask)
        parts = snapshot.join({rank: parts for rank, (parts, _) in answers.items()})
        return TeamEncoded(snapshot, parts, snapshot.join({rank: norms for rank, (_, norms) in answers.items()}))

    def difference(self, mine: TeamEncoded, theirs: Sequence[bytes | bytearray]) -> TeamDifference:
        """Compare at all owners, judge the whole exchange, and let all learn from it.

        Raises RemoteError and MisfitError as ``Payloads.difference``.
        """
        snapshot, exchange = mine.snapshot, mine.snapshot.lease.number
        answers = self._ask_all(
            snapshot.owners, lambda rank: self._shards.of(rank).compare(exchange, snapshot.of(rank, theirs))
        )
        norms = snapshot.join({rank: norms for rank, (norms, _) in answers.items()})
        fits = snapshot.join({rank: fits for rank, (_, fits) in answers.items()})
        if not math.hypot(*norms) < math.inf:
            raise RemoteError("its weights are not finite")
        verdict = judge(fits, mine.norm)
        self._ask_all(snapshot.owners, lambda rank: self._shards.of(rank).judge(exchange, verdict))
        if verdict is not WidthFeedback.FITS:
            raise MisfitError(MISFIT)
        own = max(mine.norm, TINY)
        sketched = math.hypot(*(fit.sketched for fit in fits)) / own
        return TeamDifference(snapshot, mine.norm, math.hypot(*norms) / own, fingerprint_of(theirs), sketched)

    # --- whole models -------------------------------------------------------------------------------------------------

    @property
    def are_zero(self) -> bool:
        """Whether all weights are zero, so there are none yet."""
        return all(self._ask_all(range(self._shards.ranks), lambda rank: self._shards.of(rank).are_zero()).values())

    def slow(self) -> TeamSlow:
        """Let all shards keep their slow weights of one version until no object refers to it."""
        lease, turn = self._lease(), self._version()
        self._ask_all(range(self._shards.ranks), lambda rank: self._shards.of(rank).open_slow(lease.number, turn))
        return TeamSlow(lease)

    def piece(self, snapshot: TeamSlow, span: Span) -> bytes | memoryview:
        """Return these bytes of kept slow weights."""
        rank, own = _at_owner(self._sharding, span)
        return self._shards.of(rank).piece(snapshot.lease.number, own)

    def sketch(self, span: Span, seed: int) -> bytes:
        """Return the sketch of a piece of the current slow weights."""
        rank, own = _at_owner(self._sharding, span)
        return self._shards.of(rank).sketch(own, seed)

    def new_download(self) -> TeamDownload:
        """Return a store that gives each piece of a donor's weights to its owner."""
        return TeamDownload(self._lease(), self._sharding, self._shards)

    def check_weights(self, parts: TeamDownload) -> None:
        """Raise RemoteError unless a donor's weights may replace ours, as their owners find."""
        self._ask_all(range(self._shards.ranks), lambda rank: self._shards.of(rank).check(parts.lease.number))

    def _lease(self) -> Lease:
        return Lease(next(self._numbers), self.released)

    def _ask_all(self, ranks: Sequence[int] | range, ask: Callable[[int], T]) -> dict[int, T]:
        """Ask several ranks at once; raise the first one's error once all have answered."""
        if len(ranks) == 1:
            return {ranks[0]: ask(ranks[0])}
        futures: dict[int, Any] = {rank: self._askers.submit(ask, rank) for rank in ranks}
        errors = [future.exception() for future in futures.values()]
        for error in errors:
            if error is not None:
                raise error
        return {rank: future.result() for rank, future in futures.items()}


def _at_owner(sharding: Sharding, span: Span) -> tuple[int, Span]:
    rank, fragment = sharding.place(span.fragment)
    return rank, replace(span, fragment=fragment)
