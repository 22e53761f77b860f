"""One simulation from scenario to report."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from random import Random

from p2ptrain.base.ids import RunId
from sim import learner_pool
from sim.directory import SimulatedDirectory
from sim.network import SimulatedNetwork
from sim.observer import Observer, figures
from sim.population import Population, ScenarioConditions
from sim.report import REPORT_VERSION, Cost, SimulationReport
from sim.scenario import Scenario
from sim.world import World

GARBAGE_OBJECTS = 1_000_000
"""New objects between two garbage collections. Cycles are rare: Python's own schedule took a tenth of the time and
found nothing."""

RUN = RunId("5" * 64)
"""Id of every simulated run."""

LEFT_OUT = (
    "layers below our frames: libp2p's multiplexer, Noise, TCP and IP, a few per cent of the bytes",
    "TCP slow start, and bandwidth limits between two access lines",
    "bytes of the directory's maintenance, and of relaying others' records",
)

Progress = Callable[[float], None]
"""Called after every outer step with the share of the simulation that is done."""


class Simulation:
    """A swarm, its virtual clock, and the observations of it."""

    def __init__(self, scenario: Scenario, device: str = "cpu") -> None:
        self.scenario = scenario
        self.world = World()
        self.pool = learner_pool.make(scenario, device)
        seed = scenario.run.seed
        conditions = ScenarioConditions(Random(f"{seed}/conditions"), scenario.run.failed_exchanges)
        directory = SimulatedDirectory(RUN, Random(f"{seed}/directory"))
        self.network = SimulatedNetwork(self.world, RUN, conditions, directory=directory, prepare=self.pool.prepare)
        self.population = Population(scenario, self.network, conditions, self.pool)
        self.observer = Observer(scenario, self.world, self.population, self.pool)
        self.network.step_batcher.on_outer_step = self._outer_step_done
        self._progress: Progress | None = None
        self._began = 0.0, 0.0

    def run(self, progress: Progress | None = None) -> None:
        self._progress, self._began = progress, (time.perf_counter(), time.process_time())
        thresholds = gc.get_threshold()
        gc.set_threshold(GARBAGE_OBJECTS)
        try:
            self.world.run(self.scenario.run.seconds or float("inf"))
        finally:
            gc.set_threshold(*thresholds)

    def _outer_step_done(self) -> None:
        self.observer.outer_step_done()
        if self._progress is not None:
            self._progress(min(self.observer.outer_steps / self.observer.expected, 1.0))

    def report(self, title: str) -> SimulationReport:
        self.observer.look(final=True)
        members, now = self.population.members, self.world.now
        parameters = self.scenario.learner.parameters
        names = dict.fromkeys(slot.group for slot in self.population.slots)
        in_groups = {name: [each for each in members if each.slot.group == name] for name in names}
        ended = "all peers are done" if self.world.stopped else f"run.seconds, {self.scenario.run.seconds}, passed"
        return SimulationReport(
            version=REPORT_VERSION,
            title=title,
            scenario=self.scenario.model_dump(),
            simulated_s=now,
            ending=ended,
            events=self.world.events,
            overall=figures(members, parameters, now),
            groups={name: figures(each, parameters, now) for name, each in in_groups.items() if each},
            curve=self.observer.points,
            notes=dict(sorted(self.population.notes.kinds.items())),
            left_out=[*self.pool.left_out, *LEFT_OUT],
            cost=cost(self._began, self.world.events),
        )


def cost(began: tuple[float, float], events: int) -> Cost:
    """Return what the process has used since ``began``, given as its wall and CPU times in seconds."""
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cost(
        wall_s=wall_s,
        cpu_s=cpu_s,
        events_per_s=events / wall_s,
        peak_memory_bytes=peak if sys.platform == "darwin" else peak * 1024,
    )
