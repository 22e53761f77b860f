"""The network between simulated peers: its members, directory, lines and failures."""

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
    """Latency and failures of the network; bandwidth is in ``transfers``."""

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float: ...

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        """Return whether a link can be opened now."""

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        """Return the share of the sender's payload after which the connection breaks, or None. Called once per swap."""


@dataclass(frozen=True, slots=True)
class Calm:
    """Conditions without failures; each direction of each pair has its own latency, so that no two events coincide."""

    latencies_s: dict[tuple[PeerId, PeerId], float]

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        return self.latencies_s[sender, receiver]

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        return True

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        return None


class SimulatedNetwork:
    """All peers and the network between them.

    Args:
        lookup_s: seconds until the directory answers.
        lifetime_s: seconds for which a presence record is valid.
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
        """Addresses of every peer: only the length matters."""
        self.signature = bytes(64)
        """Signature of every record: only the length matters."""
        self.on_end: Callable[[SimulatedPeer], None] | None = None
        """Called with every peer that is done."""

    def ended(self, peer: SimulatedPeer) -> None:
        if self.on_end is not None:
            self.on_end(peer)

    def live(self, records: Sequence[Presence]) -> tuple[Dated, ...]:
        """Return the records that are still valid, each with the time until which it is."""
        now = self.world.now
        return tuple([(each, until) for each in records if (until := each.issued_at + each.lifetime_s) > now])
