"""Asyncio driver: performs the protocol core's effects over links, a directory and a learner.

The driver decides nothing. Each link has its own task, which runs its ``Session``. The driver works alike over libp2p
and over the in-memory transport, with or without a worker pool; ``tests/net/test_flagship.py`` checks that it matches
the simulator bit by bit.

Resources: ``run`` owns all sessions and timers in one task group and ends them before it returns; each session closes
its link.
Errors: NetworkError and RemoteError end a session and reach the core as ``LinkFailed``; any other exception is a bug
and ends ``run``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, assert_never

from p2ptrain.base.errors import MisfitError, NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.net.concurrently import concurrently
from p2ptrain.net.session import Session, SessionEnvironment
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import WeightServer
from p2ptrain.ports import Clock, Directory, Link, NetworkedLearner, Notebook, Transport
from p2ptrain.swarm import Peer, Presence
from p2ptrain.swarm.events import (
    Adopt,
    Announce,
    BeginTraining,
    Close,
    Commit,
    Conclude,
    Counted,
    Donate,
    Effect,
    Event,
    Finished,
    LeaveRequested,
    LinkFailed,
    Lookup,
    LookupFailed,
    Note,
    Open,
    PeersSeen,
    Proceed,
    Pull,
    Received,
    Send,
    Started,
    Swap,
    WakeAt,
    Woke,
)
from p2ptrain.swarm.messages import Accept, Message, Offer, WeightsReply

FINISHED_S = 2.0
"""Seconds after a lookup for which its peers wait for the farewells of finished ones; the next lookup asks again."""
FAREWELL_S = 5.0
"""Timeout of the last announcement, without which our record expires by itself. Guess: the time that announcements take
in a large swarm would settle it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DriverEnvironment:
    """Everything that the driver uses besides the protocol core and the learner."""

    transport: Transport
    directory: Directory
    notebook: Notebook
    clock: Clock
    sign: Callable[[Announce], Presence]
    """Fills in addresses, nickname and times, and signs."""
    live_until: Callable[[Presence], float | None]
    """Returns a record's end on ``clock``; None if its signature or its times are invalid."""
    begin_training: Callable[[], None]
    work: Callable[..., Awaitable[Any]]
    """Runs ``work(function, *arguments)`` off the event loop, or at once."""
    committed: Callable[[Commit], None] = lambda commit: None
    """Called for each committed exchange."""
    weight_server: WeightServer | None = None
    """Server of our weights; None: one that serves only newcomers that the core accepted."""
    downloader: Downloader | None = None
    """Downloads weights; None: only from the donor that accepted our request."""
    conclude: Callable[[], None] | None = None
    """Makes the trainer save and evaluate the final weights, and then post LeaveRequested; None: leave at once."""


