"""The state machine of one exchange, and the book of all exchanges under way.

``TRANSITIONS`` holds the table; docs/PROTOCOL.md shows it. A fragment is engaged from SWAPPING (its snapshot) until the
exchange commits, if later snapshots contain its displacement at once (``MAX_UNAPPLIED``), else until the trainer has
applied that. An offer engages nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.events import SwapDone
from p2ptrain.swarm.messages import Terms, is_keeper
from p2ptrain.swarm.rules import ASLEEP_S
from p2ptrain.swarm.transitions import Transition, TransitionTable
from p2ptrain.swarm.trust import per_fragment


class ExchangeState(Enum):
    OFFERED = "offered"
    SWAPPING = "swapping"
    CONFIRMING = "confirming"
    COMMITTED = "committed"


class ExchangeEvent(Enum):
    """Events that change an exchange's state. The values appear in docs/PROTOCOL.md."""

    OFFER = "Offer sent, or received and acceptable"
    ACCEPT = "Accept received, or sent"
    PAYLOADS = "both payloads are transferred"
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
        "the trainer applied the displacement; all its fragments are free. A failure changes nothing in this state",
    ),
)


DRAGGED = 0.75
"""Share of a payload's patience above which an exchange counts as dragged. The patience is four times what the slower
side's exchanges take, believed up to 16 times what ours take (``deadlines``). So a connection at its usual speed needs
a quarter, and one 12 times slower than others does not drag. Guess: compare durations of honest and adversarial slow
partners."""

MAX_UNAPPLIED = 2
"""Committed displacements of a fragment that the trainer may not have applied when the next exchange of it begins; each
takes four bytes per weight. With none, peers on busy machines, whose inner steps took up to a second, passed 18 % of
their outer steps alone."""

_UNDER_WAY = (ExchangeState.SWAPPING, ExchangeState.CONFIRMING)


@dataclass(slots=True, eq=False)
class Exchange:
    """One exchange under way. Only its own methods change its state, by ``TRANSITIONS``."""

    link: LinkId
    fragments: tuple[int, ...]
    mine: Terms
    started_at: float
    deadline: float
    late_at: float = inf
    """Time from which our unanswered offer no longer keeps us from another one; inf once that time has passed."""
    state: ExchangeState = field(default_factory=lambda: TRANSITIONS.to(None, ExchangeEvent.OFFER))
    round: int = 0  # the outer step that planned it; 0 if unplanned
    hurried: bool = False
    """Whether our offer has a shorter deadline than others, so that a missing answer says nothing about connections."""
    theirs: Terms | None = None
    swap_started_at: float = 0.0  # when both sides agreed
    patience_s: float = 0.0
    """Maximum duration by both sides' terms: until the deadline, if nothing holds this peer up."""
    is_timed: bool = True
    """Whether the duration says something about the partner and the connection."""
    sent_bytes: int = 0
    received_bytes: int = 0
    distance: float = 0.0
    norm: float = 0.0
    fingerprint: bytes = b""

    def _advance(self, event: ExchangeEvent) -> None:
        self.state = TRANSITIONS.to(self.state, event)

    @property
    def difference(self) -> float:
        """||theirs - mine|| per fragment."""
        return per_fragment(self.distance * self.norm, len(self.fragments))

    def swap(self, fragments: tuple[int, ...], theirs: Terms, now: float, deadline: float) -> None:
        self._advance(ExchangeEvent.ACCEPT)
        self.late_at = inf
        self.fragments = fragments
        self.theirs = theirs
        self.swap_started_at = now
        self.deadline = deadline
        self.patience_s = deadline - now

    def skip(self, seconds: float) -> None:
        """Exclude a time in which this peer did not run. A sleep's start is unknown, so its exchanges are not timed."""
        self.started_at += seconds
        if self.swap_started_at:
            self.swap_started_at += seconds
        self.is_timed = self.is_timed and seconds < ASLEEP_S

    def swapped_s(self, now: float) -> float:
        """Return the seconds since both sides agreed; 0 before."""
        return now - self.swap_started_at if self.state is not ExchangeState.OFFERED else 0.0

    def dragged(self, now: float) -> bool:
        """Report whether it took nearly all of the agreed time, if it is timed."""
        return self.is_timed and self.swapped_s(now) > DRAGGED * self.patience_s

    def confirm(self, done: SwapDone) -> None:
        self._advance(ExchangeEvent.PAYLOADS)
        self.sent_bytes, self.received_bytes = done.sent_bytes, done.received_bytes
        self.distance, self.norm, self.fingerprint = done.distance, done.norm, done.fingerprint

    def commit(self) -> None:
        self._advance(ExchangeEvent.ACKNOWLEDGE)
        self.deadline = inf


