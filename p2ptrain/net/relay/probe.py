"""A probe that dials an address like an unknown peer: TCP, libp2p's protocol negotiation and its Noise handshake.

p2pd cannot do this, because it opens no second connection to a connected peer. A successful TCP connection is not
enough either: machines at home share a public address, and the router forwards the port to one of them. The probe
therefore goes on until the other end has proved its peer id (``net.relay.noise``), and disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.net.relay import noise

PROBE_DEADLINE_S = 5.0
"""Timeout for three round trips; a firewall that drops packets exhausts it. Guess: measure successful probes."""


async def probe(host: str, port: int, deadline_s: float = PROBE_DEADLINE_S) -> PeerId:
    """Return the peer that answers. Raises NetworkError if there is no answer, or no libp2p node with Noise."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return (await noise.greet(reader, writer))[1]
            finally:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        raise NetworkError("nobody answers") from None
    except ConnectionRefusedError:
        raise NetworkError("the connection is refused") from None
    except (OSError, EOFError) as error:
        raise NetworkError(f"no connection: {error}") from None
    except ValueError:
        raise NetworkError("another program answers") from None
