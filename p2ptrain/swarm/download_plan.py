"""Taking a model from several donors at once: which piece to ask of whom, and whom to believe. Pure.

::

    piece      on                                        -> becomes     what is asked
    ---------  ----------------------------------------  -----------   -------------------------------------------
    MISSING    a donor is idle                           ASKED         Fetch
    ASKED      it is slow, and another is idle           ASKED         Fetch, of a second donor: who is first counts
    ASKED      all its donors are lost                   MISSING
    ASKED      it is here, its digest right              HERE          Cancel of the other; Compare, of ``WITNESSES``
    HERE       all their copies are near                 CONFIRMED
    HERE       somebody's copy of any piece is far       HERE          Compare, of ``JURY``, of all pieces
    HERE       most copies are near                      CONFIRMED     (those that are far were odd: a strike)
    HERE       most copies are far                       MISSING       (the giver was odd: a strike)
    HERE       there never was anybody else              CONFIRMED

A digest proves transport only. What a piece is worth is known from another peer's copy of it: peers of one swarm are
never the same, but near. Copies are compared by sketches of some hundred bytes (``train.sketch``), made after the piece
is here. Any donor may be asked for one, also those that give no piece: few that lie together are outvoted wherever one
honest copy is seen beside theirs. A donor with ``MOST_STRIKES`` is dropped, and what nobody else has confirmed of it is
asked of others. A donor that is lost costs the pieces that it had not finished, and nothing else.

The shell fetches and compares, and says how it went; ``DownloadPlan`` holds no byte of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.base.ids import PeerId

MOST_DONORS = 3
"""Asked at once. A guess: two for speed, and one more to tell which of two is odd."""

PIECE_BYTES = 4 << 20
"""The longest piece: fragments that are longer are cut. Both sides cut alike, so this is part of the protocol. A lost
donor costs at most one. At 100 Mbit/s one takes .3 s, and the round trip before it, of .1 s, a quarter of the whole."""

NEAR = 0.5
"""Two copies that differ by no more than this share of the shorter one's length are of one swarm. Of equally fast peers
.31 was measured at the most (docs/SECURITY.md)."""

WITNESSES = 2
"""Others whose copies are near before a piece counts, where nobody is far: of two that lie together, one gives it."""

JURY = 6
"""Others who are asked for a sketch once copies are far apart; the giver is the seventh. A guess: two or three liars
among seven are the minority, and a sketch costs half a kilobyte."""

MOST_STRIKES = 2
"""A donor may be odd once: it may itself be new."""

FIRST_RATE = 31_250.0
"""Bytes per second of a donor that nothing was measured of: .25 Mbit/s, the lowest cap that an owner may set. Who stops
sending altogether is found by its silence, long before."""

SLOW, SLOW_S = 2.0, 1.0
"""To one that is idle and has given before, a donor is slow that takes so many times as long as it would, and so many
seconds more. Guesses."""

PATIENCE = 4.0
"""A piece may take so many times as long as its donor's last one did. A line may be shared by so many exchanges."""

PIECE_BOUNDS_S = (30.0, 300.0)
"""Of a piece's deadline, dialing its donor included, which may take 20 s (``net.links.Limits``). Guesses."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask this donor for this piece of its pinned snapshot; it is lost if the piece is not here by then."""

    donor: PeerId
    piece: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Another donor was faster."""

    donor: PeerId
    piece: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Ask this donor for a sketch of its own copy of a piece that is here."""

    donor: PeerId
    piece: int


Action = Fetch | Cancel | Compare


@dataclass(frozen=True, slots=True)
class Span:
    """Where a piece lies: bytes ``start`` to ``stop`` of a fragment in fp32."""

    fragment: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(sizes: Sequence[int]) -> list[Span]:
    """The pieces of a model whose fragments have so many bytes, in order."""
    return [
        Span(fragment, start, min(start + PIECE_BYTES, size))
        for fragment, size in enumerate(sizes)
        for start in range(0, size, PIECE_BYTES)
    ]


