"""Participation: whether this peer is in the swarm or paused.

A peer that stops participating leaves the swarm and keeps its weights in memory: the protocol core ends as at Ctrl+C
(``LeaveRequested``), and the other peers hear "leaving" and draw other partners at once. To participate again, the peer
joins with a new core at the trainer's step and progress; if it was away for long, it takes the swarm's weights as any
newcomer does. Hence nobody exchanges with weights that do not change, and the protocol needs no additional state.

=========  =======================  ====================================================================================
mode       trainer                  network
=========  =======================  ====================================================================================
SWARM      trains once core begins  the core's driver runs
PAUSED     is held                  p2pd and the DHT run; inbound exchanges are declined
=========  =======================  ====================================================================================

Everything runs in the node's loop, except ``post`` and ``turned``, which the training thread calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from p2ptrain.host.loop import Signals
from p2ptrain.host.tasks import PeerLearner
from p2ptrain.net.driver import Driver, DriverEnvironment
from p2ptrain.net.session import decline_while_away
from p2ptrain.ports import Link
from p2ptrain.swarm import Counters, Peer, Presence
from p2ptrain.swarm.events import Event, Giving, LeaveRequested, PhaseDone, TrainingEnded


class Mode(Enum):
    SWARM = "take part in the swarm"
    PAUSED = "rest"


@dataclass(frozen=True, slots=True)
class TrainerControl:
    """Starts, holds and ends the training loop; safe from any thread."""

    signals: Signals
    wake: Callable[[], None]
    trains: bool = True
    """Whether there is a trainer; a node without one never begins."""

    def begin(self) -> None:
        if self.trains:
            self.signals.begin.set()
        self.wake()

    def hold(self) -> None:
        self.signals.begin.clear()
        self.wake()

    def conclude(self) -> None:
        """Save and evaluate the final weights."""
        self.signals.over.set()
        self.wake()

    def finish(self) -> None:
        """End after the current outer step."""
        self.signals.last.set()
        self.wake()


class Participation:
    """Runs protocol cores while the mode is SWARM; see the module docstring.

    Args:
        new_core: creates a protocol core at the learner's step and progress.
        environment: environment of the drivers; ``begin_training`` and ``conclude`` are replaced.
    """

    def __init__(
        self,
        learner: PeerLearner,
        new_core: Callable[[], Peer],
        environment: DriverEnvironment,
        control: TrainerControl,
    ) -> None:
        self._learner = learner
        self._new_core = new_core
        self._environment = replace(environment, begin_training=self._begin, conclude=self._conclude)
        self._control = control
        self._mode = Mode.SWARM
        self._gives = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._turned = asyncio.Event()
        self._driver: Driver | None = None
        self._core: Peer | None = None
        self._past = Counters()
        self._is_recalled = False
        """Whether a change of mode made the current or last driver leave."""
        self._ended: TrainingEnded | None = None
        self._is_over = False
        """Whether the final gossip is over. The trainer saves the weights, so no other core may change them."""
        self._phase = 0
        """Last outer step at which the trainer waited for partners."""
        self._leaving = False

    # --- figures; any thread ------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Our state as the swarm sees it: a ``PeerState`` value, or "away"."""
        core = self._core
        return core.state.value if core is not None else "away"

    @property
    def live_peers(self) -> int:
        """Number of live peers, without this one."""
        driver = self._driver
        return driver.live_peers if driver is not None else 0

    @property
    def exchanges_under_way(self) -> int:
        """Number of accepted exchanges that have not ended."""
        driver = self._driver
        return driver.exchanges_under_way if driver is not None else 0

    def counters(self) -> Counters:
        """Return the counters since the start, summed over all cores."""
        core = self._core
        return self._past if core is None else self._past + core.counters

    # --- the owner's policy -------------------------------------------------------------------------------------------

    def set_mode(self, mode: Mode) -> None:
        if mode is self._mode:
            return
        self._mode = mode
        if mode is Mode.PAUSED:
            self._control.hold()
            if (driver := self._driver) is not None:
                self._is_recalled = True
                driver.post(LeaveRequested())
        self._changed.set()

    def give(self, gives: bool) -> None:
        """Set whether newcomers get our weights."""
        if gives is not self._gives:
            self._gives = gives
            self._pass_on_giving()

    # --- the training thread ------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Post an event to the current core. Without one, only events that end a wait matter."""
        match event:
            case TrainingEnded():
                self._ended = event
            case PhaseDone():
                self._phase = event.step
            case LeaveRequested():
                self._leaving = True
        if (driver := self._driver) is not None:
            driver.post(event)
        else:
            self._call(self._changed.set)

    def turned(self) -> None:
        """Signal the end of one turn of the training loop."""
        if not self._turned.is_set():
            self._call(self._turned.set)

    # --- the life in the loop -----------------------------------------------------------------------------------------

    async def live(self) -> str:
        """Participate whenever the mode is SWARM, until there is nothing left to do; return why."""
        self._loop = asyncio.get_running_loop()
        while True:
            if why := await self._stay_away():
                return why
            core = self._new_core()
            driver = Driver(core, self._learner, self._environment)
            self._is_recalled, self._core, self._driver = False, core, driver
            self._pass_on_giving()
            self._learner.inbox.proceed(self._phase)  # a wait that began without a core: this one does not know of it
            if self._mode is Mode.SWARM and not self._leaving:
                if self._ended is not None:
                    driver.post(self._ended)
                why = await driver.run()
                if not self._is_recalled or self._leaving or self._is_over:
                    return why  # the core stays, for its state and counters
            self._driver = self._core = None
            self._learner.peers = 1.0  # outside the swarm this peer is alone, and the next core begins to count at one
            self._past = self._past + core.counters
            await self._wait_until_applied()

    def live_records(self, now: float) -> list[Presence]:
        return self._core.live_records(now) if self._core is not None else []

    async def _stay_away(self) -> str:
        """Wait until the mode is SWARM (return ""), or until the peer ends (return why)."""
        while True:
            self._changed.clear()
            if self._leaving:
                return "stopped by its owner"
            if self._mode is Mode.SWARM:
                return ""
            self._control.hold()  # again: the core may have begun training at the same moment
            self._learner.inbox.proceed(self._phase)  # without a core nobody else will
            await self._environment.transport.listen(self._decline)
            await self._changed.wait()

    async def _wait_until_applied(self) -> None:
        """Wait until the trainer has applied the last core's commits: it must not report them to the next core."""
        self._learner.inbox.proceed(self._phase)
        for _ in range(2):  # the current turn may have read its inbox before
            self._turned.clear()
            self._learner.inbox.wake()
            await self._turned.wait()

    async def _decline(self, link: Link) -> None:
        await decline_while_away(link, self._learner.step, self._learner.progress)

    def _begin(self) -> None:
        if self._mode is not Mode.PAUSED:
            self._control.begin()

    def _conclude(self) -> None:
        self._is_over = True
        self._control.conclude()

    def _pass_on_giving(self) -> None:
        if (driver := self._driver) is not None:
            driver.post(Giving(self._gives))

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(what)
