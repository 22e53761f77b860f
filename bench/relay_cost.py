"""CPU seconds of a relay per gigabyte that it carries, of its Python process and of its p2pd.

Three hosts of the laboratory (``lab.hosts``) for each source tree: a relay, and two peers without a listener on lines
of 100 Mbit/s, which swap a payload through a circuit of it. Turns of the trees alternate, so that other load hits all
of them. Only the relay's code is of that tree; the peers are of this one. A byte that comes in and goes out counts
once. ``--pairs 4`` has four pairs of peers swap at the same time.

    python -m bench.relay_cost [--mebibytes 64] [--turns 5] [--pairs 1] [--mbit-s 100] [--trees ROOT ...]

Linux and root. A tree is a checkout of this repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.environment import ROOT
from bench.goodput import OURS, RUN, parts_of, swap_payload
from bench.goodput_line import STOP_S, timed, why_not
from p2ptrain.framing import FrameKind
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.parallel_streams import ParallelStreams
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.relay import relay as relays
from p2ptrain.net.relay.relay import Relay, RelayLimits, reserve
from p2ptrain.net.transport import P2PTransport

RELAY_MBIT_S = 1000.0
"""Rate of the relay's line."""


@dataclass(frozen=True, slots=True)
class RelayCase:
    """Parameters of the measurement."""

    mebibytes: int = 64
    """Payload each way."""
    turns: int = 5
    pairs: int = 1
    """Pairs of peers that swap at the same time."""
    mbit_s: float = 100.0
    one_way: bool = False
    """Whether only one peer of a pair sends, on one stream."""

    def words(self) -> list[str]:
        """Return the case as command-line arguments."""
        numbers = {"mebibytes": self.mebibytes, "turns": self.turns, "pairs": self.pairs, "mbit-s": self.mbit_s}
        flags = ["--one-way"] if self.one_way else []
        return [*flags, *(word for name, number in numbers.items() for word in (f"--{name}", str(number)))]

    @property
    def gigabytes(self) -> float:
        """Bytes that the relay carries in one turn."""
        return (1 if self.one_way else 2) * self.pairs * (self.mebibytes << 20) / 1e9


@dataclass(frozen=True, slots=True)
class RelayTurn:
    """One turn: CPU seconds per gigabyte, and the seconds it took."""

    python_s: float
    p2pd_s: float
    seconds: float


def measure(case: RelayCase, trees: Sequence[Path]) -> dict[str, Any]:
    """Return ``figures`` by tree, and the sorted ratios of direct to relayed goodput, the first tree's, of all turns.

    Raises RuntimeError if a process failed.
    """
    from lab.cell import run_in_cell

    with tempfile.TemporaryDirectory() as folder:
        roots = [str(each.resolve()) for each in trees]
        command = [sys.executable, "-m", __spec__.name, *case.words(), "--trees", *roots, "--inside", folder]
        if status := run_in_cell(command, STOP_S, PYTHONPATH=str(ROOT)):
            raise RuntimeError(f"the inside ended with status {status}; see its output above")
        turns = json.loads((Path(folder) / "turns.json").read_bytes())
    direct_s = turns.pop("direct")
    relayed = {root: [RelayTurn(*each) for each in found] for root, found in turns.items()}
    ratios = [one.seconds / other for one, other in zip(relayed[roots[0]], direct_s, strict=True)]
    found = {root: figures(each, case) for root, each in relayed.items()}
    return {**found, "direct over relayed": [round(each, 3) for each in sorted(ratios)]}


def figures(turns: Sequence[RelayTurn], case: RelayCase) -> dict[str, float]:
    """Return medians over the turns."""
    return {
        "python_s_per_gb": round(statistics.median(each.python_s for each in turns), 2),
        "p2pd_s_per_gb": round(statistics.median(each.p2pd_s for each in turns), 2),
        "s_per_gb": round(statistics.median(each.python_s + each.p2pd_s for each in turns), 2),
        "mbit_s": round(
            case.pairs * (case.mebibytes << 20) * 8e-6 / statistics.median(each.seconds for each in turns), 1
        ),
    }


# --- inside the cell ----------------------------------------------------------------------------------------------


