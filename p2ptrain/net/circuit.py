"""A place at a relay: circuit relay v2's HOP protocol, spoken over a stream of p2pd's.

Whoever holds a place is dialed through the relay: the relay asks them over the connection that they keep to it. p2pd
knows how to be dialed so, but it looks for relays by itself only among those that it was started with. So we ask for
places ourselves, of any node and at any time.

A relay never sees what passes: the connection through it is encrypted and authenticated end to end, like a direct one.

The messages are those of libp2p's specification (relay/circuit-v2), in protobuf: RESERVE goes out, STATUS comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from p2ptrain.errors import NetworkError
from p2ptrain.ids import PeerId, short
from p2ptrain.net import address, control
from p2ptrain.net.daemon import Daemon

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE_DEADLINE_S = 10.0
"""Connecting, asking and the answer. A guess: 20 ms were measured on loopback, a few round trips are usual."""

_RESERVE = bytes([8, 0])  # HopMessage{type = RESERVE}
_MAX_ANSWER_BYTES = 4096  # the specification's bound
_TYPE, _STATUS_FIELD = 1, 5  # fields of HopMessage
_STATUS_TYPE = 2
_OK = 100
_REFUSALS = {
    200: "its places are taken",
    201: "the circuit's limits are reached",
    202: "permission denied",
    400: "malformed message",
    401: "unexpected message",
}


async def reserve(daemon: Daemon, relay: PeerId, addresses: Sequence[str]) -> None:
    """Take or renew a place at a relay. Raises NetworkError, also at the deadline.

    A place is ours until the connection to the relay ends, an hour at most; asking again renews it.
    """
    try:
        async with asyncio.timeout(RESERVE_DEADLINE_S):
            await daemon.connect(relay, addresses)
            far_end, stream = await daemon.open_stream(relay, HOP_PROTOCOL)
            try:
                await stream.write(bytes([len(_RESERVE)]) + _RESERVE)
                status = read_status(await control.read_message(stream, _MAX_ANSWER_BYTES))
            finally:
                stream.close()
    except TimeoutError:
        raise NetworkError(f"{short(relay)} did not answer as a relay for {RESERVE_DEADLINE_S:.0f} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise NetworkError(f"{short(relay)} does not relay: {error}") from error
    if status != _OK:
        raise NetworkError(f"{short(relay)} gives no place as a relay: {_REFUSALS.get(status, f'status {status}')}")
    if far_end.relay is not None:
        raise NetworkError(f"{short(relay)} is itself behind a relay")


def read_status(message: bytes) -> int:
    """The status in a relay's answer; 0 where it has none. Raises ValueError for what is no such answer."""
    fields = dict(_numbers(message))
    return fields.get(_STATUS_FIELD, 0) if fields.get(_TYPE) == _STATUS_TYPE else 0


def _numbers(message: bytes) -> Iterator[tuple[int, int]]:
    """The fields of a protobuf message that are varints, by number; nested messages are passed over."""
    rest = message
    while rest:
        key, rest = address.split_varint(rest)
        if key & 7 not in (0, 2):
            raise ValueError("its answer is no answer of a relay")
        number, rest = address.split_varint(rest)
        if key & 7 == 0:
            yield key >> 3, number
        else:
            rest = rest[number:]
