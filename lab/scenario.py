"""Scenario fields that only a testnet of real peers supports, in addition to those of ``sim.scenario``.

``p2ptrain simulate`` and ``p2ptrain testnet`` read the same file; ``sim.scenario_file`` names the fields that the
simulator refuses or leaves out. docs/LABORATORY.md explains how a testnet handles all fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.ipv6 import IPv6
from lab.quotas import LEAST_CORES
from lab.routers import RouterKind
from p2ptrain.manifest.section import Section
from peer.start_options import device_name
from sim.scenario import Duration, Group, GroupName, Lie, Moment, Scenario
from sim.scenario_file import parsed, read

BOOTSTRAP = "bootstrap"
"""Name of the bootstrap in partitions; no group may have it."""


Breakage = Literal[
    "disk_full",
    "read_only",
    "no_descriptors",
    "daemon_dies",
    "rank_dies",
    "rank_freezes",
    "lan_cut",
    "clock_jumps",
    "new_address",
    "new_network",
    "no_route",
    "mappings_lost",
    "new_public_address",
]
"""Kinds of failure. disk_full: nothing more can be written where its home is. read_only: nothing there can be changed.
no_descriptors: neither peer nor network daemon can open another file or connection. daemon_dies: its p2pd is killed.
rank_dies, rank_freezes: the process of its last device is killed, or stopped forever. lan_cut: nothing passes between
its two computers. clock_jumps: its clock is set ahead by ``by_s``. new_address: it gets another one, as by DHCP.
new_network: it is connected by another interface to another router, as of a phone. no_route: it has no way out.
mappings_lost: its router forgets all connections. new_public_address: it also gets another address."""

NETWORK_EVENTS: tuple[Breakage, ...] = (
    "new_address",
    "new_network",
    "no_route",
    "mappings_lost",
    "new_public_address",
)
"""Events in the network of a computer (``lab.moves``), which only stage namespaces has."""

FINAL_BREAKAGES: tuple[Breakage, ...] = (
    "daemon_dies",
    "rank_dies",
    "rank_freezes",
    "new_address",
    "new_network",
    "mappings_lost",
    "new_public_address",
    "clock_jumps",
)
"""Failures that only the peer itself can overcome."""

RANK_BREAKAGES: tuple[Breakage, ...] = ("rank_dies", "rank_freezes")
"""Failures that need a peer on several devices."""

DISK_BREAKAGES: tuple[Breakage, ...] = ("disk_full", "read_only")
"""Failures that need a disk of the peer's own, which only stage namespaces has."""

WireLie = Literal[
    "frames",
    "shapes",
    "enormous",
    "infinite",
    "endless",
    "drip",
    "lingering",
    "heavy",
    "flood",
    "forged_record",
    "crowd",
]
"""Lies that a simulation has no bytes for. frames: random bytes where a frame belongs. shapes: payloads of another
length. enormous: weights of 1e30. infinite: a sketch of infinite weights, in codecs that have sketches. endless: a
payload that does not end. drip: a byte now and then. lingering: claims to wait as long as any partner likes, and sends
just fast enough that no link times out. heavy: its weights count a million times. flood: dials every peer without a
pause and sends nothing. forged_record: announces others at its own address, in the directory and to its partners.
crowd: announces hundreds of peers that do not exist, in the directory and to its partners, at an address of its own
that accepts connections and says nothing."""


class Trouble(Section):
    """A failure of a computer."""

    what: Breakage
    """Kind of failure."""

    at_s: Moment
    """Time at which it begins."""

    for_s: Duration | None = None
    """Duration; to the end if left out. A process that died stays dead; its peer may start another."""

    by_s: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Seconds by which a clock jumps ahead; negative: back."""


class RealGroup(Group):
    """A group of equal peers on real lines."""

    lie: Lie | WireLie | None = None  # type: ignore[assignment]  # wider, and never assigned: sections are frozen
    """A simulated peer's lie (``sim.scenario.Lie``), or one that needs real bytes."""

    troubles: list[Trouble] = Field(default_factory=list, max_length=100)
    """Failures of each of their computers."""

    clock_off_s: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Seconds by which their clocks are fast; negative if they are slow."""

    router: bool | RouterKind = False
    """Kind of the home router that each is behind, which admits no new inbound connection; true: keep."""

    home: bool = False
    """Whether all of the group are behind one such router, in one home."""

    ipv4: bool = True
    """Whether their lines have IPv4."""

    ipv6: IPv6 = "none"
    """Whether their lines have IPv6: open to everybody, or behind a firewall that admits nothing new."""

    mtu: int | None = Field(default=None, ge=1280, le=1500)
    """MTU of the lines behind their routers, whose ICMP messages about it are lost; 1,500 if left out."""

    packet_loss: float = Field(default=0.0, ge=0, lt=1)
    """Share of the packets that its line loses, each way."""

    returns: Literal["anew", "resumed"] = "anew"
    """Replacement after returns_after_s: another peer without weights (anew) or the same with its home (resumed)."""

    awaited: Literal["training", "weights"] = "training"
    """Event for which the scenario's clock waits when a peer comes: until it trains, or only until it begins to take
    others' weights, so that something may happen meanwhile. A simulation's clock never waits."""

    amid_exchange: bool = False
    """Whether a kill or freeze waits until its peer is in an exchange."""

    copies: GroupName | None = None
    """Group of whose first peer each is a copy: it starts with a copy of that peer's home as it then is, the identity
    included, and may end by itself."""

    invited: bool = True
    """Whether the author has invited them; read if admission is invite."""

    banned_at_s: Moment | None = None
    """Time at which the run's author bans each of them."""

    cores: float | None = Field(default=None, ge=LEAST_CORES, le=1000)
    """CPU seconds per second that the processes of each may use together from when it trains; None for no limit."""

    devices: Annotated[str, AfterValidator(device_name)] = "cpu"
    """Devices of each, as in ``p2ptrain peer --devices``. Of a peer on several, a kill hits its node alone."""

    computers: Literal[1, 2] = 1
    """Computers on which each trains: one, or two with a LAN of their own (``p2ptrain rank``; stage namespaces)."""

    leaves_every_s: Duration | None = None
    """Seconds between departures: the first of the group leaves at leaves_at_s, then the next, in turn and repeatedly,
    until a peer has completed the run."""

    @property
    def ranks(self) -> int:
        """Number of processes that train."""
        return self.devices.count(",") + 1


