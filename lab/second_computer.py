"""Second computer of a peer whose team is spread over a LAN: its namespace, its link, and ``p2ptrain rank`` on it."""

from __future__ import annotations

from pathlib import Path

from lab.namespaces import Namespace
from peer.testnet.processes import Child, Wrap, start

LEADER, RANK = "192.168.77.1", "192.168.77.2"
"""Private addresses of the two computers, the same on every LAN: no packet leaves it."""


class SecondComputer:
    """Namespace on a private link to a host. Close it; the kernel does the same if this process dies."""

    def __init__(self, host: Namespace) -> None:
        self._namespace = Namespace(f"{host.name}'s second computer")
        host.ip(
            [
                f"link add lan1 type veth peer name lan1 netns {self._namespace.path}",
                f"address add {LEADER}/24 dev lan1",
                "link set lan1 up",
            ]
        )
        self._namespace.ip(["link set lo up", f"address add {RANK}/24 dev lan1", "link set lan1 up"])

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on this computer."""
        return self._namespace.inside(*command)

    def cut(self, is_cut: bool) -> None:
        """Take the link down, which ends no connection, or up again."""
        self._namespace.ip([f"link set lan1 {'down' if is_cut else 'up'}"])

    def close(self) -> None:
        self._namespace.close()


def leading() -> list[str]:
    """Return the arguments of a peer that waits for a second computer."""
    return ["--team", "2", "--at", LEADER]


async def start_rank(who: str, home: Path, log: Path, threads: int, inside: Wrap) -> Child:
    """Start ``p2ptrain rank`` for the peer in a home, with a home and a log beside it."""
    arguments = ["rank", "--leader", LEADER, "--device", "cpu"]
    own = home.with_name(f"{home.name}-rank")
    return await start(
        f"{who}-rank", "p2ptrain.cli", [*arguments, "--home", str(own)], log.with_suffix(".rank.log"), threads, inside
    )
