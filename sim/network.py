"""The network between simulated peers: its members, directory, lines and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm import Presence
from sim.directory import Dated, SimulatedDirectory
from sim.peer import SimulatedPeer
from sim.trainer import SimulatedTrainer, StepBatcher
from sim.transfers import Transfers
from sim.world import World


class Conditions(Protocol):
    """Latency and failures of the network; bandwidth is in ``transfers``."""

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float: ...

    def breaks_swap(self, sender: PeerId, receiver: PeerId) -> float | None:
        """Return the share of the sender's payload after which the connection breaks, or None. Called once per swap."""


class SimulatedNetwork:
    """All peers and the network between them.

    Args:
        lookup_s: seconds until the directory answers.
        prepare: see ``StepBatcher``.
    """

    def __init__(
        self,
        world: World,
        run: RunId,
        conditions: Conditions,
        lookup_s: float = 0.05,
        directory: SimulatedDirectory | None = None,
        prepare: Callable[[list[SimulatedTrainer]], None] | None = None,
    ) -> None:
        self.world = world
        self.run = run
        self.conditions = conditions
        self.lookup_s = lookup_s
        self.directory = directory or SimulatedDirectory(run, Random(0))
        self.transfers = Transfers(world)
        self.step_batcher = StepBatcher(world, prepare)
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.on_end: Callable[[SimulatedPeer], None] = lambda peer: None
        """Called with every peer that is done."""

    def live(self, records: Sequence[Presence]) -> tuple[Dated, ...]:
        """Return the records that are still valid, each with the time until which it is."""
        now = self.world.now
        return tuple([(each, until) for each in records if (until := each.issued_at + each.lifetime_s) > now])
