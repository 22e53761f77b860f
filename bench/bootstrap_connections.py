"""Memory, descriptors and CPU of a bootstrap's p2pd and Python process per connected peer and per reservation.

One node with a relay on loopback. Peers are the least that libp2p calls one (``p2ptrain.net.relay.mirror``), with an
identity each, all in one process; each connects, answers identify, and takes a reservation. Their own cost is not
counted.

    python -m bench.bootstrap_connections [--peers 400] [--seconds 20] [--kept 0]

Linux. ``connections`` says how many p2pd still has at the end; it closes none in their first two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import RunId
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.relay import circuit_v2, mirror
from p2ptrain.net.relay.relay import FOR_A_SERVER, Relay, RelayLimits

RUN = RunId("be" * 32)
AT_ONCE = 8
"""Peers that connect at the same time."""


class _Guest:
    """A peer that holds a connection and a reservation."""

    def __init__(self, session: mirror._YamuxSession) -> None:
        self.session = session
        self._answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            await self.session.serve(b"\x00")  # an empty identify message

    async def reserve(self) -> bool:
        """Take or renew a reservation; return whether the relay granted it."""
        session, ours = self.session, mirror._line(circuit_v2.HOP_PROTOCOL)
        stream, session._next = session._next, session._next + 2
        answer = session._asked[stream] = asyncio.get_running_loop().create_future()
        greeting = mirror._line(mirror._MULTISTREAM) + ours
        try:
            session._send(mirror._WINDOW, mirror._SYN, stream, length=0)
            session._send(mirror._DATA, 0, stream, greeting + circuit_v2.framed(circuit_v2.reserve()))
            async with asyncio.timeout(mirror.HANDSHAKE_S):
                while not session._heard.get(stream, b"")[len(greeting) :]:
                    await asyncio.sleep(0.01)
                heard = session._heard[stream][len(greeting) :]
            return circuit_v2.status(heard[1:]) == circuit_v2.CircuitStatus.OK
        except (TimeoutError, ValueError):
            return False
        finally:
            session._send(mirror._DATA, mirror._FIN, stream)
            answer.cancel()
            session._asked.pop(stream, None)

    async def close(self) -> None:
        self.session.abort()
        self._answering.cancel()
        await asyncio.wait([self._answering])


async def _guests(port: int, peers: int) -> list[_Guest]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> _Guest | None:
        async with room:
            with contextlib.suppress(OSError, EOFError, ValueError):
                return _Guest(await mirror._connect("127.0.0.1", port, f"127.0.{number // 200}.{number % 200 + 2}"))
        return None

    found = await asyncio.gather(*map(one, range(peers)))
    return [each for each in found if each is not None]


async def _serve(home: Path, peers: int, kept: int) -> None:
    """Serve as the bootstrap until standard input ends."""
    identity = Identity.load_or_create(home / "relay.key")
    node = await Node.start(identity, RUN, listen=["/ip4/127.0.0.1/tcp/0"], local=True, connections=kept)
    relay = await Relay.start(node, RelayLimits(places=peers, places_per_origin=peers))
    sys.stdout.write(json.dumps(node.addresses) + "\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        with contextlib.suppress(NetworkError):
            held = {"connections": len(await node.daemon.connections()), "places": len(relay._places)}
            sys.stdout.write(json.dumps(held) + "\n")
            sys.stdout.flush()
    await relay.close()
    await node.close()


async def measure(peers: int, seconds: float, kept: int = FOR_A_SERVER.connections) -> dict[str, Any]:
    """Return the figures per peer of the bootstrap's two processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--serve", folder, "--peers", str(peers), "--kept", str(kept)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            [place] = json.loads(await process.stdout.readline())
            python = psutil.Process(process.pid)
            [p2pd] = [each for each in python.children(recursive=True) if each.name() == "p2pd"]
            before = [_use(each) for each in (python, p2pd)]
            guests = await _guests(address.port_of([place]), peers)
            connected = [_use(each) for each in (python, p2pd)]
            granted = sum(await asyncio.gather(*(each.reserve() for each in guests[:AT_ONCE])))
            for start in range(AT_ONCE, len(guests), AT_ONCE):
                granted += sum(await asyncio.gather(*(each.reserve() for each in guests[start : start + AT_ONCE])))
            reserved, began = [_use(each) for each in (python, p2pd)], time.monotonic()
            await asyncio.sleep(seconds)
            idle, idle_s = [_use(each) for each in (python, p2pd)], time.monotonic() - began
            process.stdin.write(b"\n")
            held = json.loads(await process.stdout.readline())
            for each in guests:
                await each.close()
        finally:
            process.stdin.close()
            await process.wait()
    count = max(len(guests), 1)
    names = ("python", "p2pd")
    return {
        "peers": len(guests),
        "granted": granted,
        **held,
        "kb_each": {name: (b[0] - a[0]) / count / 1000 for name, a, b in zip(names, before, reserved, strict=True)},
        "files_each": {name: (b[1] - a[1]) / count for name, a, b in zip(names, before, reserved, strict=True)},
        "connect_ms": {name: (b[2] - a[2]) / count * 1e3 for name, a, b in zip(names, before, connected, strict=True)},
        "reserve_ms": {
            name: (b[2] - a[2]) / count * 1e3 for name, a, b in zip(names, connected, reserved, strict=True)
        },
        "idle_ms_per_s": {
            name: (b[2] - a[2]) / count / idle_s * 1e3 for name, a, b in zip(names, reserved, idle, strict=True)
        },
    }


def _use(process: psutil.Process) -> tuple[int, int, float]:
    """Return resident bytes, open files and CPU seconds."""
    times = process.cpu_times()
    return process.memory_info().rss, process.num_fds(), times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of a connected peer at a bootstrap")
    parser.add_argument("--peers", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=20.0, help="idle time; default %(default)s")
    kept = FOR_A_SERVER.connections
    parser.add_argument("--kept", type=int, default=kept, help="that p2pd keeps; 0: its default; default %(default)s")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.serve:
            runner.run(_serve(given.serve, given.peers, given.kept))
        else:
            sys.stdout.write(json.dumps(runner.run(measure(given.peers, given.seconds, given.kept)), indent=1) + "\n")


if __name__ == "__main__":
    main()
