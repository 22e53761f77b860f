"""Script: a scenario's timeline as plain data, with random events drawn. Pure.

Second 0 is when all initial peers train: simulated peers train from the first instant, real peers need some seconds to
start. A scenario may also require that they have learned by then. Random draws depend on ``run.seed`` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from lab.scenario import BOOTSTRAP, NETWORK_EVENTS, Breakage, RealGroup, RealScenario

HORIZON_S = 3600.0
"""Time up to which a scenario without run.seconds is drawn. Guess: a testnet takes minutes; the longest lab run would
settle it."""
MAX_PEERS_PER_HOST = 50
"""Peers on one host, one after the other."""


class ActKind(StrEnum):
    """Kind of act."""

    START = "starts"
    STOP = "is asked to leave"
    KILL = "is killed"
    SUSPEND = "falls asleep"
    RESUME = "wakes"
    PART = "the network falls apart"
    HEAL = "the network is whole again"
    FILL = "has no room left on its disk"
    DRAIN = "has room on its disk again"
    LOCK = "can change nothing on its disk"
    UNLOCK = "can write to its disk again"
    EXHAUST = "can open no more files"
    RELIEVE = "can open files again"
    LOSE_DAEMON = "loses its network daemon"
    LOSE_RANK = "loses the process of a device"
    FREEZE_RANK = "has a device whose process is frozen"
    CUT_LAN = "has the LAN between its computers cut"
    MEND_LAN = "has its LAN again"
    READDRESS = "gets another address"
    MOVE = "moves to another network"
    UNROUTE = "has no route"
    REROUTE = "has a route again"
    FORGET = "has a router that forgets all connections"
    RENUMBER = "has a router that gets another address"
    JUMP = "has a clock that jumps"
    BAN = "is banned by the run's author"
    TURN_AWAY = "is not invited"
    COPY = "is a copy"


TROUBLE_ACTS: Mapping[Breakage, tuple[ActKind, ActKind | None]] = {
    "disk_full": (ActKind.FILL, ActKind.DRAIN),
    "read_only": (ActKind.LOCK, ActKind.UNLOCK),
    "no_descriptors": (ActKind.EXHAUST, ActKind.RELIEVE),
    "daemon_dies": (ActKind.LOSE_DAEMON, None),
    "rank_dies": (ActKind.LOSE_RANK, None),
    "rank_freezes": (ActKind.FREEZE_RANK, None),
    "lan_cut": (ActKind.CUT_LAN, ActKind.MEND_LAN),
    "new_address": (ActKind.READDRESS, None),
    "new_network": (ActKind.MOVE, None),
    "no_route": (ActKind.UNROUTE, ActKind.REROUTE),
    "mappings_lost": (ActKind.FORGET, None),
    "new_public_address": (ActKind.RENUMBER, None),
    "clock_jumps": (ActKind.JUMP, None),
}
"""Acts that begin and end each trouble."""

NETWORK_ACTS = frozenset(
    kind
    for what, acts in TROUBLE_ACTS.items()
    if what in NETWORK_EVENTS or what == "lan_cut"
    for kind in acts
    if kind is not None
)
"""Acts that the stage performs on the network of a host."""


def describe(who: str, kind: str) -> str:
    """Describe an act: ``home-1 is killed``, ``the network falls apart``."""
    return kind if kind in (ActKind.PART, ActKind.HEAL) else f"{who} {kind}"


@dataclass(frozen=True, slots=True)
class Act:
    """One event of the timeline."""

    at_s: float
    kind: ActKind
    who: str
    """Name of a peer, or ``BOOTSTRAP``; for partitions their index in the scenario."""
    by_s: float = 0.0
    """Seconds by which a clock jumps."""


@dataclass(frozen=True, slots=True)
class ScriptedPeer:
    """One peer of the scenario."""

    name: str
    group: str
    settings: RealGroup
    host: str
    """Host that it runs on: a peer that replaces another has the same link."""


@dataclass(frozen=True, slots=True)
class Script:
    """All peers and acts, in order. Peers that start at second 0 have no act for that."""

    peers: tuple[ScriptedPeer, ...]
    first: tuple[str, ...]
    """Initial peers."""
    acts: tuple[Act, ...]
    bootstraps: tuple[str, ...] = (BOOTSTRAP,)
    """Bootstraps in the order of their starts."""
    waits_for_learning: bool = False
    """Whether second 0 is when all initial peers have learned."""
    busy_programs: int = 0
    """Other programs that keep the computer busy from second 0 on."""

    @property
    def churning(self) -> frozenset[str]:
        """Peers that leave or come only for churn, which ends when a peer has completed the run."""
        return frozenset(peer.name for peer in self.peers if peer.settings.leaves_every_s is not None)

    @property
    def hosts(self) -> dict[str, ScriptedPeer]:
        """Hosts, each with its first peer."""
        found: dict[str, ScriptedPeer] = {}
        for peer in self.peers:
            found.setdefault(peer.host, peer)
        return found

    def hosts_of(self, group: str) -> list[str]:
        """Return the hosts of a group."""
        return [host for host, peer in self.hosts.items() if peer.group == group]


def script_of(scenario: RealScenario) -> Script:
    """Return the script of a scenario."""
    peers: list[ScriptedPeer] = []
    acts: list[Act] = []
    end_s = scenario.run.seconds or HORIZON_S
    for (name, _), group in zip(scenario.named(), scenario.peers, strict=True):
        for number in range(1, group.count + 1):
            host = f"{name}-{number}"
            _add_host(peers, acts, host, (name, number), group, scenario.run.seed, end_s)
    for place, partition in enumerate(scenario.partitions):
        acts.append(Act(partition.at_s, ActKind.PART, str(place)))
        acts.append(Act(partition.at_s + partition.for_s, ActKind.HEAL, str(place)))
    bootstrap = scenario.bootstrap
    if bootstrap.dies_at_s is not None:
        acts.append(Act(bootstrap.dies_at_s, ActKind.KILL, BOOTSTRAP))
        if bootstrap.returns_after_s is not None:
            acts.append(Act(bootstrap.dies_at_s + bootstrap.returns_after_s, ActKind.START, BOOTSTRAP))
    first = tuple(act.who for act in acts if act.kind is ActKind.START and act.at_s <= 0)
    later = [act for act in acts if not (act.kind is ActKind.START and act.at_s <= 0)]
    names = (BOOTSTRAP, *(f"{BOOTSTRAP}-{number}" for number in range(2, bootstrap.count + 1)))
    later.sort(key=lambda act: act.at_s)
    return Script(tuple(peers), first, tuple(later), names, scenario.begins == "learned", scenario.busy_programs)


def _add_host(
    peers: list[ScriptedPeer],
    acts: list[Act],
    host: str,
    place: tuple[str, int],
    group: RealGroup,
    seed: int,
    end_s: float,
) -> None:
    """Append the peers of one host, which run one after the other, and their acts.

    Args:
        place: name of the group, and the host's number in it.
    """
    name, number = place
    # Draws as the simulator does, so that a scenario has the same timeline there.
    share = Random(f"{seed}/{host}/arrival").random() if group.arrives_over_s else 0.0
    arrives = group.arrives_at_s + share * group.arrives_over_s
    peer = ScriptedPeer(host, name, group, host)
    peers.append(peer)
    for life in range(1, MAX_PEERS_PER_HOST + 1):
        acts.append(Act(arrives, ActKind.START, peer.name))
        leaves = _leaves(group, number, arrives, life, Random(f"{seed}/{host}/{life}/stay"))
        until = end_s if leaves is None else leaves
        acts += _freezes(group, peer.name, arrives, until)
        acts += _troubles(group, peer.name, arrives, until)
        if group.banned_at_s is not None and arrives <= group.banned_at_s < until:
            acts.append(Act(group.banned_at_s, ActKind.BAN, peer.name))
        if leaves is None or leaves > end_s:
            return
        acts.append(Act(leaves, ActKind.KILL if group.leaves == "killed" else ActKind.STOP, peer.name))
        if group.returns_after_s is None:
            return
        arrives = leaves + group.returns_after_s
        if group.returns == "anew" and life < MAX_PEERS_PER_HOST:
            peer = ScriptedPeer(f"{host}.{life + 1}", name, group, host)
            peers.append(peer)


def _leaves(group: RealGroup, number: int, arrives: float, life: int, random: Random) -> float | None:
    if group.leaves_at_s is not None and group.leaves_every_s is not None:  # in turn, repeatedly
        return group.leaves_at_s + group.leaves_every_s * (number - 1 + (life - 1) * group.count)
    if group.leaves_at_s is not None:
        return group.leaves_at_s if life == 1 else None
    return None if group.stays_s is None else arrives + random.expovariate(1.0 / group.stays_s)


def _freezes(group: RealGroup, who: str, arrives: float, leaves: float) -> Sequence[Act]:
    """Return acts for the suspensions that begin while the peer runs; a peer that leaves meanwhile is not resumed."""
    acts = []
    for freeze in group.freezes:
        if arrives <= freeze.at_s < leaves:
            acts.append(Act(freeze.at_s, ActKind.SUSPEND, who))
            if freeze.at_s + freeze.for_s < leaves:
                acts.append(Act(freeze.at_s + freeze.for_s, ActKind.RESUME, who))
    return acts


def _troubles(group: RealGroup, who: str, arrives: float, leaves: float) -> Sequence[Act]:
    """Return acts for the troubles that begin while the peer runs."""
    acts = []
    for trouble in group.troubles:
        breaks, mends = TROUBLE_ACTS[trouble.what]
        if arrives <= trouble.at_s < leaves:
            acts.append(Act(trouble.at_s, breaks, who, trouble.by_s))
            if mends is not None and trouble.for_s is not None and trouble.at_s + trouble.for_s < leaves:
                acts.append(Act(trouble.at_s + trouble.for_s, mends, who))
    return acts