async def at_once(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function at once, without a thread: a ``work`` for virtual time."""
    return function(*arguments)


class Driver:
    """Driver of one peer's protocol core."""

    def __init__(self, core: Peer, learner: NetworkedLearner, environment: DriverEnvironment) -> None:
        self.live_peers = 0
        """Number of other live peers that answer; any thread may read it, unlike the core."""
        self.exchanges_under_way = 0
        """Number of running exchanges; any thread may read it."""
        self._core = core
        self._learner = learner
        self._environment = environment
        self._sessions: dict[LinkId, Session] = {}
        work, sizes = environment.work, learner.payloads.weight_sizes()
        self._tools = SessionEnvironment(
            payloads=learner.payloads,
            work=work,
            weight_server=environment.weight_server
            or WeightServer(learner.payloads, work, environment.clock, held=core.held),
            downloader=environment.downloader or Downloader(None, sizes, work, environment.notebook, wanted=core.held),
            donors=self._donors,
            keepers=lambda: core.keepers(environment.clock()),
            heard=self._heard,
            done=self.handle,
        )
        self._events: deque[tuple[Event, float]] = deque()
        """Events of threads and timers, each with the earliest time to report; any thread may append."""
        self._has_events = asyncio.Event()
        self._inbound_serial = 0
        self._timer: asyncio.TimerHandle | None = None
        self._finished: asyncio.Future[str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._directory_tasks: set[asyncio.Task[Any]] = set()
        """Tasks that announce or look up."""
        self._announced: asyncio.Task[None] | None = None
        """The last announcement, which may still run; at the end, that of our leaving."""

    async def run(self) -> str:
        """Run until the core is finished; return its reason."""
        self._loop = asyncio.get_running_loop()
        self._finished = self._loop.create_future()
        async with asyncio.TaskGroup() as self._tasks:
            await self._environment.transport.listen(self._inbound)
            self.handle(Started())
            pump = self._spawn(self._pump())
            try:
                why = await self._finished
                await self._end_sessions()
                await self._say_farewell()
                return why
            finally:
                pump.cancel()
                await self._end_sessions()
                for work in self._directory_tasks:
                    work.cancel()

    def post(self, event: Event) -> None:
        """Pass an event from any thread. Kept until ``run`` begins, dropped once the loop is closed."""
        self._events.append((event, 0.0))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._has_events.set)

    async def _pump(self) -> None:
        """Handle events of threads and timers in a task, so that a bug ends ``run`` and not only a callback."""
        while True:
            self._has_events.clear()
            while self._events:
                self.handle(*self._events.popleft())
            await self._has_events.wait()

    def handle(self, event: Event, not_before: float = 0.0) -> None:
        """Pass an event to the core and perform the effects. Call it in the event loop's thread.

        Args:
            not_before: earliest time to report. A timer may fire a rounding error early, and a core that wakes too
                early would ask to be woken again at once, forever.
        """
        assert self._finished is not None
        if self._finished.done() and not isinstance(event, Received):
            return
        for effect in self._core.handle(event, max(self._environment.clock(), not_before)):
            self._perform(effect)
        self.live_peers = self._core.peers_that_answer(self._environment.clock())
        self.exchanges_under_way = self._core.exchanges_under_way

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Open():
                session = Session(effect.link, self._tools)
                self._sessions[effect.link] = session
                session.task = self._spawn(self._outbound(session, effect))
            case Send() | Swap() | Pull() | Donate():
                if (known := self._sessions.get(effect.link)) is not None:
                    known.instructions.put_nowait(effect)
            case Close():
                if (known := self._sessions.get(effect.link)) is not None:
                    self._close(known)
            case Commit():
                self._commit(effect)
            case Counted():
                self._learner.peers = effect.peers
            case Proceed():
                self._learner.inbox.proceed(effect.step)
            case Adopt():
                self._adopt(effect)
            case Announce():
                self._announced = self._start_directory_task(self._announce(effect))
            case Lookup():
                self._start_directory_task(self._lookup(effect.finished))
            case WakeAt():
                self._wake_at(effect.time)
            case BeginTraining():
                self._environment.begin_training()
            case Conclude():
                if self._environment.conclude is not None:
                    self._environment.conclude()
                else:
                    self.post(LeaveRequested())
            case Finished():
                assert self._finished is not None
                self._finished.set_result(effect.why)
            case Note():
                fields = {name: value for name, value in asdict(effect).items() if name != "kind" and value}
                self._environment.notebook.note(effect.kind, **fields)
            case _:
                assert_never(effect)

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _outbound(self, session: Session, effect: Open) -> None:
        async def converse() -> None:
            session.interruptible = True
            link = await self._environment.transport.open(effect.link.peer, effect.addresses)
            try:
                await session.open(link, effect.message)
            finally:
                await link.close()

        await self._guard(session, converse())

    async def _inbound(self, link: Link) -> None:
        """Serve one inbound link; the transport calls this in a separate task for each."""
        self._inbound_serial += 1
        name = LinkId(link.peer, self._inbound_serial, outbound=False)
        session = self._sessions[name] = Session(name, self._tools, task=asyncio.current_task())

        async def converse() -> None:
            try:
                await session.answer(link)
            finally:
                await link.close()

        await self._guard(session, converse())

    async def _guard(self, session: Session, conversation: Awaitable[None]) -> None:
        """Turn failures of the network and the partner into an event; let our own bugs through."""
        why, their_fault, unbegun, misfit = "", False, False, False
        try:
            await conversation
        except asyncio.CancelledError:
            if session.link in self._sessions:  # not our own Close: the transport or the driver ends
                why = "the connection was dropped"
                raise
        except RemoteError as error:
            why, their_fault = str(error), True
        except (NetworkError, TimeoutError) as error:
            why = str(error) or "it did not answer in time"
            unbegun, misfit = isinstance(error, UnbegunError), isinstance(error, MisfitError)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            is_open = self._sessions.pop(session.link, None) is not None
            if why and is_open:
                self.handle(LinkFailed(session.link, why, their_fault, unbegun, misfit))

    def _fail(self, error: BaseException) -> None:
        """End ``run`` with a bug's exception, also from a task of the transport."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)

    def _heard(self, link: LinkId, message: Message, size_bytes: int) -> None:
        if link in self._sessions:
            if isinstance(message, Offer | Accept | WeightsReply):
                self._see(list(message.known), from_lookup=False)
            self.handle(Received(link, message, size_bytes))

    def _donors(self) -> Mapping[PeerId, Sequence[str]]:
        return self._core.donors(self._environment.clock())

    def _commit(self, effect: Commit) -> None:
        session = self._sessions[effect.link]
        assert session.swapped is not None
        self._learner.inbox.deliver(effect, session.swapped)
        session.swapped = None
        self._environment.committed(effect)

    def _adopt(self, effect: Adopt) -> None:
        session = self._sessions[effect.link]
        assert session.pulled is not None
        reply, parts = session.pulled
        session.pulled = None
        self._learner.inbox.adopt(effect.link, reply.step, effect.progress, parts, effect.left_behind)

    def _close(self, session: Session) -> None:
        if session.interruptible:
            del self._sessions[session.link]
            if session.task is not None and session.task is not asyncio.current_task():
                session.task.cancel()
                return
        session.instructions.put_nowait(Close(session.link))

    async def _end_sessions(self) -> None:
        """Give sessions 1 s to send their last messages, then cancel the rest."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [session.task for session in self._sessions.values() if session.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()

    async def _say_farewell(self) -> None:
        """Wait until the last announcement reaches the directory, for at most ``FAREWELL_S``."""
        if self._announced is not None:
            await asyncio.wait([self._announced], timeout=FAREWELL_S)

    # --- directory and time -------------------------------------------------------------------------------------------

    async def _announce(self, effect: Announce) -> None:
        try:
            presence = self._environment.sign(effect)
            directory = self._environment.directory
            kept = [directory.keep_finished(presence)] if effect.finished else []
            await concurrently(directory.announce(presence), *kept)
        except NetworkError as error:
            self._environment.notebook.note("not announced", why=str(error))

    async def _lookup(self, asks_for_finished: bool) -> None:
        asked = self._start_directory_task(self._finished_peers()) if asks_for_finished else None
        try:
            records = await self._environment.directory.lookup()
        except NetworkError:
            self.handle(LookupFailed())
        else:
            finished: tuple[Presence, ...] = ()
            if asked is not None and (await asyncio.wait([asked], timeout=FINISHED_S))[0]:
                finished = asked.result()
            size = self._environment.directory.size
            self._see(records, from_lookup=True, in_directory=size, finished=finished)
        finally:
            if asked is not None:
                asked.cancel()

    async def _finished_peers(self) -> tuple[Presence, ...]:
        try:
            return tuple(await self._environment.directory.finished())
        except NetworkError:
            return ()

    def _see(
        self,
        records: list[Presence],
        from_lookup: bool,
        in_directory: int = 0,
        finished: tuple[Presence, ...] = (),
    ) -> None:
        live = [(record, until) for record in records if (until := self._environment.live_until(record)) is not None]
        if live or from_lookup:
            self.handle(PeersSeen(tuple(live), from_lookup, in_directory, finished))

    def _wake_at(self, time: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        delay = max(time - self._environment.clock(), 0.0)
        self._timer = self._loop.call_later(delay, self._wake, time)

    def _wake(self, time: float) -> None:
        self._events.append((Woke(), time))
        self._has_events.set()

    def _start_directory_task(self, work: Awaitable[T]) -> asyncio.Task[T]:
        task = self._spawn(work)
        self._directory_tasks.add(task)
        task.add_done_callback(self._directory_tasks.discard)
        return task

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        assert self._tasks is not None
        return self._tasks.create_task(work)
