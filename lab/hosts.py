"""Small internet of network namespaces: hosts on access links around one backbone.

::

    host ── access link ── backbone ── access link ── router (masquerades) ── host
    11.0.1.2              11.0.n.1                    11.0.2.2, 192.168.1.1   192.168.1.2

The backbone is a router in its own namespace: bridged packets among the machine's own links would pass its firewall,
and a Docker host drops them. No link leads from these namespaces to the machine's network, so nothing here reaches the
outside. Addresses are in 11.0.0.0/8, which counts as public (private addresses are not announced); their owners cannot
be reached from inside.

A link is a veth pair; with delay or loss it is two TUN devices and a process that forwards packets (``lab.line``),
because not every kernel has netem. Rates are token buckets (tbf): upload at the host, download at the backbone.

``Network.close`` ends the link processes and closes the namespaces. The kernel does the same if this process dies: it
closes descriptors, and link processes end with their parent (``p2ptrain.base.launcher``). Processes inside belong to
their starters.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from lab import ipv6
from lab.namespaces import Namespace
from lab.routers import RouterKind, ruleset, translates
from p2ptrain.base.errors import DeviceError
from p2ptrain.base.launcher import launched

MOST_HOSTS = 250
HOME_NETWORK = "192.168.1"
"""First three numbers of the addresses behind a router."""
QUEUE_MS = 300
"""Longest queueing delay before a slow link. Guess: home routers buffer between 50 ms and a second; measured routers
would settle it."""
SMALLEST_BURST = 32_000
"""Bytes that pass a slow link at once, about twenty packets. Guess: bursts on measured home links would settle it."""
_SILENCE = """
table inet silence {
    chain out {
        type filter hook output priority 0; policy accept;
        icmp type destination-unreachable drop
        icmpv6 type packet-too-big drop
    }
}
"""
LINE_DEADLINE_S = 90.0
"""Time for a link process to start: .05 s, and once more than 20 s on two cores with a load of 24 (measured)."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access link between a host and the backbone."""

    up_mbit_s: float | None = None
    """Upload rate; None for no limit."""
    down_mbit_s: float | None = None
    delay_s: float = 0.0
    """Delay, one way."""
    loss: float = 0.0
    """Share of packets lost, each way."""
    router: bool | RouterKind = False
    """Kind of the router that the host is behind; True: ``keep``, False: none."""
    home: str = ""
    """Hosts with the same name here share the router and the access link of the first of them; empty: its own."""
    ipv4: bool = True
    """Whether the access link has IPv4."""
    ipv6: ipv6.IPv6 = "none"
    """Whether it has IPv6, and who may connect by it."""
    mtu: int | None = None
    """Its MTU behind a router, whose ICMP messages about it are lost; None: 1,500, as in the host's network."""


