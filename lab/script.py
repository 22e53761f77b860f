"""A scenario's timeline as plain data: who exists, and what happens when. Pure; it draws what is left to chance.

Second 0 is when everybody who is there from the beginning trains: in a simulation they train from the first instant,
and real peers take some seconds to start. A scenario may ask that they have learned by then.
What is drawn depends on ``run.seed`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from lab.scenario import BOOTSTRAP, Breakage, RealGroup, RealScenario

HORIZON_S = 3600.0
"""Where a scenario without run.seconds goes on being drawn. A guess: a testnet takes minutes."""
MOST_OCCUPANTS = 50
"""Peers in one place, one after the other."""


class Do(StrEnum):
    """What can happen to somebody."""

    START = "starts"
    STOP = "is asked to leave"
    KILL = "is killed"
    FREEZE = "falls asleep"
    THAW = "wakes"
    PART = "the network falls apart"
    HEAL = "the network is whole again"
    FILL = "has no room left on its disk"
    DRAIN = "has room on its disk again"
    LOCK = "can change nothing on its disk"
    UNLOCK = "can write to its disk again"
    EXHAUST = "can open no more files"
    RELIEVE = "can open files again"
    LOSE_DAEMON = "loses its network daemon"
    BAN = "is banned by the run's author"
    TURN_AWAY = "is not invited"


BREAKS: Mapping[Breakage, tuple[Do, Do | None]] = {
    "disk_full": (Do.FILL, Do.DRAIN),
    "read_only": (Do.LOCK, Do.UNLOCK),
    "no_descriptors": (Do.EXHAUST, Do.RELIEVE),
    "daemon_dies": (Do.LOSE_DAEMON, None),
}
"""How each trouble begins, and how it ends."""


def told(who: str, do: str) -> str:
    """``home-1 is killed``, ``the network falls apart``."""
    return do if do in (Do.PART, Do.HEAL) else f"{who} {do}"


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that happens."""

    at_s: float
    do: Do
    who: str
    """A part's name, or ``BOOTSTRAP``; of partitions their place in the scenario."""


@dataclass(frozen=True, slots=True)
class Part:
    """One peer that the scenario has."""

    name: str
    group: str
    settings: RealGroup
    host: str
    """The computer it runs on: who comes in another's place has the same line."""


@dataclass(frozen=True, slots=True)
class Script:
    """Everybody, and everything that happens, in order. Who starts at second 0 has no act for that."""

    parts: tuple[Part, ...]
    first: tuple[str, ...]
    """Who is there from the beginning."""
    acts: tuple[Act, ...]
    bootstraps: tuple[str, ...] = (BOOTSTRAP,)
    """In the order in which they start."""
    waits_for_learning: bool = False
    """Second 0 is when all who are there from the beginning have learned."""

    @property
    def churning(self) -> frozenset[str]:
        """Who goes or comes for the sake of churn alone, which ends when somebody has done the whole run."""
        return frozenset(part.name for part in self.parts if part.settings.leaves_every_s is not None)

    @property
    def hosts(self) -> dict[str, Part]:
        """The computers, each with the first who runs there."""
        found: dict[str, Part] = {}
        for part in self.parts:
            found.setdefault(part.host, part)
        return found

    def seats(self, group: str) -> list[str]:
        """The hosts of a group."""
        return [host for host, part in self.hosts.items() if part.group == group]


