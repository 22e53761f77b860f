"""A link between two simulated peers: messages, one swap, or a whole model.

A message sent at t arrives at t + latency. A payload arrives one latency after its last byte has passed both access
lines. A swap is complete on one side when the other side's payload has arrived and its own was sent. Everything that
happens to a peer goes through its ``later``, so that a frozen peer notices nothing until it thaws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.base.errors import MisfitError, NetworkError, RemoteError
from p2ptrain.base.ids import LinkId
from p2ptrain.swarm.events import Donated, LinkFailed, PeersSeen, Pulled, Received, Swap, SwapDone
from p2ptrain.swarm.keeping import words
from p2ptrain.swarm.messages import Accept, Message, Offer, WeightsReply
from sim.sizes import message_bytes, payload_bytes
from sim.transfers import Transfer

if TYPE_CHECKING:
    from sim.peer import SimulatedPeer


_PASSING_ON = (Offer, Accept, WeightsReply)
"""Messages that pass on presence records."""


@dataclass(slots=True, eq=False)
class LinkEnd:
    """One end of a link, open from the start; ``close`` and ``fail`` end it."""

    owner: SimulatedPeer
    link: LinkId
    latency_s: float
    """Seconds until a message of this end arrives."""
    other: LinkEnd | None = None
    is_open: bool = True
    breaks: float | None = None
    """Share of the payload at which the swap breaks; set by the side that begins the swap first."""
    swap: Swap | None = None
    snapshot: Any = None
    """Learner's published snapshot when the swap began."""
    proposals: Sequence[Any] = ()
    their_proposals: Sequence[Any] = ()
    """Proposals of both sides, sent before they encode if the codec needs them; ``has_proposed`` once ours are sent."""
    has_proposed: bool = False
    payload_begun: bool = False
    """Whether the other side's payload has begun to arrive."""
    transfer: Transfer | None = None
    """Our payload or weights, while they are being sent."""
    sent: bool = False
    encoded: Any = None
    arrived: Any = None
    """Payload from the partner's learner; ``difference`` is from our own."""
    difference: Any = None
    pulled: tuple[WeightsReply, list[Any]] | None = None
    is_gathering: bool = False
    """Whether the donor has given what it holds, and others give the rest: it may close."""

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message to the other end, if there is one."""
        if self.other is None:
            return
        if self.owner.adversary is not None:
            message = self.owner.adversary.says(message)
        size = message_bytes(message)
        self.owner.traffic.control_up += size
        self.other.owner.later(self.latency_s, self.other._receive, message, size)

    def _receive(self, message: Message, size: int) -> None:
        owner = self.owner
        owner.traffic.control_down += size
        if not self.is_open or (owner.adversary is not None and not owner.adversary.hears(message)):
            return
        if isinstance(message, _PASSING_ON) and message.known:
            owner.handle(PeersSeen(owner.network.live(message.known), from_lookup=False))
        owner.handle(Received(self.link, message, size))

    # --- closing and failing ------------------------------------------------------------------------------------------

    def close(self, why: str, in_order: bool = True) -> None:
        """Close this end; the other side notices one latency later."""
        self.owner.ends.pop(self.link, None)
        other = self._let_go()
        if other is not None and other.is_open:
            other.owner.later(self.latency_s, other.fail, why, False, in_order and self.swap is None)

    def fail(self, why: str, their_fault: bool = False, unbegun: bool = False, misfit: bool = False) -> None:
        """End the link after a failure or a close by the other side, and report it to our core."""
        if self.is_open and not self.is_gathering:
            self.owner.ends.pop(self.link, None)
            self._let_go()
            self.owner.handle(LinkFailed(self.link, why, their_fault, unbegun, misfit))

    def _let_go(self) -> LinkEnd | None:
        """End this side and return the other end. The two ends drop their references, so that both can be freed."""
        self._stop_transfer()
        self.is_open = False
        other, self.other = self.other, None
        return other

    # --- swaps --------------------------------------------------------------------------------------------------------

    def begin(self, swap: Swap) -> None:
        """Begin a swap that both cores agreed on: proposals first if the codec has any, then the payload."""
        assert self.other is not None
        owner = self.owner
        if self.swap is None and self.other.swap is None:
            self.breaks = self.other.breaks = owner.network.conditions.breaks_swap(owner.peer, self.link.peer)
        self.swap = swap
        self.snapshot, self.proposals = owner.learner.payloads.propose(swap.fragments)
        if self.proposals:
            self._start_transfer(payload_bytes([len(part) for part in self.proposals]), self._proposals_sent)
        else:
            self._send_payload()

    def _proposals_sent(self) -> None:
        assert self.other is not None
        self.other.owner.later(self.latency_s, self.other._take_proposals, self.proposals)
        self.has_proposed = True
        if self.their_proposals:
            self.owner.later(0.0, self._send_payload)

    def _payload_begins(self) -> None:
        self.payload_begun = True
        self._send_payload()

    def _take_proposals(self, proposals: Sequence[Any]) -> None:
        self.their_proposals = proposals
        self._send_payload()

    def _send_payload(self) -> None:
        """Send the payload once both proposals are known and the initiator has not withdrawn its offer."""
        if not self.is_open or self.swap is None or self.encoded is not None:
            return
        if self.proposals and not (self.has_proposed and self.their_proposals):
            return
        if not (self.proposals or self.link.outbound or self.payload_begun):
            return
        assert self.other is not None
        payloads, adversary = self.owner.learner.payloads, self.owner.adversary
        question = self.swap.fragments, self.proposals, self.their_proposals, self.snapshot
        payload = self.encoded = payloads.encode(*question)
        if adversary is not None:
            lie = adversary.sends(payload, payloads, question)
            if lie is None:
                return
            payload = lie
        self.snapshot = None
        size = payload_bytes([len(part) for part in payload.parts])
        if self.breaks is not None and self.other.encoded is None:  # the first payload is the one that breaks
            self._start_transfer(size * self.breaks, self.owner.later, self.latency_s, self._lose)
        else:
            self._start_transfer(size, self._payload_sent, payload)
        if self.link.outbound and not self.proposals:
            self.other.owner.later(self.latency_s, self.other._payload_begins)

    def _lose(self) -> None:
        if self.other is not None:
            self.other.owner.happen(self.other.fail, ("connection lost",))
        self.fail("connection lost")

    def _payload_sent(self, payload: Any) -> None:
        assert self.other is not None
        self.other.owner.later(self.latency_s, self.other._take_payload, payload)
        self.sent = True
        if self.arrived is not None:
            self.owner.later(0.0, self._complete_swap)

    def _take_payload(self, payload: Any) -> None:
        self.arrived = payload
        self._complete_swap()

    def _complete_swap(self) -> None:
        both_through = self.sent and self.encoded is not None and self.arrived is not None
        if not self.is_open or not both_through or self.difference is not None:
            return
        try:
            self.difference = self.owner.learner.payloads.difference(self.encoded, self.arrived.parts)
        except (NetworkError, RemoteError) as error:
            self.fail(str(error), isinstance(error, RemoteError), misfit=isinstance(error, MisfitError))
            return
        agreeing = sum(map(len, self.proposals))
        sent_bytes, received_bytes = agreeing + self.encoded.size_bytes, agreeing + self.arrived.size_bytes
        found = self.difference
        measured = found.distance, found.norm, found.fingerprint, found.sketched
        self.owner.handle(SwapDone(self.link, sent_bytes, received_bytes, *measured))

    # --- whole models -------------------------------------------------------------------------------------------------

    def donate(self) -> None:
        parts: Sequence[Any] = self.owner.learner.payloads.weights()
        if self.owner.adversary is not None:
            parts = self.owner.adversary.gives(parts)
        assert self.other is not None
        wanted = self.other.owner.core.held
        parts = [part if each in wanted else b"" for each, part in enumerate(parts)]
        self._start_transfer(payload_bytes([len(part) for part in parts]), self._weights_sent, parts)

    def _weights_sent(self, parts: Sequence[Sized]) -> None:
        assert self.other is not None
        self.other.owner.later(self.latency_s, self.other._take_weights, parts)
        self.owner.later(0.0, self.owner.handle, Donated(self.link, sum(map(len, parts))))

    def _take_weights(self, parts: Sequence[Sized]) -> None:
        if self.is_open and self.pulled is not None:
            self.pulled[1].extend(parts)
            self._gather()

    def _gather(self) -> None:
        """Finish the pull, or take fragments that the donor does not hold from others, one after another."""
        assert self.pulled is not None
        owner, parts = self.owner, self.pulled[1]
        lacking = frozenset(each for each in owner.core.held if not len(parts[each]))
        if not lacking:
            owner.handle(Pulled(self.link, sum(map(len, parts))))
            return
        self.is_gathering = True
        now = owner.world.now
        keepers = owner.core.keepers(now)
        for peer in owner.core.donors(now):
            donor, held = owner.network.peers.get(peer), keepers.get(peer, lacking) & lacking
            if donor is not None and donor.is_up and held:
                others: Sequence[Any] = donor.learner.payloads.weights()
                more = {each: others[each] for each in held}
                size = payload_bytes([len(part) for part in more.values()])
                owner.network.transfers.start(donor.up, owner.down, size, owner.later, 0.0, self._take_more, more, size)
                return
        self.is_gathering = False
        self.fail(f"no other peer sent fragments {words(lacking)}")

    def _take_more(self, more: Mapping[int, Any], size: float) -> None:
        self.owner.traffic.weights_down += size
        if self.is_open and self.pulled is not None:
            for each, part in more.items():
                self.pulled[1][each] = part
            self._gather()

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _start_transfer(self, size: float, action: Callable[..., None], *arguments: Any) -> None:
        assert self.other is not None
        up, down = self.owner.up, self.other.owner.down
        self.transfer = self.owner.network.transfers.start(up, down, size, self._transferred, size, action, arguments)

    def _transferred(self, size: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.transfer = None
        self._count(size)
        action(*arguments)

    def _stop_transfer(self) -> None:
        if self.transfer is not None:
            self._count(self.owner.network.transfers.stop(self.transfer))
            self.transfer = None

    def _count(self, size: float) -> None:
        assert self.other is not None
        ours, theirs = self.owner.traffic, self.other.owner.traffic
        if self.swap is not None:
            ours.payload_up += size
            theirs.payload_down += size
        else:
            ours.weights_up += size
            theirs.weights_down += size
