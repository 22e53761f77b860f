"""Messages of the small services: lists of plain values, one per frame, encoded by ``p2ptrain.statements``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.framing import FrameKind
from p2ptrain.ports import Link, Transport
from p2ptrain.statements import packed, unpacked

MAX_NESTED = 16
"""Deepest nesting of lists that is accepted: ours have at most five levels, and Python cannot even print a thousand.
Guess: the deepest message of all protocols would settle it."""


async def send_message(link: Link, fields: list[Any]) -> None:
    """Send one list. Raises NetworkError."""
    await link.send(FrameKind.MESSAGE, packed(fields))


async def receive_message(link: Link, about: str, most_bytes: int) -> list[Any]:
    """Receive one list. Raises NetworkError, and RemoteError for anything else or a longer frame.

    Args:
        about: subject of the message, for the error's text.
    """
    kind, body = await link.receive()
    if kind != FrameKind.MESSAGE:
        raise RemoteError(f"expected a message about {about}, got a frame of kind {kind}")
    fields = unpacked(body, most_bytes)
    if _nests_deeper(fields, MAX_NESTED):
        raise RemoteError(f"expected a message about {about}, got lists that are nested too deeply")
    return fields


async def request(
    transport: Transport,
    peer: PeerId,
    addresses: Sequence[str],
    fields: list[Any],
    *,
    about: str,
    most_bytes: int,
    deadline_s: float | None = None,
) -> list[Any]:
    """Send one list on a new link and return the response. Raises NetworkError, also at the deadline, and RemoteError.

    Args:
        about, most_bytes: as for ``receive_message``.
        deadline_s: timeout, dialing included; None: only those of the link.
    """
    try:
        async with asyncio.timeout(deadline_s):
            link = await transport.open(peer, addresses)
            try:
                await send_message(link, fields)
                return await receive_message(link, about, most_bytes)
            finally:
                await link.close()
    except TimeoutError:
        raise NetworkError(f"{short(peer)} did not answer a request about {about} within {deadline_s:.0f} s") from None


def _nests_deeper(fields: list[Any], levels: int) -> bool:
    return levels == 0 or any(isinstance(each, list) and _nests_deeper(each, levels - 1) for each in fields)