def written(scenario: RealScenario) -> Script:
    """The script of a scenario."""
    parts: list[Part] = []
    acts: list[Act] = []
    end_s = scenario.run.seconds or HORIZON_S
    for (name, _), group in zip(scenario.named(), scenario.peers, strict=True):
        for number in range(1, group.count + 1):
            host = f"{name}-{number}"
            _write_seat(parts, acts, host, (name, number), group, scenario.run.seed, end_s)
    for place, partition in enumerate(scenario.partitions):
        acts.append(Act(partition.at_s, Do.PART, str(place)))
        acts.append(Act(partition.at_s + partition.for_s, Do.HEAL, str(place)))
    bootstrap = scenario.bootstrap
    if bootstrap.dies_at_s is not None:
        acts.append(Act(bootstrap.dies_at_s, Do.KILL, BOOTSTRAP))
        if bootstrap.returns_after_s is not None:
            acts.append(Act(bootstrap.dies_at_s + bootstrap.returns_after_s, Do.START, BOOTSTRAP))
    first = tuple(act.who for act in acts if act.do is Do.START and act.at_s <= 0)
    later = [act for act in acts if not (act.do is Do.START and act.at_s <= 0)]
    names = (BOOTSTRAP, *(f"{BOOTSTRAP}-{number}" for number in range(2, bootstrap.count + 1)))
    later.sort(key=lambda act: act.at_s)
    return Script(tuple(parts), first, tuple(later), names, scenario.begins == "learned")


def _write_seat(
    parts: list[Part], acts: list[Act], host: str, place: tuple[str, int], group: RealGroup, seed: int, end_s: float
) -> None:
    """All who live on one computer, one after the other, and what happens to them. ``place``: in which group, and the
    how manieth."""
    name, number = place
    # The same draw as the simulator's, for the same reason: the same scenario is the same story.
    share = Random(f"{seed}/{host}/arrival").random() if group.arrives_over_s else 0.0
    arrives = group.arrives_at_s + share * group.arrives_over_s
    part = Part(host, name, group, host)
    parts.append(part)
    for life in range(1, MOST_OCCUPANTS + 1):
        acts.append(Act(arrives, Do.START, part.name))
        leaves = _leaves(group, number, arrives, life, Random(f"{seed}/{host}/{life}/stay"))
        until = end_s if leaves is None else leaves
        acts += _naps(group, part.name, arrives, until)
        acts += _troubles(group, part.name, arrives, until)
        if group.banned_at_s is not None and arrives <= group.banned_at_s < until:
            acts.append(Act(group.banned_at_s, Do.BAN, part.name))
        if leaves is None or leaves > end_s:
            return
        acts.append(Act(leaves, Do.KILL if group.leaves == "killed" else Do.STOP, part.name))
        if group.returns_after_s is None:
            return
        arrives = leaves + group.returns_after_s
        if group.returns == "anew" and life < MOST_OCCUPANTS:
            part = Part(f"{host}.{life + 1}", name, group, host)
            parts.append(part)


def _leaves(group: RealGroup, number: int, arrives: float, life: int, random: Random) -> float | None:
    if group.leaves_at_s is not None and group.leaves_every_s is not None:  # in turn, again and again
        return group.leaves_at_s + group.leaves_every_s * (number - 1 + (life - 1) * group.count)
    if group.leaves_at_s is not None:
        return group.leaves_at_s if life == 1 else None
    return None if group.stays_s is None else arrives + random.expovariate(1.0 / group.stays_s)


def _naps(group: RealGroup, who: str, arrives: float, leaves: float) -> Sequence[Act]:
    """Of the freezes those that find it there; who leaves asleep is not woken for it."""
    acts = []
    for freeze in group.freezes:
        if arrives <= freeze.at_s < leaves:
            acts.append(Act(freeze.at_s, Do.FREEZE, who))
            if freeze.at_s + freeze.for_s < leaves:
                acts.append(Act(freeze.at_s + freeze.for_s, Do.THAW, who))
    return acts


def _troubles(group: RealGroup, who: str, arrives: float, leaves: float) -> Sequence[Act]:
    """Of the troubles those that find it there."""
    acts = []
    for trouble in group.troubles:
        breaks, mends = BREAKS[trouble.what]
        if arrives <= trouble.at_s < leaves:
            acts.append(Act(trouble.at_s, breaks, who))
            if mends is not None and trouble.for_s is not None and trouble.at_s + trouble.for_s < leaves:
                acts.append(Act(trouble.at_s + trouble.for_s, mends, who))
    return acts
