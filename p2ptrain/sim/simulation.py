"""One simulation from scenario to report."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from random import Random

from p2ptrain.base.ids import RunId
from p2ptrain.sim import learner_pool as cohorts
from p2ptrain.sim.directory import SimulatedDirectory
from p2ptrain.sim.network import SimulatedNetwork
from p2ptrain.sim.observer import Observer, figures
from p2ptrain.sim.population import Population, ScenarioConditions
from p2ptrain.sim.report import REPORT_VERSION, Cost, SimulationReport
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.world import World

SLICE_S = 0.1
"""Seconds between two checks whether to stop."""

GARBAGE_EVENTS = 10_000_000
"""Events between two garbage collections. Cycles are rare: Python's own schedule took a tenth of the time and found
nothing."""

RUN = RunId("5" * 64)
"""Id of every simulated run."""

LEFT_OUT = (
    "layers below our frames: libp2p's multiplexer, Noise, TCP and IP, a few per cent of the bytes",
    "TCP slow start, and bandwidth limits between two access lines",
    "bytes of the directory's maintenance, and of relaying others' records",
)

Progress = Callable[[float], None]
"""Called now and then with the share of the simulation that is done."""

Stopped = Callable[[], bool]
"""Called now and then; True stops the simulation."""


def never() -> bool:
    """Never stop."""
    return False


class Simulation:
    """A swarm, its virtual clock, and the observations of it."""

    def __init__(self, scenario: Scenario, device: str = "cpu") -> None:
        self.scenario = scenario
        self.world = World()
        self.cohort = cohorts.make(scenario, device)
        seed = scenario.run.seed
        conditions = ScenarioConditions(Random(f"{seed}/conditions"), scenario.run.failed_exchanges)
        directory = SimulatedDirectory(RUN, Random(f"{seed}/directory"))
        self.network = SimulatedNetwork(self.world, RUN, conditions, directory=directory, prepare=self.cohort.prepare)
        self.population = Population(scenario, self.network, conditions, self.cohort)
        self.observer = Observer(scenario, self.world, self.population, self.cohort)
        self.network.metronome.on_outer_step = self.observer.outer_step_done
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._slice = 1
        """Events until the next check."""

    def start(self) -> None:
        self.population.schedule()

    def run(self, progress: Progress | None = None, is_stopped: Stopped = never) -> bool:
        """Run to the end, or until ``is_stopped``; return True at the end."""
        limit = self.scenario.run.seconds or float("inf")
        wall, cpu = time.perf_counter(), time.process_time()
        gc.disable()
        try:
            while self._run_slice(limit):
                if progress is not None:
                    progress(min(self.observer.outer_steps / self.observer.expected, 1.0))
                if is_stopped():
                    return False
            return True
        finally:
            gc.enable()
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu

    def _run_slice(self, limit: float) -> bool:
        """Run for a fraction of a second; return whether there is more to run."""
        began, events = time.perf_counter(), self.world.events
        more = self.world.run(limit, self._slice)
        if self.world.events // GARBAGE_EVENTS > events // GARBAGE_EVENTS:
            gc.collect()
        quicker = SLICE_S / max(time.perf_counter() - began, 1e-4)
        self._slice = max(1, int(self._slice * min(quicker, 2.0)))
        return more

    def report(self, title: str) -> SimulationReport:
        self.observer.look(final=True)
        members, now = self.population.members, self.world.now
        parameters = self.scenario.learner.parameters
        names = dict.fromkeys(seat.group for seat in self.population.seats)
        in_groups = {name: [each for each in members if each.seat.group == name] for name in names}
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
            left_out=[*self.cohort.left_out, *LEFT_OUT],
            cost=Cost(
                wall_s=self.wall_s,
                cpu_s=self.cpu_s,
                events_per_s=self.world.events / max(self.wall_s, 1e-9),
                peak_memory_bytes=peak_memory_bytes(),
            ),
        )


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
