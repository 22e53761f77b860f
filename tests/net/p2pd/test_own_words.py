"""Reasons of failed dials in the words of a real p2pd, and their quotations in docs/ERRORS.md."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.error_text import short_reason
from p2ptrain.net.transport import P2PTransport

pytestmark = pytest.mark.net

RUN = RunId("ab" * 32)
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PAGE = (Path(__file__).parents[3] / "docs/ERRORS.md").read_text(encoding="utf-8")
TABLE = PAGE.split("### In the network daemon's words")[1].split("\n## ")[0]
P2PDS = re.findall(r"^\| `([^`]+)`", TABLE, re.MULTILINE)
"""go-libp2p's messages that p2ptrain passes on, as the page quotes them; ``…`` stands for inserted values."""
SHOWN = re.findall(r"^\| `[^`]+` \| ([^|]+) \|", TABLE, re.MULTILINE)
"""Short forms of these messages, in the same order."""


def is_said_in(words: str, text: str) -> bool:
    """Return whether a template's fixed words appear in a text, in order."""
    return re.search(".*".join(map(re.escape, words.split("…"))), text) is not None


async def why(transport: P2PTransport, peer: PeerId, addresses: Sequence[str]) -> str:
    with pytest.raises(NetworkError) as caught:
        await transport.open(peer, addresses)
    return str(caught.value)


async def heard(folder: Path) -> list[str]:
    """Return a node's errors from dials of no address, of a closed port, of another peer than is there, and others."""
    ours, theirs, nobodys = (Identity.load_or_create(folder / f"{name}.key") for name in ("us", "them", "nobody"))
    nobody = nobodys.peer_id
    us = await Node.start(ours, RUN, listen=LOOPBACK, local=True)
    try:
        them = await Node.start(theirs, RUN, listen=LOOPBACK, local=True)
        try:
            there, dialing = f"/ip4/127.0.0.1/tcp/{them.port}", P2PTransport(us)
            with socket.socket() as silent:  # bound, but not listening
                silent.bind(("127.0.0.1", 0))
                closed = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
                return [
                    await why(dialing, nobody, []),
                    await why(dialing, nobody, [closed]),
                    await why(dialing, nobody, [closed]),
                    await why(dialing, nobody, [there]),
                    await why(dialing, nobody, [address.through(them.peer_id, there)]),
                    await why(dialing, them.peer_id, [there]),
                ]
        finally:
            await them.close()
    finally:
        await us.close()


def test_its_words_are_those_that_are_explained(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        texts = runner.run(heard(tmp_path))
    assert "dial backoff after: dial tcp4" in texts[2]
    assert texts[2].endswith("connect: connection refused")
    assert len(P2PDS) == 6
    expected = [SHOWN[at] for at in (4, 0, 0, 2, 3, 5)]
    assert [text for text, words in zip(texts, expected, strict=True) if words not in short_reason(text)] == []
    assert [words for words in sorted(P2PDS) if not any(is_said_in(words, text) for text in texts)] == []
    assert [text for text in texts if not any(is_said_in(words, text) for words in P2PDS)] == []
