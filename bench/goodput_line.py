"""Goodput of an exchange's payload on a line of 100 Mbit/s with and without delay, beside bare TCP.

Two hosts of the laboratory (``lab.hosts``), a process and a p2pd on each. A payload goes both ways at once over
``P2PTransport`` and, from the second on, parallel streams; their opening, digests and confirmations are included
(``bench.goodput``). In turn,
TCP connections between the same hosts carry as many bytes both ways and one way. The rate of the line (tbf) counts IP
and TCP headers and acknowledgements. All three connections stay open and are idle between their turns, as connections
of peers are between exchanges.

    python -m bench.goodput_line [--mebibytes 32] [--pairs 5] [--mbit-s 100] [--delay-ms 0 50 100]

Linux and root. ``--delay-ms`` is one way: a round trip takes twice that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.environment import ROOT
from bench.goodput import OURS, RUN, parts_of, receive_bare, send_bare, swap_bare, swap_payload
from lab.cell import run_in_cell, unblock_sigterm
from lab.hosts import Access, Host, Network, check_network_support
from lab.namespaces import check_support
from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.parallel_streams import ParallelStreams
from p2ptrain.net.transport import P2PTransport

STOP_S = 10.0
"""Time for the hosts' processes to end after an interrupt. Guess: measure it on an overloaded machine."""
ONE_WAY, BOTH_WAYS = b"1", b"2"
"""The byte before each turn of a bare connection."""
KINDS = ("exchange", "tcp", "tcp_one_way")


@dataclass(frozen=True, slots=True)
class LineCase:
    """Parameters of the measurement. 32 MiB is an exchange of 70 million parameters in modular4: 2.7 s of this line."""

    mebibytes: int = 32
    pairs: int = 5
    mbit_s: float = 100.0
    delays_ms: tuple[float, ...] = (0.0, 50.0, 100.0)

    def words(self) -> list[str]:
        """Return the case as command-line arguments."""
        delays = map(str, self.delays_ms)
        numbers = ["--mebibytes", str(self.mebibytes), "--pairs", str(self.pairs), "--mbit-s", str(self.mbit_s)]
        return [*numbers, "--delay-ms", *delays]


def why_not() -> str | None:
    """Return why this machine cannot measure it, or None if it can."""
    try:
        check_support()
        check_network_support()
    except DeviceError as error:
        return error.problem
    return None


def measure(case: LineCase | None = None) -> dict[str, Any]:
    """Return ``figures`` by delay. Raises DeviceError if ``why_not`` gives a reason."""
    case = case or LineCase()
    check_support()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, *case.words(), "--inside", folder]
        if status := run_in_cell(command, STOP_S, PYTHONPATH=str(ROOT)):
            raise RuntimeError(f"the inside ended with status {status}; see its output above")
        seconds = json.loads((Path(folder) / "seconds.json").read_bytes())
    return {
        "mbit_s": case.mbit_s,
        "payload_mb": (case.mebibytes << 20) / 1e6,
        "pairs": case.pairs,
        "by_delay_ms": {delay: figures(each, case) for delay, each in seconds.items()},
    }


def figures(seconds: Mapping[str, Sequence[float]], case: LineCase) -> dict[str, float]:
    """Return medians over the turns of payload bytes over the capacity of the line, and over bare TCP.

    Args:
        seconds: of each turn, for each of ``KINDS``.
    """
    line_s = (case.mebibytes << 20) * 8 / (case.mbit_s * 1e6)
    shares = {f"{kind}_share": round(line_s / statistics.median(seconds[kind]), 3) for kind in KINDS}
    turns = zip(seconds["exchange"], seconds["tcp"], strict=True)
    return {
        **shares,
        "exchange_share_min": round(line_s / max(seconds["exchange"]), 3),
        "of_tcp": round(statistics.median(bare / ours for ours, bare in turns), 3),
    }


# --- inside the cell ----------------------------------------------------------------------------------------------


