"""A peer that SIGKILL hits in its third exchange: its payload is out, but for the end that makes it count.

Takes the arguments of ``python -m peer``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from p2ptrain.cli import run_command
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.net import session
from p2ptrain.net.payload import send_payload
from p2ptrain.ports import Link
from peer.cli import peer

LIVES = 3
_sent = 0


async def send_half(link: Link, parts: Sequence[bytes]) -> None:
    global _sent
    _sent += 1
    if _sent < LIVES:
        await send_payload(link, parts)
        return
    await link.send(FrameKind.CHUNK, memoryview(parts[0])[:MAX_CHUNK_BYTES])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    session.send_payload = send_half
    run_command(peer, name="victim")
