"""A relay, a stranger that tells the relay's p2pd that it can be dialed, and a guest that asks for a reservation.

Each is a process of its own, for tests in network namespaces. Usage: remote_relay.py relay FOLDER, stranger FOLDER,
or guest FOLDER SECONDS. The relay writes its address into the folder; the stranger creates a file there when it is
connected; the guest asks the relay for a reservation each second, and prints a line of JSON with the result of each
request.
"""

import asyncio
import json
import sys
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import RunId
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.relay.relay import Relay, RelayLimits, reserve

RUN = RunId("0" * 64)
LISTEN = ("/ip4/0.0.0.0/tcp/4001",)


async def relay(folder: Path) -> None:
    node = await Node.start(Identity.load_or_create(folder / "relay.key"), RUN, listen=LISTEN)
    serving = await Relay.start(node, RelayLimits())
    (folder / "where.new").write_text(json.dumps([node.peer_id, node.addresses]))
    (folder / "where.new").rename(folder / "where.json")
    await node.died()
    await serving.close()


async def stranger(folder: Path) -> None:
    """Run libp2p's AutoNAT, as anyone may: it dials each peer that asks, and reports success."""
    p2p = await P2P.create(host_maddrs=LISTEN, auto_nat=True)
    peer, addresses = json.loads((folder / "where.json").read_text())
    await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(each) for each in addresses])
    (folder / "connected").touch()
    await asyncio.Event().wait()


async def guest(folder: Path, seconds: str) -> None:
    node = await Node.start(Identity.load_or_create(folder / "guest.key"), RUN, listen=LISTEN)
    peer, addresses = json.loads((folder / "where.json").read_text())
    told = []
    for _ in range(int(seconds)):
        try:
            await reserve(node.daemon, peer, addresses)
            told.append("a place")
        except NetworkError as error:
            told.append(str(error))
        await asyncio.sleep(1.0)
    await node.close()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    role, folder, *rest = sys.argv[1:]
    asyncio.run({"relay": relay, "stranger": stranger, "guest": guest}[role](Path(folder), *rest))
