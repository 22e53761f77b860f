"""One exchange's state machine, and the book of all exchanges under way.

::

    state      on                      -> state      what the peer does
    ---------  ----------------------  -----------   ----------------------------------------------
    (none)     due, partner free       OFFERED       Open(Offer)
    (none)     their Offer, we accept  SWAPPING      Send(Accept), Swap
    (none)     their Offer, we do not  (none)        Send(Decline), Close
    OFFERED    Accept                  SWAPPING      Swap
    OFFERED    we accept another's     (none)        Close: the offer is withdrawn
    OFFERED    Decline                 (none)        Close, try another
    SWAPPING   SwapDone                CONFIRMING    Send(Acknowledge)
    CONFIRMING their Acknowledge       COMMITTED     Commit, Close
    COMMITTED  Applied                 (none)        fragments are free
    OFFERED    failure or deadline     (none)        Close, blame, try another
    SWAPPING   failure or deadline     (none)        Close, blame, try another      (dx = 0 on both sides)
    SWAPPING   they ended it unbegun   (none)        the same; their withdrawn offer is forgiven once in a row
    SWAPPING   it fits no step widths  (none)        the same; forgiven three times (``record.MISFITS_FORGIVEN``)
    CONFIRMING failure or deadline     (none)        Close, blame, count a possible half-commit
    COMMITTED  failure                 COMMITTED     nothing: the displacement is already ours
    any other message                  (none)        Close, blame: they broke the protocol

A fragment is engaged from SWAPPING (its snapshot) until Applied. An offer engages nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf

from p2ptrain.ids import LinkId, PeerId
from p2ptrain.swarm.events import Note, SwapDone
from p2ptrain.swarm.messages import Terms
from p2ptrain.swarm.rules import ASLEEP_S
from p2ptrain.swarm.trust import per_fragment


class ExchangeState(Enum):
    OFFERED = "offered"
    SWAPPING = "swapping"
    CONFIRMING = "confirming"
    COMMITTED = "committed"


DRAGGED = 0.75
"""Of a payload's patience. That is four times what the slower side's exchanges take, as far as it is believed, which
is to 16 times what ours take (``deadlines``): so whose line is slow as ever takes a quarter, and who takes 12 times as
long as others does not drag. A guess."""

_UNDER_WAY = (ExchangeState.SWAPPING, ExchangeState.CONFIRMING)


@dataclass(slots=True, eq=False)
class Exchange:
    """One exchange under way. Its place in the table is moved by these methods alone."""

    link: LinkId
    state: ExchangeState
    fragments: tuple[int, ...]
    mine: Terms
    started_at: float
    deadline: float
    round: int = 0
    """The outer step that planned it; 0: nobody did."""
    hurried: bool = False
    """Our offer must be answered sooner than others': that it was not says nothing of lines."""
    theirs: Terms | None = None
    swap_started_at: float = 0.0
    """Once both sides agreed."""
    patience_s: float = 0.0
    """How long it may take, as both sides' terms say: until its deadline, if nothing holds us up."""
    is_timed: bool = True
    """What it takes says something of its partner, and of the line."""
    sent_bytes: int = 0
    received_bytes: int = 0
    distance: float = 0.0
    norm: float = 0.0
    fingerprint: bytes = b""

    @property
    def difference(self) -> float:
        """||theirs - mine||, a fragment."""
        return per_fragment(self.distance * self.norm, len(self.fragments))

    def swap(self, fragments: tuple[int, ...], theirs: Terms, now: float, deadline: float) -> None:
        """Both sides agreed on these fragments."""
        self.state = ExchangeState.SWAPPING
        self.fragments = fragments
        self.theirs = theirs
        self.swap_started_at = now
        self.deadline = deadline
        self.patience_s = deadline - now

    def skip(self, seconds: float) -> None:
        """So long at least nothing ran here: it does not count as the exchange's time. Since when we slept nobody
        knows, and what spanned a sleep measures nothing."""
        self.started_at += seconds
        if self.swap_started_at:
            self.swap_started_at += seconds
        self.is_timed = self.is_timed and seconds < ASLEEP_S

    def swapped_s(self, now: float) -> float:
        """Since when both have agreed, in seconds; 0 before."""
        return now - self.swap_started_at if self.state is not ExchangeState.OFFERED else 0.0

    def dragged(self, now: float) -> bool:
        """Whether it took nearly all of the time that both had agreed on, as far as that can be told."""
        return self.is_timed and self.swapped_s(now) > DRAGGED * self.patience_s

    def confirm(self, done: SwapDone) -> None:
        """Both payloads are through on our side."""
        self.state = ExchangeState.CONFIRMING
        self.sent_bytes, self.received_bytes = done.sent_bytes, done.received_bytes
        self.distance, self.norm, self.fingerprint = done.distance, done.norm, done.fingerprint

    def told(self, seconds: float) -> Note:
        """What is said of it once it is committed. ``seconds``: since both had agreed."""
        return Note(
            kind="exchanged",
            peer=self.link.peer,
            seconds=seconds,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            distance=self.distance,
        )

    def commit(self) -> None:
        """Both sides have everything."""
        self.state = ExchangeState.COMMITTED
        self.deadline = inf