class Partition(Section):
    """A time in which the network is partitioned."""

    at_s: Moment
    """Time at which it begins."""

    for_s: Duration
    """Duration."""

    sides: Annotated[list[list[GroupName]], Field(min_length=2, max_length=10)]
    """Groups on each side; bootstrap names the bootstrap. A group on no side reaches everybody."""


class Bootstrap(Section):
    """The run's bootstraps."""

    count: int = Field(default=1, ge=1, le=4)
    """Number of bootstraps; the join link names all. The other fields apply to the first."""

    dies_at_s: Duration | None = None
    """Time at which it is killed; if left out, it stays to the end."""

    returns_after_s: Moment | None = None
    """Seconds after which it is started again."""

    up_mbit_s: float | None = Field(default=None, gt=0, le=1e6)
    """Upload rate of each bootstrap's line (stage namespaces); None for no limit."""


class Limit(Section):
    """Bounds of a figure."""

    at_least: float | None = None
    """Lower bound."""

    at_most: float | None = None
    """Upper bound."""

    def holds(self, figure: float) -> bool:
        return (self.at_least is None or figure >= self.at_least) and (self.at_most is None or figure <= self.at_most)


class Undisturbed(Section):
    """Scenario to compare with: the same one with other peers, and no events in network or bootstrap."""

    peers: list[RealGroup] = Field(min_length=1, max_length=1000)
    """Peers in place of the scenario's."""


class RealScenario(Scenario):
    """A scenario that real peers can run."""

    peers: list[RealGroup] = Field(min_length=1, max_length=1000)  # type: ignore[assignment]  # frozen: never appended to
    partitions: list[Partition] = Field(default_factory=list, max_length=100)
    bootstrap: Bootstrap = Bootstrap()
    begins: Literal["training", "learned"] = "training"
    """Event at second 0: all initial peers train (training), or their losses have fallen, too (learned)."""

    busy_programs: int = Field(default=0, ge=0, le=100)
    """Other programs that keep the computer busy from second 0 to the end: half compute, half wake each other."""

    text_shards: int = Field(default=0, ge=0, le=256)
    """Shards of 4 MiB of random words that peers fetch and train on; 0: text that ships with the package."""

    admission: Literal["open", "invite"] = "open"
    """Admission to the run: open to everybody, or only to peers whom the author invited and has not banned."""

    undisturbed: Undisturbed | None = None
    limits: dict[str, Limit] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_real_peers(self) -> Self:
        faults = [*_partition_faults(self), *_trouble_faults(self), *_churn_faults(self), *_limit_faults(self)]
        faults += [*_admission_faults(self), *_copy_faults(self)]
        if self.bootstrap.returns_after_s is not None and self.bootstrap.dies_at_s is None:
            faults.append("bootstrap.returns_after_s: the bootstrap does not die; give dies_at_s")
        faults += [
            f"peers[{place}].name: {BOOTSTRAP} is reserved for the bootstrap"
            for place, (name, _) in enumerate(self.named())
            if name == BOOTSTRAP
        ]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def run_tokens(self) -> int:
        """Tokens of all peers at the run's end: real peers count those of adversaries, too, which train."""
        if self.run.tokens is not None or not self.trains_together:
            return super().run_tokens
        trainers = sum(group.count for group in self.peers if group.keeps is None)
        return (self.run.outer_steps or 0) * self.tokens_per_outer_step * trainers

    def calm(self) -> RealScenario | None:
        """Return the scenario to compare with; None if there is none. Raises ScenarioError."""
        if self.undisturbed is None:
            return None
        # Fields that are left out stay left out: a stage without lines accepts no explicit latency.
        data = self.model_dump(exclude={"partitions", "bootstrap", "undisturbed", "limits"}, exclude_unset=True)
        return parse({**data, "peers": self.undisturbed.model_dump(exclude_unset=True)["peers"]})


