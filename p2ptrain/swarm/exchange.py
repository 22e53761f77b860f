"""The state machine of one exchange, and the book of all exchanges under way.

``TRANSITIONS`` holds the table; docs/PROTOCOL.md shows it. A fragment is engaged from SWAPPING (its snapshot) until its
displacement is applied. An offer engages nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.events import Note, SwapDone
from p2ptrain.swarm.messages import Terms
from p2ptrain.swarm.rules import ASLEEP_S
from p2ptrain.swarm.transitions import Transition, TransitionTable
from p2ptrain.swarm.trust import per_fragment


class ExchangeState(Enum):
    """The progress of one exchange."""

    OFFERED = "offered"
    SWAPPING = "swapping"
    CONFIRMING = "confirming"
    COMMITTED = "committed"


class ExchangeEvent(Enum):
    """What moves an exchange on. The values are the words of docs/PROTOCOL.md."""

    OFFER = "Offer sent, or received and acceptable"
    ACCEPT = "Accept received, or sent"
    PAYLOADS = "both payloads are through"
    ACKNOWLEDGE = "Acknowledge received"
    END = "end"


TRANSITIONS: TransitionTable[ExchangeState, ExchangeEvent] = TransitionTable(
    "exchange",
    Transition(
        (None,),
        ExchangeEvent.OFFER,
        ExchangeState.OFFERED,
        "the initiator's exchange is due; the responder passes to SWAPPING at once",
    ),
    Transition(
        (ExchangeState.OFFERED,),
        ExchangeEvent.ACCEPT,
        ExchangeState.SWAPPING,
        "both sides take their snapshots and send",
    ),
    Transition(
        (ExchangeState.SWAPPING,),
        ExchangeEvent.PAYLOADS,
        ExchangeState.CONFIRMING,
        "the digests match, the difference is finite and no check of the weights fails; send Acknowledge",
    ),
    Transition(
        (ExchangeState.CONFIRMING,),
        ExchangeEvent.ACKNOWLEDGE,
        ExchangeState.COMMITTED,
        "hand the displacement to the trainer; close",
    ),
    Transition(
        (ExchangeState.OFFERED,),
        ExchangeEvent.END,
        None,
        "Decline, failure or deadline; or withdrawn: we accept another offer, leave or catch up. Nothing moves",
    ),
    Transition(
        (ExchangeState.SWAPPING,),
        ExchangeEvent.END,
        None,
        "failure or deadline, the initiator withdraws its offer, the payload does not fit the step widths, or we "
        "leave or catch up. Nothing moves on either side",
    ),
    Transition(
        (ExchangeState.CONFIRMING,),
        ExchangeEvent.END,
        None,
        "failure or deadline, or pulled weights replace ours. Count a possible half-commit",
    ),
    Transition(
        (ExchangeState.COMMITTED,),
        ExchangeEvent.END,
        None,
        "the trainer applied the displacement; the fragments are free. A failure changes nothing in this state",
    ),
)


DRAGGED = 0.75
"""Of a payload's patience. That is four times what the slower side's exchanges take, as far as it is believed, which
is to 16 times what ours take (``deadlines``): so whose line is slow as ever takes a quarter, and who takes 12 times as
long as others does not drag. A guess."""

_UNDER_WAY = (ExchangeState.SWAPPING, ExchangeState.CONFIRMING)


@dataclass(slots=True, eq=False)
class Exchange:
    """One exchange under way. Only its own methods change its state, by ``TRANSITIONS``."""

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

    def __post_init__(self) -> None:
        if self.state is not TRANSITIONS.after(None, ExchangeEvent.OFFER):
            raise RuntimeError(f"an exchange cannot begin in state {self.state.name}")

    def _advance(self, event: ExchangeEvent) -> None:
        self.state = TRANSITIONS.to(self.state, event)

    @property
    def difference(self) -> float:
        """||theirs - mine||, a fragment."""
        return per_fragment(self.distance * self.norm, len(self.fragments))

    def swap(self, fragments: tuple[int, ...], theirs: Terms, now: float, deadline: float) -> None:
        """Both sides agreed on these fragments."""
        self._advance(ExchangeEvent.ACCEPT)
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
        self._advance(ExchangeEvent.PAYLOADS)
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
        """Record that both sides have everything."""
        self._advance(ExchangeEvent.ACKNOWLEDGE)
        self.deadline = inf

    def end(self) -> None:
        """Check that the exchange may end in its state. The book forgets it."""
        TRANSITIONS.after(self.state, ExchangeEvent.END)


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
        """Forget an exchange that ended; return it, if there was one."""
        exchange = self._exchanges.pop(link, None)
        if exchange is not None:
            exchange.end()
        return exchange

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
