"""A peer that gets SIGKILL during an exchange, after another one is committed.

Its payload has left, but not the end of it. Takes the arguments of ``python -m peer``, with ``--home``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.cli import run_command
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.net import session
from p2ptrain.net.payload import send_payload
from p2ptrain.ports import Link
from peer.cli import peer
from peer.home import Home

home = Home(Path(sys.argv[sys.argv.index("--home") + 1]))


async def send_half(link: Link, parts: Sequence[bytes], others: Sequence[Link] = ()) -> None:
    # Counting payloads is not enough, since several exchanges run at once.
    if '"exchanged"' not in home.events.read_text():
        await send_payload(link, parts, others)
        return
    await link.send(FrameKind.CHUNK, memoryview(parts[0])[:MAX_CHUNK_BYTES])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    session.send_payload = send_half
    run_command(peer, name="victim")
