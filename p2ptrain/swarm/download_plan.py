"""Plan for downloading a model from several donors: which piece to ask of whom, and which copies to accept. Pure.

::

    piece      event                                     next          action
    ---------  ----------------------------------------  -----------   -------------------------------------------
    MISSING    a donor is idle                           ASKED         Fetch
    ASKED      its donor is slow, another is idle        ASKED         Fetch from a second donor; the first counts
    ASKED      all its donors are lost                   MISSING
    ASKED      it arrived, its digest matches            HERE          Cancel the other; Compare with ``CONFIRMATIONS``
    HERE       all compared copies are near              CONFIRMED
    HERE       a copy of any piece is far                HERE          Compare all pieces with ``DISPUTE_QUORUM``
    HERE       most copies are near                      CONFIRMED     (a strike for each donor of a far copy)
    HERE       most copies are far                       MISSING       (a strike for the donor of the piece)
    HERE       there never was another donor             CONFIRMED

A digest proves transport only; another peer's copy shows whether a piece is useful, because copies of one swarm are
near each other. They are compared by sketches of some hundred bytes (``host.sketch``), made after the piece arrived.
Any donor may be asked for a sketch, so a few that collude are outvoted. A donor with ``MAX_STRIKES`` strikes is
dropped, and its unconfirmed pieces are asked of others. The shell fetches, compares and holds the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.base.ids import PeerId

MAX_DONORS = 3
"""Donors asked concurrently: two for speed, and a third to tell which of two is the outlier. Guess: measure download
times with other numbers."""

PIECE_BYTES = 4 << 20
"""Maximum length of a piece; longer fragments are cut. Both sides must cut alike, so this is part of the protocol. A
lost donor costs at most one piece. At 100 Mbit/s a piece takes .3 s, and a round trip of .1 s before it is a quarter of
the total."""

NEAR = 0.5
"""Maximum distance of copies from one swarm, as a share of the shorter one's length. The largest distance measured
between equally fast peers is .31 (docs/SECURITY.md)."""

CONFIRMATIONS = 2
"""Near copies of other donors that confirm a piece while no copy is far: of two donors that collude, one gives it."""

DISPUTE_QUORUM = 6
"""Other donors asked for a sketch once copies are far apart; the piece's donor is the seventh. Two or three adversarial
peers of seven are a minority, and a sketch costs half a kilobyte. Guess: measure the adversarial share of real
swarms."""

MAX_STRIKES = 2
"""Strikes after which a donor is dropped. One outlying copy is tolerated, because the donor may itself be new."""

FIRST_RATE = 31_250.0
"""Assumed bytes per second of an unmeasured donor: .25 Mbit/s, the lowest throttle that an owner may set. A donor that
stops sending is noticed by its silence long before."""

SLOW, SLOW_S = 2.0, 1.0
"""A donor is slow if it takes this many times as long as an idle donor that has given before would, and this many
seconds more. Guess: measure the spread of piece durations."""

PATIENCE = 4.0
"""Multiple of the donor's last piece duration that a piece may take, because exchanges may share the connection."""

PIECE_BOUNDS_S = (30.0, 300.0)
"""Shortest and longest deadline of a piece, including up to 20 s for dialing its donor (``net.links.Limits``). Guess:
measure piece durations over slow connections."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask this donor for this piece of its pinned snapshot; the donor is lost if the piece misses the deadline."""

    donor: PeerId
    piece: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a fetch, because another donor was faster."""

    donor: PeerId
    piece: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Ask this donor for a sketch of its own copy of a piece that has arrived."""

    donor: PeerId
    piece: int


Action = Fetch | Cancel | Compare


@dataclass(frozen=True, slots=True)
class Span:
    """Position of a piece: bytes ``start`` to ``stop`` of a fragment in fp32."""

    fragment: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(sizes: Sequence[int]) -> list[Span]:
    """Return the pieces of a model whose fragments have these sizes in bytes, in order."""
    return [
        Span(fragment, start, min(start + PIECE_BYTES, size))
        for fragment, size in enumerate(sizes)
        for start in range(0, size, PIECE_BYTES)
    ]


@dataclass(slots=True)
class _PieceState:
    size_bytes: int
    asked: dict[PeerId, Fetch] = field(default_factory=dict)
    giver: PeerId | None = None
    comparing: PeerId | None = None
    near: set[PeerId] = field(default_factory=set)
    far: set[PeerId] = field(default_factory=set)
    """Donors whose copies are near to, and far from, the piece that has arrived."""
    refused: set[PeerId] = field(default_factory=set)
    """Donors whose copy was an outlier; they are not asked for this piece again."""
    confirmed: bool = False
    was_asked: bool = False

    def forget(self) -> None:
        self.giver, self.comparing, self.confirmed, self.near, self.far = None, None, False, set(), set()


