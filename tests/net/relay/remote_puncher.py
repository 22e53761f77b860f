"""One peer's network without training, in a process of its own, which contacts others; for network namespaces.

Usage: remote_puncher.py FOLDER NAME BOOTSTRAP [OTHER …]. ``BOOTSTRAP`` is a multiaddress with a peer id. The process
writes its addresses to FOLDER/NAME.json once others can reach it; then it contacts each OTHER in turn, sends some
bytes, and writes how that went to FOLDER/NAME.contacts.json. It ends when FOLDER/stop exists.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import FrameKind
from p2ptrain.manifest import JoinLink
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import StreamLink
from p2ptrain.ports import Link
from peer.home import Addresses, Home
from peer.network import Connection
from peer.start_options import PeerOptions

RUN = RunId("0" * 64)
CHUNK = bytes(1 << 20)
FIRST_S = float(os.environ.get("FIRST_S", "5"))
"""Time since the first contact within which a direct connection is wanted."""


async def answer(link: Link) -> None:
    """Count the chunks of a link until an empty message, then say so."""
    while (await link.receive())[0] == FrameKind.CHUNK:
        pass
    await link.send(FrameKind.MESSAGE, b"done")


async def contact(connection: Connection, peer: PeerId, addresses: list[str], megabytes: int) -> dict[str, Any]:
    """Open links to a peer until one is direct or the time is over; then send bytes on another one."""
    began, relayed = time.monotonic(), 0
    while True:
        try:
            link = await connection._transport.open(peer, addresses)  # type: ignore[union-attr]
        except (NetworkError, AttributeError) as error:
            if time.monotonic() - began > 4 * FIRST_S:
                return {"peer": peer, "why": str(error)}
            await asyncio.sleep(0.2)
            continue
        took_s, relay = time.monotonic() - began, link.far_end.relay
        await say(link, 0)
        if relay is None or took_s > FIRST_S:
            break
        relayed += 1
        await asyncio.sleep(0.2)
    found = {"peer": peer, "direct": relay is None, "seconds": round(took_s, 3), "relayed_before": relayed}
    if megabytes:
        link = await connection._transport.open(peer, addresses)  # type: ignore[union-attr]
        began = time.monotonic()
        await say(link, megabytes)
        found["mbit_s"] = round(8 * megabytes * len(CHUNK) / (time.monotonic() - began) / 1e6, 1)
    return found


async def say(link: StreamLink, megabytes: int) -> None:
    try:
        for _ in range(megabytes):
            await link.send(FrameKind.CHUNK, CHUNK)
        await link.send(FrameKind.MESSAGE, b"")
        await link.receive()
    finally:
        await link.close()


async def main(folder: Path, name: str, bootstrap: str, others: list[str]) -> None:
    identity = Identity.load_or_create(folder / f"{name}.key")
    log, is_server = MemoryLog(), bootstrap == "none"
    home = Home(folder / f"{name}.home")
    home.path.mkdir()
    home.save_addresses(Addresses((), (), 31337, unreachable=os.environ.get("UNREACHABLE", "1") == "1"))
    options = PeerOptions(
        link=None if is_server else JoinLink(RUN, (bootstrap,)),
        listen=("/ip4/0.0.0.0/tcp/31337",) if is_server else None,
        relay=is_server,
        punch=not is_server and os.environ.get("PUNCH", "1") == "1",
    )
    connection = Connection(home, identity, RUN, options, log)
    await connection.start()
    try:
        await connection.listen(answer)
        stop = folder / "stop"
        began = time.monotonic()
        while not is_settled(connection) and not stop.exists():
            await asyncio.sleep(0.1)
        written(folder / f"{name}.json", [identity.peer_id, connection.addresses, time.monotonic() - began])
        contacts = []
        for other in others:
            place = folder / f"{other}.json"
            while not place.exists() and not stop.exists():
                await asyncio.sleep(0.1)
            if stop.exists():
                break
            peer, addresses, _ = json.loads(place.read_text())
            plain = [each.removesuffix(f"/p2p/{peer}") for each in addresses]
            contacts.append({"name": other} | await contact(connection, peer, plain, int(os.environ.get("MB", "0"))))
        notes = [kind for kind, _ in log.notes]
        written(folder / f"{name}.contacts.json", [contacts, notes])
        while not stop.exists():
            await asyncio.sleep(0.1)
    finally:
        await connection.close()


def is_settled(connection: Connection) -> bool:
    found = connection._reachability
    return found is not None and bool(found.is_settled or connection._options.relay)


def written(path: Path, document: object) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(document))
    draft.rename(path)


if __name__ == "__main__":
    folder, name, bootstrap, *others = sys.argv[1:]
    asyncio.run(main(Path(folder), name, bootstrap, others))
