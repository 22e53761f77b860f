"""Admission protocol: every node of a closed run serves the access list; an invite issuer also signs certificates.

One request and one response, in MESSAGE frames that hold a statement's fields (``p2ptrain.statements``)::

    ["rulings", serial]                        ["rulings", bytes]     empty: none newer than that
    ["come", [invite], introduction]           ["came", at, attestation]  or  ["refused", why]

The author or the issuer that the invite names signs every response; the protocol adds no protection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.admission import (
    MAX_ACCESS_LIST_BYTES,
    Certificate,
    Gate,
    Invite,
    InviteCredential,
    InviteRegister,
    Refusal,
)
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.links import Limits, origin_of
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import SlidingWindowLimit
from p2ptrain.net.rpc import receive_message, request, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Clock, Link, Transport
from p2ptrain.statements import Sign

ADMISSION_PROTOCOL = "/p2ptrain/admission/1"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=2)
"""A request has 1 kB, a response at most 60 kB. Guess: the requests at the start of a large run would settle it."""
_ABOUT = "admission"
_MAX_QUESTION_BYTES = 1024
_MAX_ANSWER_BYTES = MAX_ACCESS_LIST_BYTES + 64


@dataclass(slots=True)
class AdmissionHandler:
    """Request handler: answers from the gate's access list and, as an issuer, the register of invites."""

    gate: Gate
    register: InviteRegister | None = None
    """Admissions by invite; None if this node is not an issuer."""
    sign: Sign | None = None
    keep: Callable[[bytes, PeerId, str], None] = lambda encoded, guest, invite: None
    """Called to save the register, with the admitted peer and the invite's id. Raises OSError."""
    wall: Clock = wall
    """Clock for dates only; it may be set back."""
    _allowance: SlidingWindowLimit = field(
        default_factory=lambda: SlidingWindowLimit(overall=240, each=12, window_s=60.0)
    )
    """Rate limit; checking a request takes about 1 ms. Guess: the requests at the start of a large run would settle
    it."""

    async def answer(self, link: Link) -> None:
        """Answer one request, over any link. Raises NetworkError and RemoteError."""
        question = await receive_message(link, _ABOUT, _MAX_QUESTION_BYTES)
        if not self._allowance.take(link.peer, asyncio.get_running_loop().time(), origin_of(link)):
            raise NetworkError(f"{short(link.peer)} sent too many admission requests")
        match question:
            case ["rulings", int(serial)]:
                ours = self.gate.access_list
                await send_message(link, ["rulings", ours.encode() if ours.serial > serial else b""])
            case ["come", invite, bytes(introduction)]:
                await send_message(link, self._guest(link.peer, invite, introduction))
            case other:
                raise RemoteError(f"expected an admission request, got {str(other)[:80]}")
        await link.close()

    def _guest(self, peer: PeerId, raw: object, introduction: bytes) -> list[Any]:
        """Admit the peer at the other end of the link, whose identity the link proves, and to no other peer."""
        gate = self.gate
        if self.register is None or self.sign is None:  # an invite may name this node without its consent
            raise NetworkError(f"{short(peer)} asked for a membership certificate, but this node issues none")
        invite = Invite.read(raw, gate.run, gate.author)
        answer = self.register.admit(invite, peer, introduction, gate.access_list, self.wall(), self.sign)
        if isinstance(answer, Refusal):
            return ["refused", answer.value]
        try:
            self.keep(self.register.encode(), peer, invite.id)
        except OSError as error:
            raise NetworkError(f"the record of used invites cannot be saved: {error.strerror}") from error
        return ["came", *answer]


async def serve_admission(node: Node, handler: AdmissionHandler, rates: Throttles | None = None) -> P2PTransport:
    """Answer admission requests until the returned transport is closed."""
    transport = P2PTransport(node, ADMISSION_PROTOCOL, LIMITS, rates, serves_others=True)
    await transport.listen(handler.answer)
    return transport


async def ask_access_list(transport: Transport, peer: PeerId, addresses: Sequence[str], gate: Gate) -> bool:
    """Ask a node for an access list newer than the gate's and take it; return whether there was one.

    Raises NetworkError and RemoteError.
    """
    match await _ask(transport, peer, addresses, ["rulings", gate.access_list.serial]):
        case ["rulings", bytes(encoded)]:
            return bool(encoded) and gate.take(encoded)
        case other:
            raise RemoteError(f"expected an access list, got {str(other)[:80]}")


async def come_in(
    transport: Transport, addresses: Sequence[str], credential: InviteCredential, gate: Gate, me: PeerId
) -> Certificate | Refusal:
    """Present an invite to its issuer; return the certificate, or the reason for a refusal.

    Raises NetworkError and RemoteError.
    """
    invite, introduction = credential.invite, credential.introduce(gate.run, me)
    match await _ask(transport, invite.issuer, addresses, ["come", invite.fields(), introduction]):
        case ["came", int(at), bytes(attestation)]:
            certificate = Certificate(invite, me, introduction, at, attestation)
            return Certificate.decode(certificate.encode(), gate.run, gate.author)
        case ["refused", str(why)] if why in set(Refusal):
            return Refusal(why)
        case other:
            raise RemoteError(f"expected a membership certificate, got {str(other)[:80]}")


async def _ask(transport: Transport, peer: PeerId, addresses: Sequence[str], question: list[Any]) -> list[Any]:
    return await request(
        transport, peer, addresses, question, about=_ABOUT, most_bytes=_MAX_ANSWER_BYTES, deadline_s=3 * LIMITS.idle_s
    )
