"""Message routing: which part of the core handles a message or a failed link, and which messages are violations.

A link carries one conversation, an exchange or a pull; its first message decides which. A message that belongs to the
other kind, comes from the wrong side or comes too late is an offence: the link is closed and its peer is penalized.
"""

from __future__ import annotations

from typing import assert_never

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.catchup import CatchUp
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import Close, LinkFailed
from p2ptrain.swarm.exchange import ExchangeState
from p2ptrain.swarm.exchange_manager import ExchangeManager
from p2ptrain.swarm.final_gossip import FinalGossip
from p2ptrain.swarm.matching import Violation, unfair_weight
from p2ptrain.swarm.messages import (
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Message,
    Offer,
    Terms,
    WeightsReply,
    WeightsRequest,
)
from p2ptrain.swarm.peer_info import FailureKind


class MessageRouter:
    def __init__(
        self, core: CoreState, exchanges: ExchangeManager, catch_up: CatchUp, final_gossip: FinalGossip
    ) -> None:
        self._core = core
        self._exchanges = exchanges
        self._catch_up = catch_up
        self._final_gossip = final_gossip

    def received(self, link: LinkId, message: Message, now: float) -> None:
        """Pass a message to the part of the core that waits for it. The first matching case decides."""
        match message:
            case Offer() | WeightsRequest() if self._exchanges.book.get(link) or self._catch_up.holds(link):
                self._violation(link, "a second opening message on one link", now)
            case Offer() | WeightsRequest() if link.outbound:
                self._violation(link, "an opening message in reply to ours", now)
            case Accept() | Acknowledge() if self._catch_up.holds(link):
                self._violation(link, "an answer to an offer in reply to a request for weights", now)
            case WeightsReply() if self._exchanges.book.get(link):
                self._violation(link, "weights in reply to an offer", now)
            case Decline() if (
                exchange := self._exchanges.book.get(link)
            ) and exchange.state is not ExchangeState.OFFERED:
                self._violation(link, "it declined what it had accepted", now)
            case Offer():
                reply = self._exchanges.offered(link, message, now)
                if isinstance(reply, Violation):
                    self._close_failed(link, reply.why, now)
                elif reply not in (DeclineReason.OTHER_RUN, DeclineReason.OTHER_PROTOCOL):
                    self._hear(link.peer, message.terms, now)
            case WeightsRequest():
                self._catch_up.requested(link, message, now)
            case Accept(terms=terms) if why := unfair_weight(terms, self._core.rules):
                self._close_failed(link, why, now)
            case Accept():
                self._exchanges.accepted(link, message, now)
                self._hear(link.peer, message.terms, now)
            case Decline():
                self._hear(link.peer, message, now)
                if self._catch_up.holds(link):
                    self._catch_up.declined(link, message, now)
                else:
                    self._exchanges.declined(link, message, now)
            case Acknowledge():
                if self._exchanges.acknowledged(link, now):
                    self._final_gossip.exchanged(now)
            case WeightsReply():
                self._catch_up.replied(link, message, now)
            case _:
                assert_never(message)

    def failed(self, event: LinkFailed, now: float) -> None:
        core = self._core
        if self._catch_up.failed(event, now):
            return
        if self._exchanges.book.get(event.link) is not None:
            self._exchanges.failed(event, now)
        elif event.their_fault and not core.members.is_distrusted(event.link.peer, now):
            core.record_failure(event, FailureKind.OFFENCE, now)  # garbage in place of an opening message

    def _hear(self, peer: PeerId, said: Terms | Decline, now: float) -> None:
        ceiling = self._core.bounds.ceiling
        settled = said.settled if isinstance(said, Terms) else None
        if 0 <= said.progress <= ceiling:  # False for NaN
            self._core.members.hear(peer, said.state, said.step, said.progress, now, settled)

    def _close_failed(self, link: LinkId, why: str, now: float) -> None:
        self.failed(LinkFailed(link, why, their_fault=True), now)
        self._core.emit(Close(link))

    def _violation(self, link: LinkId, why: str, now: float) -> None:
        event = LinkFailed(link, why, their_fault=True)
        self._exchanges.failed(event, now)
        self._catch_up.failed(event, now)
        self._core.emit(Close(link))
