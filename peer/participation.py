"""Whether this peer is in the swarm just now: its owner may send it away for a while, and call it back.

To be away is to have left, in all politeness, with the weights kept in memory: the protocol core ends as at Ctrl+C
(``LeaveRequested``), the others hear "leaving" and draw other partners at once. To come back is to join anew, with a
new core at the step and progress where the trainer stands: whoever was away for long is behind, and takes the swarm's
weights as every newcomer does. So nobody exchanges with weights that stand still, and the protocol needs no new state.

=========  ==========================  =================================================================================
wish       trainer                     network
=========  ==========================  =================================================================================
PRESENT    trains once the core says   the core's driver runs
ALONE      trains                      p2pd and the DHT stay; a porter declines whoever calls
ABSENT     holds                       the same
=========  ==========================  =================================================================================

Three threads meet here without a lock: the trainer posts events, the owner's thread wishes, the network's loop runs
``live``. Each first writes what it has to say and then looks whom to tell, so that one of two always sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum

from p2ptrain.net.driver import Driver, DriverEnvironment
from p2ptrain.net.porter import turn_away
from p2ptrain.ports import Link
from p2ptrain.swarm import Counters, Peer, Presence
from p2ptrain.swarm.events import Event, Giving, LeaveRequested, PhaseDone, TrainingEnded
from p2ptrain.train.learner import Learner
from p2ptrain.train.loop import Signals


class Mode(Enum):
    """What the owner wants of a peer."""

    PRESENT = "take part in the swarm"
    ALONE = "train without the swarm"
    ABSENT = "rest"


@dataclass(frozen=True, slots=True)
class TrainerControl:
    """What the trainer is told; from any thread."""

    signals: Signals
    wake: Callable[[], None]

    def begin(self) -> None:
        self.signals.begin.set()
        self.wake()

    def hold(self) -> None:
        self.signals.begin.clear()
        self.wake()

    def finish(self) -> None:
        """End with the outer step under way."""
        self.signals.last.set()
        self.wake()


class Participation:
    """See the module.

    Args:
        new_core: a protocol core at the learner's step and progress.
        shore: what drivers stand on; its ``begin_training`` is ours to set.
    """

    def __init__(
        self, learner: Learner, new_core: Callable[[], Peer], shore: DriverEnvironment, reins: TrainerControl
    ) -> None:
        self._learner = learner
        self._new_core = new_core
        self._shore = replace(shore, begin_training=self._begin)
        self._reins = reins
        self._wish = Mode.PRESENT
        self._gives = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._turned = asyncio.Event()
        self._driver: Driver | None = None
        self._core: Peer | None = None
        self._past = Counters()
        """Of earlier cores."""
        self._recalled = False
        """The driver that runs, or ran last, was told to leave because of a wish."""
        self._ended: TrainingEnded | None = None
        self._phase = 0
        """The last outer step at which the trainer waited for partners."""
        self._leaving = False

    # --- any thread ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """What the swarm takes us for: a ``PeerState``, or "away"."""
        core = self._core
        return core.state.value if core is not None else "away"

    @property
    def live_peers(self) -> int:
        """How many others are here."""
        driver = self._driver
        return driver.live_peers if driver is not None else 0

    @property
    def exchanges_under_way(self) -> int:
        """Exchanges that both have agreed on, and that are not over."""
        driver = self._driver
        return driver.exchanges_under_way if driver is not None else 0

    def counters(self) -> Counters:
        """What happened since the start, in all sessions."""
        core = self._core
        return self._past if core is None else _sum(self._past, core.counters)

    def wish(self, wish: Mode) -> None:
        """The owner's thread: be there, or not, from now on."""
        if wish is self._wish:
            return
        self._wish = wish
        if wish is Mode.ABSENT:
            self._reins.hold()
        if wish is not Mode.PRESENT and (driver := self._driver) is not None:
            self._recalled = True
            driver.post(LeaveRequested())
        self._tell(self._news)

    def give(self, gives: bool) -> None:
        """The owner's thread: newcomers get our weights, or not, from now on."""
        if gives is not self._gives:
            self._gives = gives
            self._call(self._pass_on_giving)

    def post(self, event: Event) -> None:
        """The trainer's thread: hand an event to the core of the day. Without one, only what ends a wait matters."""
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
            self._tell(self._news)

    def turned(self) -> None:
        """The trainer's thread: one turn of its loop is over."""
        if not self._turned.is_set():
            self._tell(self._turned)

    # --- the network's loop -------------------------------------------------------------------------------------------

    async def live(self) -> str:
        """Take part whenever it is wished, until there is nothing left to do; why that is."""
        self._loop = asyncio.get_running_loop()
        while True:
            if why := await self._be_away():
                return why
            core = self._new_core()
            driver = Driver(core, self._learner, self._shore)
            self._recalled, self._core, self._driver = False, core, driver
            self._pass_on_giving()
            self._learner.proceed(self._phase)  # who came to wait while there was no core: this one never hears of it
            if self._wish is Mode.PRESENT and not self._leaving:
                if self._ended is not None:
                    driver.post(self._ended)
                why = await driver.run()
                if not self._recalled or self._leaving:
                    return why  # the core stays, for what is asked of it now
            self._driver = self._core = None
            self._past = _sum(self._past, core.counters)
            await self._settled()

    def live_records(self, now: float) -> list[Presence]:
        """The live peers' records, for the cache on disk."""
        return self._core.live_records(now) if self._core is not None else []

    async def _be_away(self) -> str:
        """Until we are wished back (then ""), or for good, and why."""
        while True:
            self._news.clear()
            wish = self._wish
            if self._leaving:
                return "stopped by its owner"
            if wish is Mode.PRESENT:
                return ""
            if wish is Mode.ALONE:
                self._begin()
                if self._ended is not None:
                    return "the run's end, alone"
            else:
                self._reins.hold()  # again: the core may have let it begin at the same moment
            self._learner.proceed(self._phase)  # nobody else will let it go on
            await self._shore.transport.listen(self._turn_away)
            await self._news.wait()

    async def _settled(self) -> None:
        """Until the trainer has applied what the last core committed: it shall not answer to the next one's links."""
        self._learner.proceed(self._phase)
        for _ in range(2):  # the turn under way may have looked before
            self._turned.clear()
            self._learner.wake()
            await self._turned.wait()

    async def _turn_away(self, link: Link) -> None:
        await turn_away(link, self._learner.step, self._learner.progress)

    def _begin(self) -> None:
        if self._wish is not Mode.ABSENT:
            self._reins.begin()

    def _pass_on_giving(self) -> None:
        """In the loop alone, so that the last word is the one that counts."""
        if (driver := self._driver) is not None:
            driver.post(Giving(self._gives))

    def _tell(self, flag: asyncio.Event) -> None:
        self._call(flag.set)

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(what)


def _sum(one: Counters, other: Counters) -> Counters:
    return Counters(*(getattr(one, each.name) + getattr(other, each.name) for each in fields(Counters)))