@dataclass(slots=True)
class Host:
    """Computer whose processes, started with ``inside``, see only its links."""

    name: str
    namespace: Namespace
    address: str
    """Address of the host; private behind a router."""
    public: str
    """Address that others see; behind a router, the router's."""
    access: Access = field(default_factory=Access)
    ipv6: str = ""
    """IPv6 address of the host, which others see, too; empty without IPv6."""
    gateway: str = ""
    """Address of the next router."""
    link: str = "wan0"
    """Name of the interface that leads out."""
    _line: subprocess.Popen[bytes] | None = None
    router: Namespace | None = None
    """Router that the host is behind; None without one."""
    _lodgers: int = 1
    """Hosts behind the router."""

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` (an absolute path and arguments) on this host."""
        return self.namespace.inside(*command)

    def close(self) -> None:
        self.close_line()
        self.namespace.close()

    def close_line(self) -> None:
        """End the access link and the router, if they are the host's own."""
        if self._line is not None:
            self._line.terminate()
            try:
                self._line.wait(5.0)
            except subprocess.TimeoutExpired:
                self._line.kill()
                self._line.wait()
            if self._line.stdout is not None:
                self._line.stdout.close()
            self._line = None
        if self.router is not None:
            self.router.close()
            self.router = None


@dataclass(slots=True)
class Network:
    """Backbone and its hosts; a context manager. Call ``namespaces.check_support`` first."""

    hosts: dict[str, Host] = field(default_factory=dict)
    _backbone: Namespace = field(init=False)
    _homes: dict[str, Host] = field(default_factory=dict)
    """First host of each home."""
    _lines: dict[str, str] = field(default_factory=dict)
    """Numbers of the access links whose networks have another number."""
    _numbers: int = 0
    """Access links and public addresses so far."""
    _asleep: set[str] = field(default_factory=set)
    _partitions: dict[int, list[list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._backbone = Namespace("backbone")
        self._backbone.ip(["link set lo up"])
        self._backbone.forward()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, name: str, access: Access | None = None, seed: int = 0) -> Host:
        """Add a host with its own access link. ``seed`` decides which packets the link loses."""
        access = access or Access()
        number = self._new_number()
        if name in self.hosts:
            raise ValueError(f"{name} exists")
        public = f"11.0.{number}.2"
        host = Host(name, Namespace(name), public, public, access, gateway=f"11.0.{number}.1")
        first = self._homes.get(access.home)
        self.hosts[name] = host  # from here on close() covers it, whatever fails below
        if first is not None:
            _move_in(host, first, access)
            return host
        edge = host.namespace
        if access.router:
            edge = host.router = Namespace(f"{name}'s router")
        if access.home:
            self._homes[access.home] = host
        host._line = self._connect(edge, number, access, seed)
        edge.ip(["link set lo up", *([f"route add default via 11.0.{number}.1"] if access.ipv4 else [])])
        if access.router and host.router is not None:
            kind: RouterKind = "keep" if access.router is True else access.router
            if not translates(kind):
                self._backbone.ip([f"route add 11.1.{number}.0/24 via {public}"])
                host.public = f"11.1.{number}.2"
            _connect_behind_router(host, host.router, kind)
        if access.ipv6 != "none":
            self._connect_ipv6(host, number, access)
        if access.mtu is not None:
            _narrow(edge, "wan0", access.mtu)
            _narrow(self._backbone, f"line{number}", access.mtu)
        return host

    def _new_number(self) -> int:
        self._numbers += 1
        if self._numbers > MOST_HOSTS:
            raise ValueError(f"there are already {MOST_HOSTS} access links and addresses")
        return self._numbers

    def _connect_ipv6(self, host: Host, number: int, access: Access) -> None:
        router = host.router
        edge = router or host.namespace
        ipv6.connect_line(self._backbone, edge, number)
        if router is None:
            host.ipv6 = f"2600:11:{number:x}::2"
        else:
            ipv6.connect_router(self._backbone, router, number)
            host.ipv6 = ipv6.connect_host(host.namespace, number, 2)
        if access.ipv6 == "firewall":
            ipv6.close_to_strangers(edge, router is not None)

    def _connect(self, edge: Namespace, number: int, access: Access, seed: int) -> subprocess.Popen[bytes] | None:
        """Make the access link: wan0 at the edge, line<number> at the backbone."""
        far, line = f"line{number}", None
        if access.delay_s or access.loss:
            line = _start_link_process(edge, self._backbone, far, access, seed)
        else:
            self._backbone.ip([f"link add {far} type veth peer name wan0 netns {edge.path}"])
        self._backbone.ip([f"link set {far} up"])
        edge.ip(["link set wan0 up"])
        if access.ipv4:
            self._backbone.ip([f"address add 11.0.{number}.1/30 dev {far}"])
            edge.ip([f"address add 11.0.{number}.2/30 dev wan0"])
        _limit_rate(edge, "wan0", access.up_mbit_s)
        _limit_rate(self._backbone, far, access.down_mbit_s)
        return line

    def readdress(self, name: str) -> None:
        """Give a host with a line of its own another address of its network, as DHCP may; the one before ends."""
        host = self.hosts[name]
        network, _, place = host.address.rpartition(".")
        before, length = host.address, 24
        if host.router is not None:
            host.address = f"{network}.{int(place) + 50}"
            host.public = host.address if host.public == before else host.public
        else:
            host.public, host.gateway = self._new_place(network)
            host.address, length = host.public, 30
        _replace_address(host.namespace, host.link, f"{before}/{length}", f"{host.address}/{length}", host.gateway)
        self._filter()

    def renumber(self, name: str) -> None:
        """Give the router of a host another public address, as providers do; the one before ends."""
        host = self.hosts[name]
        assert host.router is not None  # lab.scenario
        before, (host.public, gateway) = host.public, self._new_place(host.public.rpartition(".")[0])
        _replace_address(host.router, "wan0", f"{before}/30", f"{host.public}/30", gateway)
        self._filter()

    def _new_place(self, network: str) -> tuple[str, str]:
        """Give the access link of a network another one; return its address, and the gateway's."""
        number, line = self._new_number(), self._lines.get(network, network.rpartition(".")[2])
        self._backbone.ip([f"address add 11.0.{number}.1/30 dev line{line}"])
        self._lines[f"11.0.{number}"] = line
        return f"11.0.{number}.2", f"11.0.{number}.1"

    def move(self, name: str, kind: RouterKind = "other") -> None:
        """Connect a host with a line of its own by another interface to another router, as of a phone."""
        host, number = self.hosts[name], self._new_number()
        host.namespace.ip([f"link del {host.link}"])
        host.close_line()
        host.link, host.access = f"usb{number}", replace(host.access, router=kind)
        host.public = f"11.0.{number}.2"
        host.router = router = Namespace(f"{name}'s router {number}")
        host._line = self._connect(router, number, host.access, number)
        router.ip(["link set lo up", f"route add default via 11.0.{number}.1"])
        _connect_behind_router(host, router, kind, "192.168.43")
        self._filter()

    def cut(self, name: str, is_cut: bool = True) -> None:
        """Drop all packets of a host's link, or none again. Open connections are not closed."""
        (self._asleep.add if is_cut else self._asleep.discard)(name)
        self._filter()

    def partition(self, key: int, sides: Sequence[Collection[str]]) -> None:
        """Drop packets between hosts of different sides until ``heal(key)``; a host on no side reaches all."""
        self._partitions[key] = [sorted(side) for side in sides]
        self._filter()

    def heal(self, key: int) -> None:
        self._partitions.pop(key, None)
        self._filter()

    def _filter(self) -> None:
        """Replace all of the backbone's drop rules atomically."""
        rules = []
        for family, places in ("ip", self._public), ("ip6", self._ipv6):
            for name in sorted(self._asleep):
                rules += [f"{family} {way} {place} drop" for place in places([name]) for way in ("saddr", "daddr")]
            for sides in self._partitions.values():
                for side in sides:
                    ours = ", ".join(places(side))
                    theirs = ", ".join(places(name for other in sides if other is not side for name in other))
                    if ours and theirs:
                        rules.append(f"{family} saddr {{ {ours} }} {family} daddr {{ {theirs} }} drop")
        body = "\n".join(["type filter hook forward priority 0; policy accept;", *rules])
        table = f"table inet lab\ndelete table inet lab\ntable inet lab {{\nchain apart {{\n{body}\n}}\n}}\n"
        self._backbone.run("nft", "-f", "-", given=table)

    def _public(self, names: Iterable[str]) -> list[str]:
        """Return IPv4 addresses that others see, each once; hosts of one home share theirs."""
        return list(dict.fromkeys(self.hosts[name].public for name in names))

    def _ipv6(self, names: Iterable[str]) -> list[str]:
        return [place for name in names if (place := self.hosts[name].ipv6)]

    def close(self) -> None:
        """Close all hosts and the backbone. May be called twice."""
        for host in self.hosts.values():
            host.close()
        self._backbone.close()


def check_network_support() -> None:
    """Create and remove one network of each kind of link. Raises DeviceError if this machine does not support one."""
    try:
        with Network() as network:
            network.add("one", Access(up_mbit_s=1.0, delay_s=0.001, router=True))
            network.cut("one")
    except (RuntimeError, OSError) as error:
        raise DeviceError(
            f"This machine cannot set up hosts in namespaces: {' '.join(str(error).split())}",
            "The kernel may lack veth, tbf, nftables or TUN; a container may hide /dev/net/tun. Or take --stage local.",
        ) from error


def _connect_behind_router(host: Host, router: Namespace, kind: RouterKind, network: str = HOME_NETWORK) -> None:
    """Connect a host to its router by a private network, with the same addresses behind every router, as at home.

    Behind a firewall that does not translate addresses the host has a public one.
    """
    network = network if translates(kind) else host.public.rpartition(".")[0]
    router.ip(["link add lan0 type bridge", f"address add {network}.1/24 dev lan0", "link set lan0 up"])
    _plug_in(host, router, 2, network)
    router.forward()
    router.run("nft", "-f", "-", given=ruleset(kind))


def _move_in(host: Host, first: Host, access: Access) -> None:
    """Connect one more host to the router of a home."""
    assert first.router is not None  # a home has a router
    first._lodgers += 1
    place = first._lodgers + 1
    host.public = first.public
    _plug_in(host, first.router, place)
    if access.ipv6 != "none":
        number = int(first.public.split(".")[2])
        host.ipv6 = ipv6.connect_host(host.namespace, number, place)


def _plug_in(host: Host, router: Namespace, place: int, network: str = HOME_NETWORK) -> None:
    """Connect a host to the router's network, at the address that ends with ``place``."""
    host.address, host.gateway = f"{network}.{place}", f"{network}.1"
    router.ip(
        [
            f"link add port{place} type veth peer name {host.link} netns {host.namespace.path}",
            f"link set port{place} master lan0",
            f"link set port{place} up",
        ]
    )
    host.namespace.ip(
        [
            "link set lo up",
            f"address add {host.address}/24 dev {host.link}",
            f"link set {host.link} up",
            f"route add default via {host.gateway}",
        ]
    )


def _replace_address(namespace: Namespace, link: str, before: str, after: str, gateway: str) -> None:
    namespace.ip(
        [
            f"address del {before} dev {link}",
            f"address add {after} dev {link}",
            f"route replace default via {gateway}",
        ]
    )


def _narrow(router: Namespace, link: str, mtu: int) -> None:
    """Lower the MTU of a link, and drop what the router says about packets that are too large for it."""
    router.ip([f"link set {link} mtu {mtu}"])
    router.run("nft", "-f", "-", given=_SILENCE)


def _limit_rate(namespace: Namespace, link: str, mbit_s: float | None) -> None:
    """Limit the rate of packets that leave through a link."""
    if mbit_s is None:
        return
    burst = max(SMALLEST_BURST, round(mbit_s * 1e6 / 8 / 100))  # 10 ms: one tick of a kernel with HZ=100
    rate = f"{round(mbit_s * 1e6)}bit"
    namespace.run(
        "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", rate, "burst", f"{burst}b", "latency", f"{QUEUE_MS}ms"
    )


def _start_link_process(
    edge: Namespace, backbone: Namespace, far: str, access: Access, seed: int
) -> subprocess.Popen[bytes]:
    """Start the process that forwards packets between wan0 and ``far``; both devices exist when this returns."""
    program = str(Path(__file__).with_name("line.py"))
    ends = [edge.path, "wan0", backbone.path, far]
    options = [str(access.delay_s), str(access.loss), str(seed)]
    process = subprocess.Popen(
        launched(sys.executable, "-I", "-S", program, *ends, *options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None  # stdout=PIPE
    ready, _, _ = select.select([process.stdout], [], [], LINE_DEADLINE_S)
    if not ready or process.stdout.readline() != b"ready\n":
        process.kill()
        process.wait()
        process.stdout.close()
        raise RuntimeError(f"the link process of {edge.name} did not start: status {process.returncode}")
    return process
