"""Messages of the small services: lists of plain values, one per frame, encoded by ``p2ptrain.statements``."""

from __future__ import annotations

from typing import Any

from p2ptrain.base.errors import RemoteError
from p2ptrain.framing import FrameKind
from p2ptrain.ports import Link
from p2ptrain.statements import packed, unpacked

MOST_NESTED = 16
"""Deepest nesting of lists that is accepted: ours have at most five levels, and Python cannot even print a thousand.
Guess: the deepest message of all protocols would settle it."""


async def say(link: Link, words: list[Any]) -> None:
    """Send one list. Raises NetworkError."""
    await link.send(FrameKind.MESSAGE, packed(words))


async def hear(link: Link, about: str, most_bytes: int) -> list[Any]:
    """Receive one list. Raises NetworkError, and RemoteError for anything else or a longer frame.

    Args:
        about: subject of the message, for the error's text.
    """
    kind, body = await link.receive()
    if kind != FrameKind.MESSAGE:
        raise RemoteError(f"expected a message about {about}, got a frame of kind {kind}")
    words = unpacked(body, most_bytes)
    if _nests_deeper(words, MOST_NESTED):
        raise RemoteError(f"expected a message about {about}, got lists that are nested too deeply")
    return words


def _nests_deeper(words: list[Any], levels: int) -> bool:
    return levels == 0 or any(isinstance(each, list) and _nests_deeper(each, levels - 1) for each in words)
