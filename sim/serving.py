"""A simulation that can be watched while it runs, on the page of ``p2ptrain.page``.

Nothing of the simulation depends on viewers: the page is updated between two slices, and peers' notes are passed on
unchanged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

from p2ptrain.base.errors import OutputError
from p2ptrain.base.ids import PeerId
from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.page.server import PageServer
from p2ptrain.page.untrusted import words
from p2ptrain.page.view import ExchangeRow, FailureRow, PeerRow, RunFacts, View
from p2ptrain.ports import Notebook
from sim.errors import ScenarioError
from sim.page_thread import in_thread
from sim.population import Member
from sim.report import SimulationReport
from sim.scenario import Scenario
from sim.simulate import begin
from sim.simulation import Progress, Simulation

LOOK_S = 0.5
"""Seconds of real time between two updates, as often as the page refreshes (``page.server``)."""
MEAN = ""
"""Curve key of the average of all peers, which belongs to no peer."""


class SimulationView:
    """View of a simulation. Call ``look`` in the simulation's thread, ``document`` in any."""

    def __init__(self, simulation: Simulation, title: str) -> None:
        scenario = simulation.scenario
        self._simulation = simulation
        self._view = View("simulation", state="simulating", why="all times are simulated")
        self._view.run = RunFacts(
            name=title,
            parameters=scenario.learner.parameters,
            run_tokens=scenario.run_tokens,
            recipe=scenario.outer.recipe,
            codec=scenario.codec.name,
        )
        self._lock = threading.Lock()
        self._seen = 0
        self._points = 0
        self._next_look = 0.0
        self._carried = (0.0, 0, 0)
        """Simulated seconds, and bytes sent and received by all peers, at the last update."""
        self._flow = (0.0, 0.0)
        """Bytes sent and received per simulated second, between the last two updates."""

    def look(self, again: bool = True) -> None:
        """Update the view, at most every ``LOOK_S`` seconds; the last update (``again`` False) is always made."""
        if again and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        members, now = self._simulation.population.members, self._simulation.world.now
        for member in members[self._seen :]:
            member.peer.notebook = _NoteListener(member.peer.peer, member.peer.notebook, self)
        self._seen = len(members)
        with self._lock:
            here = [each for each in members if not each.has_left]
            self._view.place((_row(each) for each in here), len(here), now)
            for each in here:
                if (curve := self._view.curve(each.peer.peer, each.slot.name)) is not None:
                    learner = each.peer.learner
                    curve.train.add(learner.progress, now, learner.loss)
            self._follow_the_observer()
            self._sum_up(here, now)
            if not again:
                self._view.state, self._view.why = "over", "the simulation has ended; press Ctrl+C to close this page"

    def document(self) -> dict[str, Any]:
        with self._lock:
            return self._view.document(self._simulation.world.now)

    def add_note(self, who: PeerId, kind: str, fields: Mapping[str, Any]) -> None:
        """Record a peer's note, in the simulation's thread. An exchange is noted by both sides and recorded once."""
        if kind not in ("exchanged", "failed", "broke protocol") or (kind == "exchanged" and fields["peer"] < who):
            return
        now = self._simulation.world.now
        with self._lock:
            if kind == "exchanged":
                peer, seconds, size = fields["peer"], fields["seconds"], fields["size_bytes"]
                self._view.add(ExchangeRow(self._view.next_serial(), now, who, peer, seconds=seconds, bytes=size))
            else:
                self._view.add(FailureRow(self._view.next_serial(), now, who, words(f"{kind}: {fields['why']}")))

    def _follow_the_observer(self) -> None:
        points = self._simulation.observer.points
        for point in points[self._points :]:
            if point.validation_of_mean is not None and (curve := self._view.curve(MEAN, "average")) is not None:
                curve.held_out.add(point.tokens, point.time_s, point.validation_of_mean)
            if point.disagreement is not None:
                self._view.disagreement.add(point.tokens, point.time_s, point.disagreement)
        self._points = len(points)

    def _sum_up(self, here: list[Member], now: float) -> None:
        simulation, last = self._simulation, self._simulation.observer.points[-1:]
        counters = [each.peer.core.counters for each in here]
        figures: dict[str, float | None] = {
            "fraction": min(simulation.observer.outer_steps / simulation.observer.expected, 1.0),
            "tokens": float(sum(each.peer.learner.tokens for each in here)),
            "tokens_per_s": sum(each.peer.learner.tokens for each in here) / max(now, 1e-9),
            "exchanges": sum(each.exchanges_ok for each in counters) / 2,  # both sides count
            "failed": sum(each.exchanges_failed for each in counters) / 2,
            "loss": last[0].loss if last else None,
            "held_out": last[0].validation_of_mean if last else None,
            "disagreement": last[0].disagreement if last else None,
            "sent_bytes": float(sum(each.sent_bytes for each in counters)),
            "received_bytes": float(sum(each.received_bytes for each in counters)),
        }
        everybody = [each.peer.core.counters for each in simulation.population.members]
        sent, received = sum(each.sent_bytes for each in everybody), sum(each.received_bytes for each in everybody)
        before, sent_before, received_before = self._carried
        if now > before:
            self._carried = now, sent, received
            self._flow = (sent - sent_before) / (now - before), (received - received_before) / (now - before)
            self._view.traffic.add(now, *self._flow)
        figures["up"], figures["down"] = self._flow
        self._view.figures = {name: value for name, value in figures.items() if value is not None}


