"""The talk of the small services: lists of plain values, one a frame, in the writing of ``p2ptrain.statements``."""

from __future__ import annotations

from typing import Any

from p2ptrain.errors import RemoteError
from p2ptrain.framing import FrameKind
from p2ptrain.ports import Link
from p2ptrain.statements import packed, unpacked


async def say(link: Link, words: list[Any]) -> None:
    """Send one list. Raises NetworkError."""
    await link.send(FrameKind.MESSAGE, packed(words))


async def hear(link: Link, about: str, most_bytes: int) -> list[Any]:
    """Receive one list. Raises NetworkError, and RemoteError for what is none or is longer.

    Args:
        about: what the talk is of, for the error's text.
    """
    kind, body = await link.receive()
    if kind != FrameKind.MESSAGE:
        raise RemoteError(f"words about {about} were due, not a frame of kind {kind}")
    return unpacked(body, most_bytes)


__all__ = ["hear", "say"]