def _partition_faults(scenario: RealScenario) -> list[str]:
    known, faults = {BOOTSTRAP, *(name for name, _ in scenario.named())}, []
    for place, partition in enumerate(scenario.partitions):
        named = [name for side in partition.sides for name in side]
        faults += [
            f"partitions[{place}].sides: there is no group {name}; there are {', '.join(sorted(known))}"
            for name in named
            if name not in known
        ]
        if len(named) != len(set(named)) or not all(partition.sides):
            faults.append(f"partitions[{place}].sides: each side needs a group, and each group is on at most one side")
    return faults


def _trouble_faults(scenario: RealScenario) -> list[str]:
    faults = []
    for place, group in enumerate(scenario.peers):
        for number, trouble in enumerate(group.troubles):
            field = f"peers[{place}].troubles[{number}]"
            if trouble.what in FINAL_BREAKAGES and trouble.for_s is not None:
                faults.append(f"{field}.for_s: nothing ends {trouble.what}; leave it out")
            if trouble.what in RANK_BREAKAGES and group.ranks == 1:
                faults.append(f'{field}.what: {trouble.what} needs a peer on several devices; give devices = "cpu,cpu"')
            if trouble.what == "lan_cut" and group.computers == 1:
                faults.append(f"{field}.what: lan_cut needs a peer on two computers; give computers = 2")
            if (trouble.what == "clock_jumps") != bool(trouble.by_s):
                faults.append(f"{field}.by_s: give it for clock_jumps alone")
            has_own_line = group.ipv6 == "none" and not group.home
            if trouble.what in ("new_address", "new_network", "new_public_address") and not has_own_line:
                faults.append(f"{field}.what: {trouble.what} needs a line of its own with IPv4 alone")
            if trouble.what in ("mappings_lost", "new_public_address") and not group.router:
                faults.append(f"{field}.what: {trouble.what} needs a router; give router = true")
        if group.computers > 1 and group.ranks > 1:
            faults.append(f"peers[{place}].devices: a peer on two computers has one device on each")
        if group.ranks > 1 and group.lie is not None:
            faults.append(f"peers[{place}].devices: a peer that lies has one device")
    return faults


def _churn_faults(scenario: RealScenario) -> list[str]:
    faults = []
    for place, group in enumerate(scenario.peers):
        is_killed = group.leaves == "killed" and (group.leaves_at_s, group.stays_s) != (None, None)
        if group.amid_exchange and not (is_killed or group.freezes):
            faults.append(f"peers[{place}].amid_exchange: no peer is killed or frozen; give leaves_at_s or freezes")
        if group.leaves_every_s is None:
            continue
        if group.leaves_at_s is None:
            faults.append(f"peers[{place}].leaves_every_s: give leaves_at_s, when the first peer leaves")
        elif group.returns_after_s is not None and group.returns_after_s >= group.leaves_every_s * group.count:
            faults.append(f"peers[{place}].leaves_every_s: a replacement would arrive only after its turn to leave")
    return faults


def _copy_faults(scenario: RealScenario) -> list[str]:
    known, faults = {name for name, _ in scenario.named()}, []
    for place, group in enumerate(scenario.peers):
        if group.mtu is not None and not (group.router or group.home):
            faults.append(f"peers[{place}].mtu: lines with an MTU of their own lie behind routers; give router = true")
        if group.copies is None:
            continue
        if group.copies not in known:
            faults.append(f"peers[{place}].copies: there is no group {group.copies}")
        if group.arrives_at_s == 0:
            faults.append(f"peers[{place}].arrives_at_s: second 0 waits until all peers train; set a later time")
    return faults


def _admission_faults(scenario: RealScenario) -> list[str]:
    faults = []
    for place, group in enumerate(scenario.peers):
        if scenario.admission == "open":
            faults += [
                f'peers[{place}].{field}: the run is open to everybody; give admission = "invite"'
                for field, is_given in (("invited", not group.invited), ("banned_at_s", group.banned_at_s is not None))
                if is_given
            ]
        elif not group.invited and group.arrives_at_s == 0:
            faults.append(
                f"peers[{place}].arrives_at_s: second 0 waits until all peers train, which one without an invite never"
                " does; set a later time"
            )
    return faults


def _limit_faults(scenario: RealScenario) -> list[str]:
    return [
        f"limits.{name}: give at_least, at_most or both" for name, limit in scenario.limits.items() if limit == Limit()
    ]


def load(path: Path, changes: Sequence[str] = ()) -> RealScenario:
    """Load the scenario of a file, with ``KEY=VALUE`` changes. Raises ScenarioError."""
    return parse(read(path, changes))


def parse(data: Mapping[str, Any]) -> RealScenario:
    """Validate plain data as a scenario. Raises ScenarioError with one line per error."""
    return parsed(RealScenario, data)
