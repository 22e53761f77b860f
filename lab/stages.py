"""Stages: where a scenario's processes run. The loopback of this machine, or hosts in network namespaces.

``lab.containers`` is the third stage.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from lab.hosts import Access, Network
from lab.moves import change_network
from lab.quotas import CpuQuotas
from lab.scenario import BOOTSTRAP, Partition, RealGroup
from lab.script import ActKind, Script
from lab.second_computer import SecondComputer
from lab.suspension import SuspendedProcesses, process_tree
from p2ptrain.base.errors import DeviceError, UserError
from p2ptrain.page.listen_address import LOOPBACK, ListenAddress, check_listen_address, listener_at
from peer.testnet.processes import Wrap

StageName = Literal["local", "namespaces", "docker"]

TOKEN = "P2PTRAIN_PAGE_TOKEN"
"""Variable that bootstraps read, so that the page's address stays the same when its bootstrap restarts."""
HOSTS = "P2PTRAIN_PAGE_HOSTS"
"""Variable that bootstraps read: host names at which the page opens."""
OWN_NAMES = f"{LOOPBACK},localhost"


class Suspension(Protocol):
    """Suspended peer."""

    def end(self) -> None:
        """Resume it. May be called twice and in a thread. Raises DeviceError if it stays suspended."""
        ...


class Stage(Protocol):
    """What the conductor needs of a stage."""

    arguments: Sequence[str]
    """Arguments of every process on this stage."""

    @property
    def page(self) -> Sequence[str]:
        """Arguments by which the first bootstrap shows the swarm; empty for no page."""
        ...

    def inside(self, host: str, who: str) -> Wrap:
        """Return the wrapper that runs a command on a host."""
        ...

    def started(self, who: str, settings: RealGroup | None) -> None:
        """Prepare a peer whose process was started; None for a bootstrap."""
        ...

    def count_left(self) -> int:
        """Count what remains besides processes of this system."""
        ...

    def kill(self, who: str, pid: int) -> None:
        """Kill all processes of a peer at once, as a power failure does; ``pid`` is the one that was started here.

        Called in a thread and may block. Raises DeviceError if they live on.
        """
        ...

    def suspend(self, who: str, pid: int) -> Suspension:
        """Suspend all processes of a peer. Called in a thread and may block. Raises DeviceError if they keep
        running.
        """
        ...

    def cut_link(self, host: str, is_cut: bool) -> None:
        """Cut or restore the link of a suspended host."""
        ...

    def second(self, host: str) -> SecondComputer:
        """Return the computer on a host's own LAN (``RealGroup.computers``)."""
        ...

    def change_network(self, host: str, kind: ActKind) -> None:
        """Perform one of ``NETWORK_ACTS`` on a host."""
        ...

    def line_bytes(self, host: str) -> int | None:
        """Return the bytes that a host's line has carried, both ways; None if nothing counts them."""
        ...

    def limit(self, host: str, cores: float | None) -> None:
        """Limit the CPU time of a host's processes (``RealGroup.cores``); None for no limit."""
        ...

    def partition(self, key: str) -> None:
        """Begin a partition of the scenario."""
        ...

    def heal(self, key: str) -> None:
        """End a partition."""
        ...

    def close(self) -> None: ...