@dataclass(slots=True)
class _PieceState:
    """One piece's way."""

    size_bytes: int
    asked: dict[PeerId, Fetch] = field(default_factory=dict)
    giver: PeerId | None = None
    comparing: PeerId | None = None
    near: set[PeerId] = field(default_factory=set)
    far: set[PeerId] = field(default_factory=set)
    """Whose copies are near to, and far from, the one that is here."""
    refused: set[PeerId] = field(default_factory=set)
    """Whose copy was odd: not asked for this piece again."""
    confirmed: bool = False
    was_asked: bool = False

    def forget(self) -> None:
        """It is not here any more."""
        self.giver, self.comparing, self.confirmed, self.near, self.far = None, None, False, set(), set()


@dataclass(slots=True)
class _Donor:
    """What we know of one that gives."""

    rate: float = FIRST_RATE
    has_given: bool = False
    fetching: int | None = None
    since: float = 0.0


class DownloadPlan:
    """All pieces of one model.

    Args:
        sizes: bytes of each piece.
        donors: who may be asked, in the order of preference; the first few are, and the others take lost ones' places.
        have: pieces that are here from an earlier attempt, and who gave them. They are compared like all others.
    """

    def __init__(
        self, sizes: Sequence[int], donors: Sequence[PeerId], have: Mapping[int, PeerId] | None = None
    ) -> None:
        self._pieces = [_PieceState(size) for size in sizes]
        self._waiting = list(dict.fromkeys(donors))
        self._had_others = len({*self._waiting, *(have or {}).values()}) > 1
        self._donors: dict[PeerId, _Donor] = {}
        self._strikes: dict[PeerId, int] = {}
        self.dropped: set[PeerId] = set()
        """Donors whose copies were odd too often."""
        self.was_compared = False
        """Somebody's copy was near another's."""
        self.is_disputed = False
        """Some copies were far from each other."""
        self.broke_off: set[PeerId] = set()
        """Donors that were lost before a piece that they were asked for was here."""
        self.asked_again = 0
        """Times that a piece was asked for anew: its donor was lost, or its copy odd. A second one beside a donor that
        is slow does not count."""
        for number, giver in (have or {}).items():
            self._pieces[number].giver = giver

    @property
    def is_done(self) -> bool:
        """All pieces are here, and believed."""
        return all(piece.confirmed for piece in self._pieces)

    @property
    def is_stuck(self) -> bool:
        """After ``act``: nobody is left who could give what is missing, or confirm what is here."""
        return not self.is_done and not any(piece.asked or piece.comparing for piece in self._pieces)

    @property
    def lacks_pieces(self) -> bool:
        """Some are not here yet."""
        return any(piece.giver is None for piece in self._pieces)

    @property
    def here(self) -> dict[int, PeerId]:
        """What to begin with next time: the pieces that are here, and who gave them."""
        return {number: piece.giver for number, piece in enumerate(self._pieces) if piece.giver is not None}

    def act(self, now: float) -> list[Action]:
        """What to do now. Deadlines that have passed cost their donors."""
        for fetch in [fetch for piece in self._pieces for fetch in piece.asked.values() if fetch.deadline <= now]:
            self.lost(fetch.donor)
        while self._waiting and len(self._donors) < MOST_DONORS:
            self._donors[self._waiting.pop(0)] = _Donor()
        actions: list[Action] = []
        dropped = -1
        while dropped < (dropped := len(self.dropped)):  # whom they dropped judges nothing any more: ask others
            actions += self._comparisons()
        actions = [each for each in actions if each.donor not in self.dropped]
        for donor, state in self._donors.items():
            if state.fetching is None and (piece := self._wanted(donor, now)) is not None:
                actions.append(self._fetch(donor, state, piece, now))
        return actions

    def fetched(self, donor: PeerId, number: int, now: float) -> list[Action]:
        """A piece came whole, with the digest that its donor sent ahead. It counts if it is the first to come."""
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
        """How far this donor's copy is from the one that is here (``train.sketch.distance``); NaN for no number."""
        piece = self._pieces[number]
        if piece.comparing != donor or piece.giver is None:
            return []
        piece.comparing = None
        if distance <= NEAR:
            piece.near.add(donor)
            self.was_compared = True
        else:
            piece.far.add(donor)
            if not self.is_disputed:  # whoever confirmed what is here may lie together with who gave it
                self.is_disputed = True
                for each in self._pieces:
                    each.confirmed = False
        return self.act(now)

    def lost(self, donor: PeerId) -> None:
        """It is gone, too slow, or broke the protocol. What it gave stays, if somebody confirms it."""
        state = self._donors.pop(donor, None)
        if state is not None and state.fetching is not None and donor not in self.dropped:
            self.broke_off.add(donor)
        if donor in self._waiting:
            self._waiting.remove(donor)
        for piece in self._pieces:
            piece.asked.pop(donor, None)
            piece.comparing = None if piece.comparing == donor else piece.comparing

    def next_deadline(self, now: float) -> float:
        """When ``act`` has something to do, if nothing happens until then."""
        fetches = [fetch for piece in self._pieces for fetch in piece.asked.values()]
        idle = [donor for donor, state in self._donors.items() if state.fetching is None]
        slow = [
            at
            for piece in self._pieces
            if len(piece.asked) == 1
            for donor in idle
            if donor not in piece.refused and (at := self._slow_at(piece, donor)) > now
        ]
        return min([*slow, *(fetch.deadline for fetch in fetches)], default=float("inf"))

    # --- helpers --------------------------------------------------------------------------------------------------

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
        """The piece that this donor is to give: one that nobody was asked for; else one whose donor is slow."""
        slow = None
        for number, piece in enumerate(self._pieces):
            if piece.giver is not None or donor in piece.refused:
                continue
            if not piece.asked:
                return number
            if slow is None and len(piece.asked) == 1 and self._slow_at(piece, donor) <= now:
                slow = number
        return slow

    def _slow_at(self, piece: _PieceState, other: PeerId) -> float:
        """When its donor is slow to this other one: where nothing is known of that, when half of its time is over."""
        (fetch,) = piece.asked.values()
        since, state = self._donors[fetch.donor].since, self._donors[other]
        half = (since + fetch.deadline) / 2
        return min(half, since + SLOW * piece.size_bytes / state.rate + SLOW_S) if state.has_given else half

    def _comparisons(self) -> list[Compare]:
        """One at a time for each piece that is here, until enough have said what they have."""
        wanted = []
        for number, piece in enumerate(self._pieces):
            if piece.giver is None or piece.confirmed or piece.comparing is not None:
                continue
            said = piece.near | piece.far
            judges = [each for each in (*self._donors, *self._waiting) if each != piece.giver and each not in said]
            if judges and len(said) < (JURY if self.is_disputed else WITNESSES):
                piece.comparing = judges[number % len(judges)]
                wanted.append(Compare(piece.comparing, number))
            elif said:
                self._decide(piece)
            elif not self._had_others:
                piece.confirmed = True  # a swarm of two: there is nobody else to ask
        return wanted

    def _decide(self, piece: _PieceState) -> None:
        """Most copies are right, the giver's own among them; one word against one is nobody's."""
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
        """Its copy was odd."""
        self._strikes[donor] = self._strikes.get(donor, 0) + 1
        if self._strikes[donor] < min(MOST_STRIKES, len(self._pieces)):
            return
        self.dropped.add(donor)
        self.lost(donor)
        for piece in self._pieces:
            piece.near.discard(donor)
            piece.far.discard(donor)
            if piece.giver == donor and not piece.confirmed:
                piece.forget()
