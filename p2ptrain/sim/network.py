"""The network between simulated peers: who is there, the directory, the lines, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.sim.directory import Dated, SimulatedDirectory
from p2ptrain.sim.peer import SimulatedPeer
from p2ptrain.sim.trainer import SimulatedTrainer, StepBatcher
from p2ptrain.sim.transfers import Transfers
from p2ptrain.sim.world import World
from p2ptrain.swarm import PRESENCE_LIFETIME_S, Presence


class Conditions(Protocol):
    """How the network behaves, beside its bandwidth."""

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float: ...

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether a link can be opened now."""

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        """Asked once a swap: the share of the sender's payload after which the connection breaks, if it does."""


@dataclass(frozen=True, slots=True)
class Calm:
    """Nothing fails; every direction of every pair has its own latency, so that no two events fall together."""

    latencies_s: dict[tuple[PeerId, PeerId], float]

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        return self.latencies_s[sender, receiver]

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        return True

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        return None


class SimulatedNetwork:
    """All peers and what lies between them.

    Args:
        lookup_s: how long the directory takes to answer.
        lifetime_s: how long a presence record counts.
        prepare: see ``StepBatcher``.
    """

    def __init__(
        self,
        world: World,
        run: RunId,
        conditions: Conditions,
        lookup_s: float = 0.05,
        lifetime_s: float = PRESENCE_LIFETIME_S,
        directory: SimulatedDirectory | None = None,
        prepare: Callable[[list[SimulatedTrainer]], None] | None = None,
    ) -> None:
        self.world = world
        self.run = run
        self.conditions = conditions
        self.lookup_s = lookup_s
        self.lifetime_s = lifetime_s
        self.directory = directory or SimulatedDirectory(run, Random(0))
        self.transfers = Transfers(world)
        self.metronome = StepBatcher(world, prepare)
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.addresses = ("/ip4/203.0.113.77/tcp/40404",)
        """Of every peer: only its length counts."""
        self.signature = bytes(64)
        """Likewise."""
        self.on_end: Callable[[SimulatedPeer], None] | None = None
        """Told of every peer that is done."""

    def ended(self, peer: SimulatedPeer) -> None:
        if self.on_end is not None:
            self.on_end(peer)

    def live(self, records: Sequence[Presence]) -> tuple[Dated, ...]:
        """Records that still count, with the time until which they do."""
        now = self.world.now
        return tuple([(each, until) for each in records if (until := each.issued_at + each.lifetime_s) > now])
