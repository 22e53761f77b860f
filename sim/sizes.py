"""Sizes on the wire, without building the messages, and the sums of what a peer sent and received.

Exact: a control message is its frame (``p2ptrain.framing``); a payload is its parts with chunk headers and digests.
Layers below our frames are left out: libp2p's multiplexer, Noise, TCP and IP, together a few per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from p2ptrain import wire
from p2ptrain.framing import DIGEST_BYTES, HEADER_BYTES, MAX_CHUNK_BYTES, PartEnd, encode_part_end
from p2ptrain.swarm.messages import Accept, Decline, Message, Offer, Presence, WeightsReply

_PART_END_BYTES = HEADER_BYTES + len(encode_part_end(PartEnd(0, 0, bytes(DIGEST_BYTES))))


def message_bytes(message: Message) -> int:
    """Return the bytes of a control message's frame."""
    known: tuple[Presence, ...] = ()
    if isinstance(message, Offer | Accept | Decline | WeightsReply):
        known, message = message.known, replace(message, known=())
    return HEADER_BYTES + len(wire.encode_message(message)) + sum(map(presence_bytes, known))


@lru_cache(maxsize=1 << 16)
def presence_bytes(presence: Presence) -> int:
    """Return the bytes of a presence record, in the directory or passed on; peers pass on each record many times."""
    return len(wire.encode_presence(presence))


def payload_bytes(parts: Sequence[int]) -> int:
    """Return the bytes of a payload whose parts have these sizes: chunks with headers, and each part's end."""
    return sum(size + HEADER_BYTES * -(-size // MAX_CHUNK_BYTES) + _PART_END_BYTES for size in parts)


@dataclass(slots=True)
class SimulatedTraffic:
    """Bytes of one peer by kind (``report.Bytes``); broken transfers count as far as they came."""

    payload_up: float = 0.0
    payload_down: float = 0.0
    weights_up: float = 0.0
    weights_down: float = 0.0
    control_up: float = 0.0
    control_down: float = 0.0
    directory_up: float = 0.0
    directory_down: float = 0.0
