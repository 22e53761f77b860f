"""Goodput of an exchange's payload over p2pd, digests included, against a bare binary stream.

Two processes on loopback, each with its own p2pd and event loop, swap 64 MiB in both directions at once. Ours uses
``send_payload`` and ``receive_payload`` over a ``P2PTransport`` and keeps all parts. The bare stream is hivemind's: the
same bytes in writes of the same size, without frames and digests, discarded on arrival. The two alternate over the same
daemons, so that other load hits both; the ratio is the median over pairs.

    python bench/goodput.py [--mebibytes 64] [--pairs 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from hivemind.p2p import PeerID

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.framing import MAX_CHUNK_BYTES, FrameKind
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link

RUN = RunId("be" * 32)
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
BARE, OURS = "/bench/bare", "/bench/ours"
PARTS = 4
"""Parts of a payload, as in an exchange of several fragments."""


async def swap_payload(link: Link, parts: list[bytes]) -> None:
    """Swap a payload over our transport, then confirm its arrival on both sides."""
    lengths = [len(part) for part in parts]
    others = await link.open_parallel(sum(lengths))
    async with asyncio.TaskGroup() as both:
        both.create_task(send_payload(link, parts, others))
        both.create_task(receive_payload(link, lengths, others))
    await link.send(FrameKind.CHUNK, b"done")
    await link.receive()


async def swap_bare(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
    """Swap as many bytes on a bare stream, then confirm their arrival."""
    async with asyncio.TaskGroup() as both:
        both.create_task(send_bare(writer, parts))
        both.create_task(receive_bare(reader, parts))
    writer.write(b"done")
    await reader.readexactly(4)


async def send_bare(writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(part), MAX_CHUNK_BYTES):
            writer.write(view[start : start + MAX_CHUNK_BYTES])
            await writer.drain()


async def receive_bare(reader: asyncio.StreamReader, parts: list[bytes]) -> None:
    """Receive and discard as many bytes as these parts have."""
    for part in parts:
        for start in range(0, len(part), MAX_CHUNK_BYTES):
            await reader.readexactly(min(MAX_CHUNK_BYTES, len(part) - start))


def parts_of(size_bytes: int) -> list[bytes]:
    return [os.urandom(size_bytes // PARTS) for _ in range(PARTS)]


async def serve(home: Path, size_bytes: int) -> None:
    """Serve as the partner: swap on every incoming stream until standard input ends."""
    node = await Node.start(Identity.load_or_create(home / "partner.key"), RUN, listen=LOOPBACK, local=True)
    parts = parts_of(size_bytes)

    async def bare(_: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await swap_bare(reader, writer, parts)
        writer.close()

    async def ours(link: Link) -> None:
        await swap_payload(link, parts)

    transport = P2PTransport(node, OURS)
    await transport.listen(ours)
    await node.daemon.p2p.add_binary_stream_handler(BARE, bare)
    sys.stdout.write(json.dumps({"peer": node.peer_id, "addresses": node.addresses}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()
    await node.close()


async def measure_pairs(
    home: Path, peer: PeerId, addresses: list[str], size_bytes: int, pairs: int
) -> dict[str, float]:
    node = await Node.start(Identity.load_or_create(home / "opener.key"), RUN, listen=LOOPBACK, local=True)
    await node.daemon.connect(peer, addresses)
    transport = P2PTransport(node, OURS)
    parts = parts_of(size_bytes)

    async def time_ours() -> float:
        link = await transport.open(peer)
        start = time.perf_counter()
        await swap_payload(link, parts)
        seconds = time.perf_counter() - start
        await link.close()
        return seconds

    async def time_bare() -> float:
        _, reader, writer = await node.daemon.p2p.call_binary_stream_handler(PeerID.from_base58(peer), BARE)
        start = time.perf_counter()
        await swap_bare(reader, writer, parts)
        seconds = time.perf_counter() - start
        writer.close()
        return seconds

    await time_bare(), await time_ours()  # warm up both
    timings = []
    for number in range(pairs):  # which one goes first alternates
        if number % 2:
            ours = await time_ours()
            bare = await time_bare()
        else:
            bare = await time_bare()
            ours = await time_ours()
        timings.append((ours, bare))
    await node.close()
    both_ways_mb = 2 * size_bytes / 1e6
    return {
        "payload_mb": size_bytes / 1e6,
        "pairs": pairs,
        "ours_mb_per_s": round(both_ways_mb / statistics.median(ours for ours, _ in timings), 1),
        "bare_mb_per_s": round(both_ways_mb / statistics.median(bare for _, bare in timings), 1),
        "ratio": round(statistics.median(bare / ours for ours, bare in timings), 3),
        "ratio_min": round(min(bare / ours for ours, bare in timings), 3),
    }


def measure(mebibytes: int = 64, pairs: int = 15) -> dict[str, float]:
    """Return MB/s of both directions together, and the median ratio of bare time to our time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", folder, "--mebibytes", str(mebibytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as partner:
            assert partner.stdin is not None
            assert partner.stdout is not None
            try:
                where = json.loads(partner.stdout.readline())
                task = measure_pairs(Path(folder), where["peer"], where["addresses"], mebibytes << 20, pairs)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(task)
            finally:
                partner.stdin.close()
                partner.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput of an exchange against a bare stream")
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(arguments.serve, arguments.mebibytes << 20))
    else:
        sys.stdout.write(json.dumps(measure(arguments.mebibytes, arguments.pairs), indent=1) + "\n")


if __name__ == "__main__":
    main()
