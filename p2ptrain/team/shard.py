"""Shard: one rank's part of exchanges, donations and downloads, for the leader's network thread.

The trainer publishes a version of its weights with each turn; the leader names a version by the number of its turn, so
that all ranks encode the same moment. What the leader opens has a number and stays until it is released, by a turn.

Any thread may call everything except ``complete``, ``take`` and ``adopted``, which are the trainer's.

Legend: n elements of one fragment.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.download_plan import Span
from p2ptrain.swarm.events import Commit
from p2ptrain.train.payloads import Compared, Difference, Encoded, Payloads, Snapshot, with_pending
from p2ptrain.train.sketch import sketch
from p2ptrain.train.widths import Fit, WidthFeedback

KEPT_TURNS = 4
"""Versions of the weights that a shard keeps. A leader that asks for an older one gets the oldest of these."""
MOST_OPEN = 256
"""Maximum number of open exchanges, donations and downloads."""
PATIENCE_S = 30.0
"""Longest wait for this rank's trainer to reach the turn of a version. Guess: the longest inner step of a slow device
would settle it."""

NOBODY = LinkId(PeerId(""), 0, outbound=False)
"""Link of exchanges on ranks that do not know it."""
NOTHING = Difference((), (), (), Encoded((), (), (), 0, (), ()))
"""Difference of an exchange in which a rank owns no fragment."""


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """Committed exchange that a version of the weights may not contain."""

    serial: int
    exchange: int
    share: float
    clip_radius: float

    @property
    def commit(self) -> Commit:
        return Commit(NOBODY, 0.0, self.share, self.clip_radius, False, 0, 0)


class Shard(Protocol):
    """One rank's part, as the leader's network thread sees it. Fragments have the rank's own numbers.

    Every method may raise NetworkError: the rank does not answer, or no longer has what the number names.
    """

    def open(self, exchange: int, turn: int, fragments: Sequence[int], pending: Sequence[PendingExchange]) -> None:
        """Begin an exchange of these fragments as they were after this turn, with pending displacements."""

    def proposals(self, exchange: int) -> Sequence[bytes]:
        """Return ``Payloads.proposals``."""

    def encode(
        self, exchange: int, mine: Sequence[bytes], theirs: Sequence[bytes | bytearray]
    ) -> tuple[Sequence[bytes], Sequence[float]]:
        """Return the parts and the norms of ``Payloads.encode``. Raises ValueError and RemoteError as that does."""

    def compare(self, exchange: int, theirs: Sequence[bytes | bytearray]) -> tuple[Sequence[float], Sequence[Fit]]:
        """Return the norms and fits of ``Payloads.compare``. Raises RemoteError as that does."""

    def judge(self, exchange: int, verdict: WidthFeedback) -> None:
        """Learn from the verdict over all ranks' fits; keep the difference for the trainer if they fit."""

    def open_slow(self, donation: int, turn: int) -> None:
        """Keep the slow weights as they were after this turn."""

    def piece(self, donation: int, span: Span) -> bytes | memoryview:
        """Return these bytes of kept slow weights."""

    def sketch(self, span: Span, seed: int) -> bytes:
        """Return the sketch of a piece of the current slow weights."""

    def are_zero(self) -> bool:
        """Return whether all weights are zero."""

    def store(self, download: int, span: Span, piece: bytes | bytearray | memoryview) -> None:
        """Store a piece of a donor's weights; the first one opens the download."""

    def sketch_stored(self, download: int, span: Span, seed: int) -> bytes:
        """Return the sketch of a stored piece."""

    def check(self, download: int) -> None:
        """Raise RemoteError unless the stored weights may replace ours (``Payloads.check_weights``)."""


@dataclass(slots=True)
class _OpenExchange:
    fragments: tuple[int, ...]
    snapshot: Snapshot | None
    """None: encoded. A payload may take minutes, and this is a whole model."""
    encoded: Encoded | None = None
    compared: Compared | None = None
    difference: Difference | None = None