class ExchangeBook:
    """All exchanges under way, by link; answers which fragments are free."""

    def __init__(self, fragments: Iterable[int]) -> None:
        self._exchanges: dict[LinkId, Exchange] = {}
        self._last_exchanged = dict.fromkeys(sorted(fragments), -1)  # a counter, not a time; who waited longest first
        self._commits = 0

    def __iter__(self) -> Iterator[Exchange]:
        """What happens meanwhile may end them and begin others."""
        return iter(list(self._exchanges.values()))

    def __len__(self) -> int:
        return len(self._exchanges)

    def get(self, link: LinkId) -> Exchange | None:
        return self._exchanges.get(link)

    def put(self, exchange: Exchange) -> None:
        self._exchanges[exchange.link] = exchange

    def commit(self, exchange: Exchange) -> None:
        """Both sides have everything: its fragments have waited least from now on."""
        exchange.commit()
        self._commits += 1
        for fragment in sorted(exchange.fragments):
            if self._last_exchanged.pop(fragment, None) is not None:
                self._last_exchanged[fragment] = self._commits

    def remove(self, link: LinkId) -> Exchange | None:
        return self._exchanges.pop(link, None)

    def under_way(self) -> int:
        """Exchanges that both have agreed on, until they are committed or failed."""
        return sum(exchange.state in _UNDER_WAY for exchange in self._exchanges.values())

    def in_state(self, state: ExchangeState) -> list[Exchange]:
        return [exchange for exchange in self._exchanges.values() if exchange.state is state]

    def engaged(self) -> set[int]:
        """Fragments between snapshot and application; must not be snapshot again."""
        return {
            fragment
            for exchange in self._exchanges.values()
            if exchange.state is not ExchangeState.OFFERED
            for fragment in exchange.fragments
        }

    def free_fragments(self) -> list[int]:
        """Fragments that may enter an exchange that nobody planned, those that waited longest first."""
        engaged = self.engaged()
        return [fragment for fragment in self._last_exchanged if fragment not in engaged]

    def limit(self, fragments: Iterable[int]) -> None:
        """From now on these, and no others, may enter exchanges that nobody planned."""
        waited = sorted((self._last_exchanged.get(fragment, -1), fragment) for fragment in fragments)
        self._last_exchanged = {fragment: commit for commit, fragment in waited}

    def offers(self, round_: int) -> list[Exchange]:
        """Our unanswered offers that this outer step planned; of 0, those that nobody planned."""
        offered = ExchangeState.OFFERED
        return [each for each in self._exchanges.values() if each.state is offered and each.round == round_]

    def is_engaged_with(self, peer: PeerId) -> bool:
        """An exchange that nobody planned is under way with it, and not yet committed."""
        return any(
            exchange.link.peer == peer and not exchange.round and exchange.state in _UNDER_WAY
            for exchange in self._exchanges.values()
        )

    def next_deadline(self) -> float:
        """Of the first that is given up; infinite when none can be."""
        return min([exchange.deadline for exchange in self._exchanges.values()], default=inf)

    def partners(self) -> set[PeerId]:
        return {exchange.link.peer for exchange in self._exchanges.values()}