class _Role:
    """A process on a host, which answers each line with a line of JSON."""

    def __init__(self, command: list[str], root: str) -> None:
        environment = {**os.environ, "PYTHONPATH": root}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, cwd=root, **pipes)

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the process and of its p2pd."""
        ours = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (ours, *ours.children(recursive=True))]
        python, *others = [each.user + each.system for each in times]
        return python, sum(others)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)
        self._process.stdout.close()


def inside(folder: Path, case: RelayCase, trees: Sequence[str]) -> None:
    """Make the hosts, measure, and write ``turns.json``."""
    from lab.cell import unblock_sigterm
    from lab.hosts import Access, Network

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unblock_sigterm()
    with Network() as network, ExitStack() as stack:

        def started(role: str, name: str, root: str, access: Access) -> _Role:
            host = network.add(name, access)
            command = [
                sys.executable,
                "-P",
                str(Path(__file__).resolve()),
                *case.words(),
                "--role",
                role,
                str(folder / name),
            ]
            found = _Role(host.inside(*command), root)
            stack.callback(found.close)
            return found

        def peers(role: str, number: int) -> list[_Role]:
            line, pairs = Access(case.mbit_s, case.mbit_s), range(case.pairs)
            return [started(role, f"{role}{number}-{pair}", str(ROOT), line) for pair in pairs]

        swarms = []
        straight, listeners = peers("near", len(trees)), peers("open", len(trees))
        for near, listener in zip(straight, listeners, strict=True):
            near.tell(json.dumps(listener.answer()))
        for number, root in enumerate(trees):
            relay = started("relay", f"relay{number}", root, Access(RELAY_MBIT_S, RELAY_MBIT_S))
            swarms.append((relay, peers("near", number), peers("far", number)))
        for relay, nears, fars in swarms:
            where = relay.answer()
            for each in fars:
                each.tell(json.dumps(where))
            reached = [far.answer() for far in fars]
            for near, circuit in zip(nears, reached, strict=True):
                near.tell(json.dumps(circuit))
            for each in [*nears, *straight]:  # an uncounted turn
                each.tell()
                each.answer()
        turns: dict[str, list[tuple[float, float, float]]] = {root: [] for root in trees}
        direct_s = []
        for _ in range(case.turns):
            for root, (relay, nears, _) in zip(trees, swarms, strict=True):
                before = relay.cpu_s()
                for each in nears:
                    each.tell()
                seconds = max(each.answer() for each in nears)
                python, p2pd = (now - then for now, then in zip(relay.cpu_s(), before, strict=True))
                turns[root].append((python / case.gigabytes, p2pd / case.gigabytes, seconds))
            for each in straight:
                each.tell()
            direct_s.append(max(each.answer() for each in straight))
        (folder / "turns.json").write_text(json.dumps({**turns, "direct": direct_s}))


# --- on a host ----------------------------------------------------------------------------------------------------


def _say(words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def relay(home: Path, case: RelayCase) -> None:
    """Relay until standard input ends."""
    server: RelayLimits | None = getattr(relays, "FOR_A_SERVER", None)  # an older tree has none
    kept = {"connections": server.connections} if server else {}
    node = await Node.start(Identity.load_or_create(home), RUN, listen=["/ip4/0.0.0.0/tcp/4001"], **kept)
    serving = await Relay.start(node, RelayLimits())
    _say({"peer": node.peer_id, "addresses": node.addresses})
    await asyncio.to_thread(sys.stdin.read)
    await serving.close()
    await node.close()


async def far(home: Path, case: RelayCase) -> None:
    """Take a reservation, and swap on every incoming stream until standard input ends."""
    where = json.loads(sys.stdin.readline())
    node = await Node.start(Identity.load_or_create(home), RUN, listen=[])
    await reserve(node.daemon, where["peer"], where["addresses"])

    async def renew() -> None:
        while True:
            await asyncio.sleep(15.0)
            await reserve(node.daemon, where["peer"], where["addresses"])

    renewing = asyncio.create_task(renew())
    await _swapping(node, case, [address.through(where["peer"], each) for each in where["addresses"]])
    renewing.cancel()


async def open_far(home: Path, case: RelayCase) -> None:
    """Listen, and swap on every incoming stream until standard input ends."""
    node = await Node.start(Identity.load_or_create(home), RUN, listen=["/ip4/0.0.0.0/tcp/4002"])
    await _swapping(node, case, node.addresses)


async def _swapping(node: Node, case: RelayCase, addresses: Sequence[str]) -> None:
    parts = parts_of(case.mebibytes << 20)
    transport, lanes = P2PTransport(node, OURS), ParallelStreams(node)

    async def serve(link: StreamLink) -> None:
        if case.one_way:
            await receive_payload(link, [len(each) for each in parts])
            await link.send(FrameKind.CHUNK, b"done")
            return
        wide = lanes.of(link, ours=False)
        try:
            await swap_payload(wide, parts)
        finally:
            await wide.close()

    await lanes.listen()
    await transport.listen(serve)
    _say({"peer": node.peer_id, "addresses": addresses})
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()
    await lanes.close()
    await node.close()


async def near(home: Path, case: RelayCase) -> None:
    """Swap a payload whenever a line comes, and print the seconds that it took."""
    where = json.loads(sys.stdin.readline())
    node = await Node.start(Identity.load_or_create(home), RUN, listen=[])
    transport, lanes = P2PTransport(node, OURS), ParallelStreams(node)
    parts = parts_of(case.mebibytes << 20)

    async def exchange() -> None:
        if case.one_way:
            link = await transport.open(where["peer"], where["addresses"])
            await send_payload(link, parts)
            await link.receive()
            await link.close()
            return
        link = lanes.of(await transport.open(where["peer"], where["addresses"]), ours=True)
        await swap_payload(link, parts)
        await link.close()

    while await asyncio.to_thread(sys.stdin.readline):
        _say(await timed(exchange))
    await transport.close()
    await lanes.close()
    await node.close()


def main() -> None:
    case = RelayCase()
    parser = argparse.ArgumentParser(description="CPU seconds of a relay per gigabyte (root)")
    parser.add_argument("--mebibytes", type=int, default=case.mebibytes, help="each way; default %(default)s")
    parser.add_argument("--turns", type=int, default=case.turns, help="of each tree; default %(default)s")
    parser.add_argument("--pairs", type=int, default=case.pairs, help="that swap at once; default %(default)s")
    parser.add_argument("--mbit-s", type=float, default=case.mbit_s, help="of each peer's line; default %(default)s")
    parser.add_argument("--one-way", action="store_true", help="only one peer of a pair sends")
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT], help="source trees; default: this one")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    case = RelayCase(given.mebibytes, given.turns, given.pairs, given.mbit_s, given.one_way)
    if given.inside:
        inside(given.inside, case, [str(each) for each in given.trees])
    elif given.role:
        roles = {"relay": relay, "far": far, "open": open_far, "near": near}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(roles[given.role[0]](Path(given.role[1]), case))
    elif (why := why_not()) is not None:
        parser.exit(1, f"{why}\n")
    else:
        sys.stdout.write(json.dumps(measure(case, given.trees), indent=1) + "\n")


if __name__ == "__main__":
    main()