class LocalShard:
    """``Shard`` of this process's rank.

    Args:
        payloads: the rank's learner's.
    """

    def __init__(self, payloads: Payloads, patience_s: float = PATIENCE_S) -> None:
        self._payloads = payloads
        self._patience_s = patience_s
        self._versions: deque[tuple[int, Snapshot]] = deque([(0, payloads.published)], maxlen=KEPT_TURNS)
        """Number of a turn, and what was published after it."""
        self._changed = threading.Condition()
        self._exchanges: dict[int, _OpenExchange] = {}
        self._donations: dict[int, tuple[Tensor, ...]] = {}
        self._downloads: dict[int, list[bytearray]] = {}

    # --- the trainer --------------------------------------------------------------------------------------------------

    @property
    def turn(self) -> int:
        """Number of the last complete turn; any thread may read it."""
        return self._versions[-1][0]

    def complete(self, turn: int, released: Iterable[int] = ()) -> None:
        """Publish the version of this turn; close what the leader has released."""
        with self._changed:
            self._versions.append((turn, self._payloads.published))
            for number in released:
                for opened in (self._exchanges, self._donations, self._downloads):
                    opened.pop(number, None)
            self._changed.notify_all()

    def take(self, exchange: int) -> Difference:
        """Return the difference of a committed exchange. Raises NetworkError if there is none."""
        difference = self._exchange(exchange).difference
        if difference is None:
            raise NetworkError(f"exchange {exchange} has not been judged")
        return difference

    def adopted(self, download: int) -> tuple[Tensor, ...]:
        """Return checked weights of a donor, [n] each, and close the download."""
        with self._changed:
            parts = self._downloads.pop(download, None)
        if parts is None:
            raise NetworkError(f"download {download} is not open")
        return tuple(torch.frombuffer(part, dtype=torch.float32) for part in parts)

    # --- Shard --------------------------------------------------------------------------------------------------------

    def open(self, exchange: int, turn: int, fragments: Sequence[int], pending: Sequence[PendingExchange]) -> None:
        with_differences = [(each.serial, each.commit, self.take(each.exchange)) for each in pending]
        snapshot = with_pending(self._version(turn), fragments, with_differences)
        with self._changed:
            self._check_room()
            self._exchanges[exchange] = _OpenExchange(tuple(fragments), snapshot)

    def proposals(self, exchange: int) -> Sequence[bytes]:
        opened, snapshot = self._unencoded(exchange)
        return self._payloads.proposals(opened.fragments, snapshot)

    def encode(
        self, exchange: int, mine: Sequence[bytes], theirs: Sequence[bytes | bytearray]
    ) -> tuple[Sequence[bytes], Sequence[float]]:
        opened, snapshot = self._unencoded(exchange)
        opened.encoded, opened.snapshot = self._payloads.encode(opened.fragments, mine, theirs, snapshot), None
        return opened.encoded.parts, opened.encoded.norms

    def compare(self, exchange: int, theirs: Sequence[bytes | bytearray]) -> tuple[Sequence[float], Sequence[Fit]]:
        opened = self._exchange(exchange)
        if opened.encoded is None:
            raise NetworkError(f"exchange {exchange} has not been encoded")
        opened.compared = self._payloads.compare(opened.encoded, theirs)
        return opened.compared.norms, opened.compared.fits

    def judge(self, exchange: int, verdict: WidthFeedback) -> None:
        opened = self._exchange(exchange)
        compared, opened.compared = opened.compared, None
        if compared is None:
            raise NetworkError(f"exchange {exchange} has not been compared")
        self._payloads.learn(compared, verdict)
        opened.difference = compared.judged() if verdict is WidthFeedback.FITS else None

    def open_slow(self, donation: int, turn: int) -> None:
        slow = self._version(turn).slow
        with self._changed:
            self._check_room()
            self._donations[donation] = slow

    def piece(self, donation: int, span: Span) -> bytes | memoryview:
        with self._changed:
            slow = self._donations.get(donation)
        if slow is None:
            raise NetworkError(f"donation {donation} is not open")
        return self._payloads.piece(slow, span)

    def sketch(self, span: Span, seed: int) -> bytes:
        return self._payloads.sketch(span, seed)

    def are_zero(self) -> bool:
        return self._payloads.are_zero

    def store(self, download: int, span: Span, piece: bytes | bytearray | memoryview) -> None:
        with self._changed:
            if download not in self._downloads:
                self._check_room()
                self._downloads[download] = [bytearray(size) for size in self._payloads.weight_sizes()]
            memoryview(self._downloads[download][span.fragment])[span.start : span.stop] = piece

    def sketch_stored(self, download: int, span: Span, seed: int) -> bytes:
        part = torch.frombuffer(self._stored(download)[span.fragment], dtype=torch.float32)
        return sketch(part[span.start // 4 : span.stop // 4], seed)

    def check(self, download: int) -> None:
        self._payloads.check_weights(self._stored(download))

    def _stored(self, download: int) -> list[bytearray]:
        with self._changed:
            parts = self._downloads.get(download)
        if parts is None:
            raise NetworkError(f"download {download} is not open")
        return parts

    def _exchange(self, exchange: int) -> _OpenExchange:
        with self._changed:
            opened = self._exchanges.get(exchange)
        if opened is None:
            raise NetworkError(f"exchange {exchange} is not open")
        return opened

    def _unencoded(self, exchange: int) -> tuple[_OpenExchange, Snapshot]:
        opened = self._exchange(exchange)
        if opened.snapshot is None:
            raise NetworkError(f"exchange {exchange} has been encoded")
        return opened, opened.snapshot

    def _version(self, turn: int) -> Snapshot:
        """Return what was published after this turn, or after the oldest one that is kept; wait for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.turn >= turn, self._patience_s):
                raise NetworkError(f"the trainer is at turn {self.turn} and did not reach {turn} in time")
            upto = [snapshot for number, snapshot in self._versions if number <= turn]
            return upto[-1] if upto else self._versions[0][1]

    def _check_room(self) -> None:
        if len(self._exchanges) + len(self._donations) + len(self._downloads) >= MOST_OPEN:
            raise NetworkError(f"{MOST_OPEN} exchanges, donations and downloads are open")