def inside(folder: Path, case: LineCase) -> None:
    """Make each line in turn, measure on it, and write ``seconds.json``. The whole delay is on one of the two access
    lines: each that has any costs the processor a pass over all packets (``lab.line``)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unblock_sigterm()
    seconds = {}
    for delay_ms in case.delays_ms:
        with Network() as network:
            near = network.add("near", Access(case.mbit_s, case.mbit_s, delay_ms / 1000))
            far = network.add("far", Access(case.mbit_s, case.mbit_s))
            seconds[f"{delay_ms:g}"] = between(near, far, folder, case)
    files.replace(folder / "seconds.json", json.dumps(seconds).encode())


def between(near: Host, far: Host, folder: Path, case: LineCase) -> dict[str, list[float]]:
    """Return the seconds of every turn by kind."""
    ours = [sys.executable, "-m", __spec__.name, *case.words()]
    serving = far.inside(*ours, "--far", str(folder), far.address)
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as partner:
        assert partner.stdin is not None
        assert partner.stdout is not None
        try:
            where = partner.stdout.readline().strip()
            asking = near.inside(*ours, "--near", str(folder), where)
            done = subprocess.run(asking, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            partner.stdin.close()
            partner.wait(STOP_S)
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


# --- on a host ----------------------------------------------------------------------------------------------------


async def serve(folder: Path, address: str, case: LineCase) -> None:
    """Serve as the partner: swap on every incoming stream or connection until standard input ends."""
    node = await Node.start(Identity.load_or_create(folder / "far.key"), RUN)
    parts = parts_of(case.mebibytes << 20)

    async def ours(link: StreamLink) -> None:
        wide = lanes.of(link, ours=False)
        try:
            await swap_payload(wide, parts)
        finally:
            await wide.close()

    async def bare(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while kind := await reader.read(1):
            if kind == BOTH_WAYS:
                await swap_bare(reader, writer, parts)
            else:
                await receive_bare(reader, parts)
                writer.write(b"done")
        writer.close()

    transport, lanes = P2PTransport(node, OURS), ParallelStreams(node)
    await lanes.listen()
    await transport.listen(ours)
    server = await asyncio.start_server(bare, address, 0)
    where = {"peer": node.peer_id, "addresses": node.addresses, "tcp": server.sockets[0].getsockname()}
    sys.stdout.write(json.dumps(where) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    await transport.close()
    await lanes.close()
    await node.close()


async def ask(folder: Path, where: Mapping[str, Any], case: LineCase) -> dict[str, list[float]]:
    """Return the seconds of each turn by kind, after one uncounted turn of each."""
    node = await Node.start(Identity.load_or_create(folder / "near.key"), RUN)
    await node.daemon.connect(where["peer"], where["addresses"])
    transport, lanes = P2PTransport(node, OURS), ParallelStreams(node)
    parts = parts_of(case.mebibytes << 20)
    both_ways, one_way = [await asyncio.open_connection(*where["tcp"]) for _ in range(2)]

    async def exchange() -> float:
        link = lanes.of(await transport.open(where["peer"]), ours=True)
        took_s = await timed(lambda: swap_payload(link, parts))
        await link.close()
        return took_s

    async def tcp() -> float:
        reader, writer = both_ways
        writer.write(BOTH_WAYS)
        return await timed(lambda: swap_bare(reader, writer, parts))

    async def send_one_way() -> None:
        reader, writer = one_way
        writer.write(ONE_WAY)
        await send_bare(writer, parts)
        await reader.readexactly(4)

    turns = {"exchange": exchange, "tcp": tcp, "tcp_one_way": lambda: timed(send_one_way)}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(case.pairs + 1):
        for kind in KINDS if number % 2 else reversed(KINDS):  # which kind goes first alternates
            took_s = await turns[kind]()
            if number:
                seconds[kind].append(took_s)
    for _, writer in (both_ways, one_way):
        writer.close()
    await node.close()
    return seconds


async def timed(swap: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await swap()
    return time.perf_counter() - started


def main() -> None:
    case = LineCase()
    parser = argparse.ArgumentParser(description="Goodput of an exchange on a line with a rate and a delay (root)")
    parser.add_argument("--mebibytes", type=int, default=case.mebibytes, help="each way; default %(default)s")
    parser.add_argument("--pairs", type=int, default=case.pairs, help="turns of each kind; default %(default)s")
    parser.add_argument("--mbit-s", type=float, default=case.mbit_s, help="each way; default %(default)s")
    parser.add_argument("--delay-ms", type=float, nargs="+", default=case.delays_ms, help="one way; default 0 50 100")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--far", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--near", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    case = LineCase(given.mebibytes, given.pairs, given.mbit_s, tuple(given.delay_ms))
    if given.inside:
        inside(given.inside, case)
    elif given.far or given.near:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if given.far:
                runner.run(serve(Path(given.far[0]), given.far[1], case))
            else:
                found = runner.run(ask(Path(given.near[0]), json.loads(given.near[1]), case))
                sys.stdout.write(json.dumps(found))
    elif (why := why_not()) is not None:
        parser.exit(1, f"{why}\n")
    else:
        sys.stdout.write(json.dumps(measure(case), indent=1) + "\n")


if __name__ == "__main__":
    main()