class LocalProcesses:
    """Stage whose processes belong to this system."""

    page: Sequence[str] = ()

    def started(self, who: str, settings: RealGroup | None) -> None:
        """Do nothing: links are made before any process starts."""

    def count_left(self) -> int:
        return 0

    def second(self, host: str) -> SecondComputer:
        raise AssertionError("plan.check refuses a second computer here")

    def change_network(self, host: str, kind: ActKind) -> None:
        raise AssertionError("plan.check refuses networks that change here")

    def kill(self, who: str, pid: int) -> None:
        for each in process_tree(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def suspend(self, who: str, pid: int) -> Suspension:
        return SuspendedProcesses(process_tree(pid))


class Loopback(LocalProcesses):
    """Stage ``local``: all processes on 127.0.0.1, without links."""

    arguments: Sequence[str] = ("--local",)

    def __init__(self, page: str = "") -> None:
        self.page = ["--page", page] if page else []

    def inside(self, host: str, who: str) -> Wrap:
        return lambda *command: command

    def line_bytes(self, host: str) -> int | None:
        return None

    def cut_link(self, host: str, is_cut: bool) -> None:
        """Do nothing: the loopback has no link to cut."""

    def limit(self, host: str, cores: float | None) -> None:
        """Do nothing: ``plan.check`` refuses limits here."""

    def partition(self, key: str) -> None:
        raise AssertionError("plan.check refuses partitions here")

    heal = partition

    def close(self) -> None:
        """Do nothing."""


class Namespaces(LocalProcesses):
    """Stage ``namespaces``: each peer and bootstrap on its own host."""

    arguments: Sequence[str] = ()

    def __init__(
        self, script: Script, partitions: Sequence[Partition], seed: int, bootstrap_mbit_s: float | None = None
    ) -> None:
        self._network = Network()
        self._partitions = partitions
        self._script = script
        self._quotas: CpuQuotas | None = None
        self._seconds: dict[str, SecondComputer] = {}
        try:
            has_ipv6 = any(peer.settings.ipv6 != "none" for peer in script.hosts.values())
            for name in script.bootstraps:
                self._network.add(name, Access(bootstrap_mbit_s, ipv6="open" if has_ipv6 else "none"))
            for number, (host, peer) in enumerate(script.hosts.items()):
                made = self._network.add(host, access_of(peer.settings), seed + number)
                if peer.settings.computers > 1:
                    self._seconds[host] = SecondComputer(made.namespace)
            slow = [host for host, peer in script.hosts.items() if peer.settings.cores is not None]
            self._quotas = CpuQuotas.here() if slow else None
            for host in slow:
                self.quotas.add(host)
        except BaseException:
            self.close()
            raise

    @property
    def quotas(self) -> CpuQuotas:
        assert self._quotas is not None  # some host has a limit
        return self._quotas

    def inside(self, host: str, who: str) -> Wrap:
        inside = self._network.hosts[host].inside
        return self.quotas.inside(host, inside) if self._is_limited(host) else inside

    def _is_limited(self, host: str) -> bool:
        peer = self._script.hosts.get(host)  # None for a bootstrap
        return peer is not None and peer.settings.cores is not None

    def limit(self, host: str, cores: float | None) -> None:
        if self._is_limited(host):
            self.quotas.limit(host, cores)

    def line_bytes(self, host: str) -> int | None:
        return self._network.hosts[host].namespace.call(interface_bytes)

    def cut_link(self, host: str, is_cut: bool) -> None:
        self._network.cut(host, is_cut)

    def second(self, host: str) -> SecondComputer:
        return self._seconds[host]

    def change_network(self, host: str, kind: ActKind) -> None:
        try:
            if host in self._seconds and kind in (ActKind.CUT_LAN, ActKind.MEND_LAN):
                self._seconds[host].cut(kind is ActKind.CUT_LAN)
            else:
                change_network(self._network, host, kind)
        except (RuntimeError, OSError) as error:
            raise DeviceError(f"Its network cannot be changed: {error}", "See what the tool says.") from error

    def partition(self, key: str) -> None:
        sides = self._partitions[int(key)].sides
        self._network.partition(int(key), [hosts_on_side(side, self._script.hosts_of) for side in sides])

    def heal(self, key: str) -> None:
        self._network.heal(int(key))

    def close(self) -> None:
        for each in self._seconds.values():
            each.close()
        self._network.close()
        if self._quotas is not None:
            self._quotas.close()


def interface_bytes(table: Path = Path("/proc/thread-self/net/dev")) -> int:
    """Return the bytes that this thread's network namespace has received and sent, without the loopback."""
    total = 0
    for line in table.read_text().splitlines()[2:]:  # two lines of headings
        name, _, counts = line.partition(":")
        received, sent = (int(counts.split()[column]) for column in (0, 8))
        total += received + sent if name.strip() != "lo" else 0
    return total


def access_of(group: RealGroup) -> Access:
    """Return the access link of a group's peers."""
    return Access(
        group.up_mbit_s,
        group.down_mbit_s,
        group.latency_s,
        group.packet_loss,
        group.router or bool(group.home),
        home=(group.name or "") if group.home else "",
        ipv4=group.ipv4,
        ipv6=group.ipv6,
        mtu=group.mtu,
    )


def own_latency(group: RealGroup) -> float:
    """Return the latency if the scenario sets it, else 0; for stages whose links have no default latency."""
    return group.latency_s if "latency_s" in group.model_fields_set else 0.0


def hosts_on_side(side: Sequence[str], hosts_of: Callable[[str], list[str]]) -> list[str]:
    """Return the hosts on one side of a partition."""
    return [host for name in side for host in ([BOOTSTRAP] if name == BOOTSTRAP else hosts_of(name))]


def page_argument(page: str, stage: StageName) -> str:
    """Return the page argument for this stage: ``page``, on stage docker a port of this computer, or empty for no page.

    Raises UserError if the stage cannot show a page there.
    """
    if not page:
        return ""
    if stage == "namespaces":
        raise UserError(
            "Stage namespaces cannot show a page: no link leads out of it.",
            "Leave out --page, or take --stage docker or --stage local.",
        )
    place = ListenAddress.parse(page)
    if stage == "local":
        check_listen_address(place)
        return page
    if place.host not in (LOOPBACK, "localhost"):
        raise UserError(
            "On stage docker the page is only published at 127.0.0.1.",
            "Give a port, such as --page 8080. From another computer: ssh -L 8080:127.0.0.1:8080 HOST.",
        )
    with listener_at(ListenAddress(LOOPBACK, place.port)) as listener:
        return str(listener.getsockname()[1])


def page_token() -> str:
    """Return the owner's page token, or a random one."""
    return os.environ.get(TOKEN) or secrets.token_urlsafe(18)