@dataclass(slots=True)
class _Donor:
    rate: float = FIRST_RATE
    has_given: bool = False
    fetching: int | None = None
    since: float = 0.0


class DownloadPlan:
    """Download state of all pieces of one model.

    ``donors`` in order of preference: the first few are asked, the others replace lost ones. ``have``: pieces kept from
    an earlier attempt, with their donors, to be compared like all others. ``held``: the pieces of each donor that has
    only some. ``wanted``: the pieces to download, by default all.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        donors: Sequence[PeerId],
        have: Mapping[int, PeerId] | None = None,
        held: Mapping[PeerId, frozenset[int]] | None = None,
        wanted: frozenset[int] | None = None,
    ) -> None:
        self._pieces = [_PieceState(size) for size in sizes]
        self._held = dict(held or {})
        self._wanted_pieces = range(len(self._pieces)) if wanted is None else sorted(wanted)
        self._waiting = list(dict.fromkeys(donors))
        self._known = {*self._waiting, *(have or {}).values()}
        self._donors: dict[PeerId, _Donor] = {}
        self._strikes: dict[PeerId, int] = {}
        self.dropped: set[PeerId] = set()
        """Donors whose copies were outliers too often."""
        self.was_compared = False
        self._alone: dict[int, None] = {}
        self.is_disputed = False
        self.broke_off: set[PeerId] = set()
        """Donors lost before a piece that they were asked for arrived."""
        self.asked_again = 0
        """Repeated requests for a piece because its donor was lost or its copy an outlier. A second request beside a
        slow donor does not count."""
        for number, giver in (have or {}).items():
            self._pieces[number].giver = giver

    @property
    def is_done(self) -> bool:
        return all(self._pieces[number].confirmed for number in self._wanted_pieces)

    @property
    def is_stuck(self) -> bool:
        """After ``act``: whether no donor is left that could give what is missing or confirm what has arrived."""
        return not self.is_done and not any(piece.asked or piece.comparing for piece in self._pieces)

    @property
    def lacks_pieces(self) -> bool:
        return any(self._pieces[number].giver is None for number in self._wanted_pieces)

    @property
    def unconfirmed(self) -> tuple[int, ...]:
        """Pieces that were taken although no other donor has them, while others were compared."""
        return tuple(self._alone) if self.was_compared else ()

    @property
    def here(self) -> dict[int, PeerId]:
        """Pieces that have arrived, with their donors; the start of the next attempt."""
        return {number: piece.giver for number, piece in enumerate(self._pieces) if piece.giver is not None}

    def act(self, now: float) -> list[Action]:
        """Return what to do now. Donors whose deadline has passed are lost."""
        for fetch in [fetch for piece in self._pieces for fetch in piece.asked.values() if fetch.deadline <= now]:
            self.lost(fetch.donor)
        while self._waiting and len(self._donors) < MAX_DONORS:
            self._donors[self._waiting.pop(0)] = _Donor()
        while self._held and (needed := self._needed_beside()) is not None:
            self._waiting.remove(needed)
            self._donors[needed] = _Donor()
        actions: list[Action] = []
        dropped = -1
        while dropped < (dropped := len(self.dropped)):  # pieces that dropped donors judged need others
            actions += self._comparisons()
        actions = [each for each in actions if each.donor not in self.dropped]
        for donor, state in self._donors.items():
            if state.fetching is None and (piece := self._wanted(donor, now)) is not None:
                actions.append(self._fetch(donor, state, piece, now))
        return actions

    def fetched(self, donor: PeerId, number: int, now: float) -> list[Action]:
        """Record that a piece arrived whole and matches the digest its donor sent ahead. Only the first copy counts."""
        piece, state = self._pieces[number], self._donors.get(donor)
        if state is None or piece.asked.pop(donor, None) is None:
            return []
        state.rate, state.has_given = piece.size_bytes / max(now - state.since, 1e-3), True
        state.fetching = None
        if piece.giver is not None:
            return self.act(now)
        piece.giver = donor
        slower = list(piece.asked)
        piece.asked.clear()
        for other in slower:
            self._donors[other].fetching = None
        return [*(Cancel(other, number) for other in slower), *self.act(now)]

    def compared(self, donor: PeerId, number: int, distance: float, now: float) -> list[Action]:
        """Record this donor's distance from the piece that arrived (``host.sketch.distance``; NaN if it has none)."""
        piece = self._pieces[number]
        if piece.comparing != donor or piece.giver is None:
            return []
        piece.comparing = None
        if distance <= NEAR:
            piece.near.add(donor)
            self.was_compared = True
        else:
            piece.far.add(donor)
            if not self.is_disputed:  # earlier confirmations may come from donors that collude
                self.is_disputed = True
                for each in self._pieces:
                    each.confirmed = False
        return self.act(now)

    def lost(self, donor: PeerId) -> None:
        """Record that a donor is gone, too slow, or broke the protocol. Its pieces stay until they are judged."""
        state = self._donors.pop(donor, None)
        if state is not None and state.fetching is not None and donor not in self.dropped:
            self.broke_off.add(donor)
        if donor in self._waiting:
            self._waiting.remove(donor)
        for piece in self._pieces:
            piece.asked.pop(donor, None)
            piece.comparing = None if piece.comparing == donor else piece.comparing

    def next_deadline(self, now: float) -> float:
        """Return when ``act`` next has something to do if nothing else happens."""
        fetches = [fetch for piece in self._pieces for fetch in piece.asked.values()]
        idle = [donor for donor, state in self._donors.items() if state.fetching is None]
        slow = [
            at
            for number, piece in enumerate(self._pieces)
            if len(piece.asked) == 1
            for donor in idle
            if self._could_give(donor, number) and (at := self._slow_at(piece, donor)) > now
        ]
        return min([*slow, *(fetch.deadline for fetch in fetches)], default=float("inf"))

    def _fetch(self, donor: PeerId, state: _Donor, number: int, now: float) -> Fetch:
        shortest, longest = PIECE_BOUNDS_S
        piece = self._pieces[number]
        patience_s = min(max(PATIENCE * piece.size_bytes / state.rate, shortest), longest)
        self.asked_again += piece.was_asked and not piece.asked
        piece.was_asked = True
        fetch = piece.asked[donor] = Fetch(donor, number, now + patience_s)
        state.fetching, state.since = number, now
        return fetch

    def _wanted(self, donor: PeerId, now: float) -> int | None:
        """Return the piece to ask of this donor: one that nobody was asked for, else one whose donor is slow."""
        slow = None
        for number in self._wanted_pieces:
            piece = self._pieces[number]
            if piece.giver is not None or donor in piece.refused or not self._has(donor, number):
                continue
            if not piece.asked:
                return number
            if slow is None and len(piece.asked) == 1 and self._slow_at(piece, donor) <= now:
                slow = number
        return slow

    def _has(self, donor: PeerId, number: int) -> bool:
        held = self._held.get(donor)
        return held is None or number in held

    def _needed_beside(self) -> PeerId | None:
        """Return a waiting donor of a missing piece that none of the donors asked has."""
        for number in self._wanted_pieces:
            piece = self._pieces[number]
            if piece.giver is None and not any(self._could_give(each, number) for each in self._donors):
                for donor in self._waiting:
                    if self._could_give(donor, number):
                        return donor
        return None

    def _could_give(self, donor: PeerId, number: int) -> bool:
        return donor not in self._pieces[number].refused and self._has(donor, number)

    def _slow_at(self, piece: _PieceState, other: PeerId) -> float:
        """Return when the piece's donor counts as slow beside another: half its deadline if that one never gave."""
        (fetch,) = piece.asked.values()
        since, state = self._donors[fetch.donor].since, self._donors[other]
        half = (since + fetch.deadline) / 2
        return min(half, since + SLOW * piece.size_bytes / state.rate + SLOW_S) if state.has_given else half

    def _comparisons(self) -> list[Compare]:
        """Ask for one comparison at a time for each piece that has arrived, until enough copies are compared."""
        wanted = []
        for number, piece in enumerate(self._pieces):
            if piece.giver is None or piece.confirmed or piece.comparing is not None:
                continue
            said = piece.near | piece.far
            candidates = [
                each
                for each in (*self._donors, *self._waiting)
                if each != piece.giver and each not in said and self._has(each, number)
            ]
            if candidates and len(said) < (DISPUTE_QUORUM if self.is_disputed else CONFIRMATIONS):
                piece.comparing = candidates[number % len(candidates)]
                wanted.append(Compare(piece.comparing, number))
            elif said:
                self._decide(piece)
            elif not any(each != piece.giver and self._has(each, number) for each in self._known):
                piece.confirmed = True  # a swarm of two: nobody else to ask
                self._alone[number] = None
        return wanted

    def _decide(self, piece: _PieceState) -> None:
        """Decide by majority, the donor's own copy included. A tie discards the piece without a strike."""
        for_it, against = 1 + len(piece.near), len(piece.far)
        if for_it > against:
            piece.confirmed = True
            for odd in sorted(piece.far):
                self._strike(odd)
            return
        giver = piece.giver
        assert giver is not None
        piece.forget()
        piece.refused.add(giver)
        if against > for_it:
            self._strike(giver)

    def _strike(self, donor: PeerId) -> None:
        self._strikes[donor] = self._strikes.get(donor, 0) + 1
        if self._strikes[donor] < min(MAX_STRIKES, len(self._pieces)):
            return
        self.dropped.add(donor)
        self.lost(donor)
        for piece in self._pieces:
            piece.near.discard(donor)
            piece.far.discard(donor)
            if piece.giver == donor and not piece.confirmed:
                piece.forget()
