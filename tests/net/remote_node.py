"""A node in a process of its own, for tests that kill or freeze it.

Usage: remote_node.py KEY RUN BOOTSTRAP. Prints its address in one line of JSON, then serves links: each sends a
hundred chunks a second without end.
"""

import asyncio
import json
import sys
from pathlib import Path

from p2ptrain.base.ids import RunId
from p2ptrain.framing import FrameKind
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link


async def flow(link: Link) -> None:
    await link.receive()
    while True:
        await link.send(FrameKind.CHUNK, b"x" * 1000)
        await asyncio.sleep(0.01)


async def main(key: str, run: str, bootstrap: str) -> None:
    identity = Identity.load_or_create(Path(key))
    node = await Node.start(identity, RunId(run), listen=["/ip4/127.0.0.1/tcp/0"], bootstraps=[bootstrap], local=True)
    await P2PTransport(node).listen(flow)
    where = {"peer": node.peer_id, "addresses": node.addresses, "p2pd": node.daemon.p2p._child.pid}
    sys.stdout.write(json.dumps(where) + "\n")
    sys.stdout.flush()
    await node.died()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
