"""The peers of a simulation: they arrive, sleep, leave and are replaced, as the scenario says."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import Peer, SwarmRules, keeping
from sim.adversaries import Adversary, garbled
from sim.learner_pool import LearnerPool, swarm_rules_of
from sim.network import SimulatedNetwork
from sim.peer import SimulatedPeer
from sim.scenario import MEGABIT, Group, Scenario
from sim.step_times import inner_steps, step_times
from sim.trainer import SimulatedLearner
from sim.transfers import Pipe

PEER_ID_CHARACTERS = 52
"""Length of a libp2p id of an Ed25519 key, so that messages have their true sizes."""


class NoteCounts:
    """A ``ports.Notebook`` that only counts notes, by kind."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def note(self, kind: str, **fields: Any) -> None:
        self.kinds[kind] += 1


@dataclass(slots=True)
class Slot:
    """A place in the swarm, held by one peer at a time."""

    number: int
    group: str
    name: str
    settings: Group
    steps: int
    """Inner steps per outer step, H."""
    occupants: int = 0
    """Peers that have held the slot so far."""


@dataclass(slots=True)
class Member:
    """One peer that takes part or took part."""

    peer: SimulatedPeer
    slot: Slot
    has_left: bool = False
    """Whether the scenario removed the peer before the run's end."""


@dataclass(slots=True)
class ScenarioConditions:
    """Latency and loss, from the settings of the groups."""

    random: Random
    failed: float
    """Share of swaps that break, whichever peers make them."""
    latencies_s: dict[PeerId, float] = field(default_factory=dict)
    losses: dict[PeerId, float] = field(default_factory=dict)
    """Share of a peer's swaps that break; peers without losses are absent."""

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        return self.latencies_s[sender] + self.latencies_s[receiver]

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        if not self.failed and not self.losses:
            return None
        survives = (1 - self.failed) * (1 - self.losses.get(sender, 0.0)) * (1 - self.losses.get(receiver, 0.0))
        return self.random.random() if self.random.random() >= survives else None


class Population:
    """All peers of a simulation: creates them when they arrive and detects when all are done."""

    def __init__(
        self, scenario: Scenario, network: SimulatedNetwork, conditions: ScenarioConditions, pool: LearnerPool
    ) -> None:
        self.members: list[Member] = []
        """Peers in the order of their arrival."""
        self.notes = NoteCounts()
        self._scenario = scenario
        self._network = network
        self._conditions = conditions
        self._pool = pool
        self._rules = swarm_rules_of(scenario, pool, network.run)
        self.slots = _slots(scenario, self._rules)
        self._by_peer: dict[PeerId, Member] = {}
        self._honest_left = 0
        """Honest peers that have not arrived yet or are not done."""
        self._present = self._finished = 0  # honest peers: present, and done with the whole run
        network.on_end = self._ended

    def schedule(self) -> None:
        for slot in self.slots:
            group = slot.settings
            share = self._random(slot.name, "arrival").random() if group.arrives_over_s else 0.0
            self._expect(slot, group.arrives_at_s + share * group.arrives_over_s)

    def taking_part(self) -> list[Member]:
        """Return the honest peers that are present or completed the run."""
        return [each for each in self.members if each.slot.settings.is_honest_trainer and not each.has_left]

    def _random(self, *what: object) -> Random:
        return Random("/".join(map(str, (self._scenario.run.seed, *what))))

    def _expect(self, slot: Slot, time: float) -> None:
        self._honest_left += slot.settings.is_honest_trainer
        self._network.world.at(time, self._arrive, slot)

    def _arrive(self, slot: Slot) -> None:
        if self._finished > self._present:  # a newcomer would be too late
            self._done(slot)
            return
        slot.occupants += 1
        self._present += slot.settings.is_honest_trainer
        peer = self._make(slot)
        member = self._by_peer[peer.peer] = Member(peer, slot)
        self.members.append(member)
        self._network.peers[peer.peer] = peer
        self._schedule_fate(member)
        peer.start()

    def _make(self, slot: Slot) -> SimulatedPeer:
        name, group = f"{slot.name}.{slot.occupants}", slot.settings
        peer = _peer_id(self._scenario.run.seed, name)
        self._conditions.latencies_s[peer] = group.latency_s
        if group.loss:
            self._conditions.losses[peer] = group.loss
        keeps = None if group.keeps is None else keeping.parse(group.keeps)
        learner = self._learner(slot, keeps)
        adversary = None
        if group.lie is not None:
            claim = float(self._scenario.run_tokens)
            adversary = Adversary(group.lie, claim, self._random(name, "lies"), garbled)
        return SimulatedPeer(
            network=self._network,
            peer=peer,
            core=Peer(peer, self._rules, self._random(name), keeps=keeps),
            learner=learner,
            step_s=step_times(group.step_s, group.step_jitter, self._random(name, "pace")),
            notebook=self.notes,
            up=_pipe(group.up_mbit_s),
            down=_pipe(group.down_mbit_s),
            adversary=adversary,
        )

    def _learner(self, slot: Slot, keeps: frozenset[int] | None) -> SimulatedLearner:
        if keeps is not None:
            return self._pool.keeper(keeps)
        return self._pool.learner(slot.number, slot.steps, self.notes)

    def _schedule_fate(self, member: Member) -> None:
        world, group = self._network.world, member.slot.settings
        for freeze in group.freezes:
            if freeze.at_s >= world.now:
                world.at(freeze.at_s, member.peer.freeze)
                world.at(freeze.at_s + freeze.for_s, member.peer.thaw)
        if group.leaves_at_s is not None and member.slot.occupants == 1:
            world.at(group.leaves_at_s, self._depart, member)
        elif group.stays_s is not None:
            stay = self._random(member.peer.peer, "stay").expovariate(1.0 / group.stays_s)
            world.at(world.now + stay, self._depart, member)

    def _depart(self, member: Member) -> None:
        if not member.peer.finished:
            member.has_left = True
            if member.slot.settings.leaves == "killed":
                member.peer.kill()
            else:
                member.peer.leave()

    def _ended(self, peer: SimulatedPeer) -> None:
        member = self._by_peer[peer.peer]
        is_honest = member.slot.settings.is_honest_trainer
        self._present -= is_honest
        self._finished += is_honest and not member.has_left
        returns_after_s = member.slot.settings.returns_after_s
        if member.has_left and returns_after_s is not None:
            self._expect(member.slot, self._network.world.now + returns_after_s)
        self._done(member.slot)

    def _done(self, slot: Slot) -> None:
        self._honest_left -= slot.settings.is_honest_trainer
        if not self._honest_left:
            self._network.world.stopped = True


def _peer_id(seed: int, name: str) -> PeerId:
    """Make an id that is in no meaningful order: of two offers that cross, the one of the smaller id wins."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()
    return PeerId(f"{digest[: PEER_ID_CHARACTERS - 1 - len(name)]}.{name}")


def _pipe(megabit_per_s: float | None) -> Pipe:
    return Pipe(inf if megabit_per_s is None else megabit_per_s * MEGABIT)


def _slots(scenario: Scenario, rules: SwarmRules) -> list[Slot]:
    payload = sum(rules.fragment_bytes) * scenario.outer.fragments_per_exchange // scenario.outer.fragments
    slots: list[Slot] = []
    for name, group in scenario.named():
        steps = inner_steps(scenario, group, payload)
        slots += [Slot(len(slots) + place, name, f"{name}-{place}", group, steps) for place in range(group.count)]
    return slots