class _NoteListener:
    """A notebook that passes a peer's notes on to the view."""

    def __init__(self, who: PeerId, notebook: Notebook, view: SimulationView) -> None:
        self._who = who
        self._notebook = notebook
        self._view = view

    def note(self, kind: str, **fields: Any) -> None:
        self._notebook.note(kind, **fields)
        self._view.add_note(self._who, kind, fields)


def _row(member: Member) -> PeerRow:
    peer, learner, counters = member.peer, member.peer.learner, member.peer.core.counters
    loss = float(learner.loss)
    return PeerRow(
        id=peer.peer,
        nickname=member.slot.name,
        state=peer.core.state.value,
        step=learner.step,
        progress=learner.progress,
        device=f"simulated, {member.slot.settings.step_s:g} s per step",
        tokens=learner.tokens,
        loss=loss if isfinite(loss) else None,
        exchanges=counters.exchanges_ok,
        failed=counters.exchanges_failed,
        sent_bytes=counters.sent_bytes,
        received_bytes=counters.received_bytes,
    )


def simulate_and_show(
    scenario: Scenario,
    place: ListenAddress,
    *,
    title: str,
    device: str,
    say: Callable[[str], None],
    progress: Progress,
) -> SimulationReport:
    """Simulate a scenario to its end, shown at ``place``, and keep showing it until Ctrl+C.

    Raises:
        ScenarioError: the recipe has no exchanges to watch.
        UserError: the page cannot be served at ``place``.
        KeyboardInterrupt: Ctrl+C before the end.
    """
    simulation = begin(scenario, device)
    if not isinstance(simulation, Simulation):
        raise ScenarioError(
            f"--serve: recipe {scenario.outer.recipe} averages over all peers, so there are no exchanges to watch.",
            "Leave --serve out, or use a recipe with exchanges between peers.",
        )
    view = SimulationView(simulation, title)

    def looked(share: float) -> None:
        progress(share)
        view.look()

    with in_thread(PageServer(place, view.document)) as server:
        say(f"Watch the simulation at {server.url}")
        simulation.run(looked)
        view.look(again=False)
        report = simulation.report(title)
        with suppress(KeyboardInterrupt):  # from the moment the line can be read
            with suppress(OutputError):  # the report is worth more than this line
                say("The simulation has ended. Press Ctrl+C to close the page.")
            until_interrupted()
    return report


def until_interrupted() -> None:
    threading.Event().wait()