class ExchangeBook:
    """All exchanges under way, by link, and the free fragments.

    Args:
        fragments: those that may enter unplanned exchanges.
        weights: number of fragments of the weights; higher ones are pseudo-gradients.
    """

    def __init__(self, fragments: Iterable[int], weights: int) -> None:
        fragments = sorted(fragments)
        self._early = frozenset(fragment for fragment in fragments if fragment < weights)  # free at the commit
        self._exchanges: dict[LinkId, Exchange] = {}
        self._last_exchanged = dict.fromkeys(fragments, -1)  # commit counter by fragment, longest waiting first
        self._commits = 0

    def __iter__(self) -> Iterator[Exchange]:
        """Iterate over a copy, so that exchanges may begin and end meanwhile."""
        return iter(list(self._exchanges.values()))

    def __len__(self) -> int:
        return len(self._exchanges)

    def get(self, link: LinkId) -> Exchange | None:
        return self._exchanges.get(link)

    def put(self, exchange: Exchange) -> None:
        self._exchanges[exchange.link] = exchange

    def commit(self, exchange: Exchange) -> None:
        """Record that an exchange has committed. One that mixed nothing here leaves its fragments waiting."""
        exchange.commit()
        if is_keeper(exchange.theirs):
            return
        self._commits += 1
        for fragment in sorted(exchange.fragments):
            if self._last_exchanged.pop(fragment, None) is not None:
                self._last_exchanged[fragment] = self._commits

    def remove(self, link: LinkId) -> Exchange | None:
        """Forget an exchange that ended; return it, if there was one."""
        exchange = self._exchanges.pop(link, None)
        if exchange is not None:
            TRANSITIONS.after(exchange.state, ExchangeEvent.END)  # raises if it may not end now
        return exchange

    def under_way(self) -> int:
        """Return the number of exchanges that both sides agreed on and that have neither committed nor failed."""
        return sum(exchange.state in _UNDER_WAY for exchange in self._exchanges.values())

    def engaged(self) -> set[int]:
        """Return the fragments that must not be snapshot again now."""
        unapplied: Counter[int] = Counter()
        engaged: set[int] = set()
        for exchange in self._exchanges.values():
            if exchange.state is ExchangeState.COMMITTED:
                unapplied.update(exchange.fragments)
            elif exchange.state is not ExchangeState.OFFERED:
                engaged.update(exchange.fragments)
        for fragment, count in unapplied.items():
            if count >= MAX_UNAPPLIED or fragment not in self._early:
                engaged.add(fragment)
        return engaged

    def free_fragments(self) -> list[int]:
        """Return the fragments that may enter an unplanned exchange, longest waiting first."""
        engaged = self.engaged()
        return [fragment for fragment in self._last_exchanged if fragment not in engaged]

    def limit(self, fragments: Iterable[int]) -> None:
        """Allow only these fragments in unplanned exchanges from now on."""
        waited = sorted((self._last_exchanged.get(fragment, -1), fragment) for fragment in fragments)
        self._last_exchanged = {fragment: commit for commit, fragment in waited}

    def offers(self, round_: int) -> list[Exchange]:
        """Return our unanswered offers that this outer step planned; for 0, the unplanned ones."""
        offered = ExchangeState.OFFERED
        return [each for each in self._exchanges.values() if each.state is offered and each.round == round_]

    def is_engaged_with(self, peer: PeerId) -> bool:
        return any(
            exchange.link.peer == peer and not exchange.round and exchange.state in _UNDER_WAY
            for exchange in self._exchanges.values()
        )

    def next_deadline(self) -> float:
        return min([min(each.deadline, each.late_at) for each in self._exchanges.values()], default=inf)

    def partners(self) -> set[PeerId]:
        """Return the partners of exchanges that have not committed."""
        committed = ExchangeState.COMMITTED
        return {exchange.link.peer for exchange in self._exchanges.values() if exchange.state is not committed}
