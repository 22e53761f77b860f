"""Supply of a peer's text: fetches the shards that training is about to need, and keeps the disk below its cap.

``p2ptrain.tokens.fetch_plan`` decides what to fetch from whom; this module does it, checks each shard's digest, and
tells the training thread whether an inner step has its text. All but ``is_supplied`` runs in the node's loop.

===========================================  ===========================================================================
a peer sends something else                  it is set aside for long, and another one is asked
a mirror or bootstrap sends something else   another one is asked for that shard; a line names both
it breaks off, or is slow                    it is set aside for a growing pause, and another one is asked
nobody has a shard                           training waits, in the swarm; a line says so
the disk is full                             shards that nobody reads are dropped; else training waits as above
===========================================  ===========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from random import Random

from p2ptrain.base.backoff import backoff
from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import HomeError, NetworkError, RemoteError
from p2ptrain.net.file_service import BusyError
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, Notebook
from p2ptrain.tokens.fetch_plan import AHEAD, FetchOutcome, FetchPlan, Needs, ShardFetch, needs
from p2ptrain.tokens.index import SHARD_BYTES, ShardIndex
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.walk import Walk
from peer.shard_sources import ShardSources

LOOK_S = (4.0, 60.0)
"""First and longest pause between two questions what others have, while training waits for text."""
CALM_S = 15.0
"""Pause between two such questions while training has text."""
TURN_S = 4.0
"""Longest pause of the loop while shards are missing."""
USE_S = 60.0
"""Pause between two marks on the shards in use."""
QUIET_S = 5.0
"""Seconds without a byte after which a note says that training waits for text. Guess: how long owners watch a silent
terminal."""
FULL_S = (10.0, 300.0)
"""First and longest pause after the disk was full."""
RESTING_S = 5.0
"""Pause while the owner lets this peer rest."""
ROOM_BYTES = 4 * SHARD_BYTES
"""Space to make on a full disk."""


class TokenSupply:
    """Supply of one peer.

    Args:
        walk: this peer's way through the training shards.
        per_step: sequences of an inner step.
        rates: say whether the owner lets this peer use the network.
        most_bytes: disk cap; what training needs now stays whatever it is.
    """

    def __init__(
        self,
        index: ShardIndex,
        store: ShardStore,
        walk: Walk,
        per_step: int,
        sources: ShardSources,
        notebook: Notebook,
        rates: Throttles,
        most_bytes: float,
        clock: Clock = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.on_supplied: Callable[[], object] = lambda: None
        """Called when the step is supplied of which ``is_supplied`` said no."""
        self._index, self._store, self._walk, self._per_step = index, store, walk, per_step
        self._sources, self._notebook, self._rates = sources, notebook, rates
        self._most_bytes, self._clock = most_bytes, clock
        self._plan = FetchPlan(rng or Random())
        self._held_out = tuple(range(index.training_shards, len(index.digests)))
        self._step: int | None = None
        """Inner step of training; None: not known yet."""
        self._span, self._window = range(0), list[int]()
        """Positions of the window that was here at the last look, and its shards."""
        self._is_awaited = False
        """Whether training waits for its text."""
        self._has_held_out = asyncio.Event()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup
        self._tasks: dict[ShardFetch, asyncio.Task[FetchOutcome]] = {}
        self._given_up: set[ShardFetch] = set()
        """Fetches that were too slow, and are being cancelled."""
        self._look_at = self._used_at = -math.inf
        self._pause_s, self._pauses_s = LOOK_S[0], backoff(*LOOK_S)
        self._looking: asyncio.Task[None] | None = None
        self._quiet_since = clock()
        self._is_told = False
        """Whether a note says that there is no text."""
        self._full_until, self._full_s = 0.0, backoff(*FULL_S)
        self._faults: BoundedDict[int, str] = BoundedDict(AHEAD)
        """Why the last fetch of a shard that is not here failed."""
        self._full_why = ""
        """Why the last shard could not be stored; empty if it was."""
        sources.on_change = self._changed.set

    @property
    def coming(self) -> frozenset[int]:
        """Shards that this peer is fetching, as its answers to others say."""
        return self._plan.coming

    def begin(self, step: int) -> None:
        """Fetch what this inner step needs, before training asks for it."""
        self._step = step
        self._changed.set()

    def is_supplied(self, step: int) -> bool:
        """Return whether an inner step has its text; if not, ``on_supplied`` is called when it has. Any thread."""
        positions = range(step * self._per_step, (step + 1) * self._per_step)
        if positions.start in self._span and positions[-1] in self._span and all(map(self._has, self._window)):
            return True
        moved, self._step = self._step != step, step
        self._is_awaited = True  # before the look, which the loop may repeat at once
        is_here = self._is_here(step)
        if is_here:
            self._is_awaited = False
        if (moved or not is_here) and self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)
        return is_here

    async def until_held_out(self) -> None:
        """Wait for the held-out shards, which the trainer reads first."""
        await self._has_held_out.wait()

    async def run(self) -> None:
        """Fetch and drop shards until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    self._changed.clear()
                    pause_s = await self._turn()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._changed.wait()
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__

    # --- one turn of the loop -----------------------------------------------------------------------------------------

    async def _turn(self) -> float:
        """Begin what is due; return the seconds until the next turn, unless something changes earlier."""
        now, wanted = self._clock(), self._needs()
        here = [number for number in wanted.all if self._has(number)]
        self._tell(wanted, here, now)
        if now - self._used_at >= USE_S:
            self._used_at = now
            await asyncio.to_thread(self._store.use, [self._index.digests[number] for number in wanted.all])
        overdue = self._plan.overdue(now)
        self._given_up.update(overdue)
        for fetch in (*overdue, *self._plan.unneeded(wanted, here)):
            if (task := self._tasks.get(fetch)) is not None:
                task.cancel()
        if self._rates.rests:
            return RESTING_S
        if now < self._full_until:
            return self._full_until - now
        if len(here) == len(wanted.all):
            return USE_S
        sources = self._sources.known(wanted.all)
        self._look(now, any(number not in here for number in wanted.now), any(each.held for each in sources))
        while isinstance(due := self._plan.begin(wanted, here, sources, now), ShardFetch):
            self._tasks[due] = self._group.create_task(self._fetch(due))
            self._tasks[due].add_done_callback(partial(self._ended, due))
        return min(due, TURN_S)

    def _needs(self) -> Needs:
        missing = tuple(number for number in self._held_out if not self._has(number))
        if self._step is None:
            return Needs(self._held_out, ())
        found = needs(self._walk, self._step, self._per_step, self._held_out)
        if not missing:
            return found
        now = tuple(dict.fromkeys((*found.now, *missing)))  # the trainer's start waits for them, too
        return Needs(now, tuple(number for number in found.soon if number not in now))

    def _look(self, now: float, is_urgent: bool, is_hopeful: bool) -> None:
        """Ask others what they have, if it is time: in growing pauses while nobody has anything."""
        if now < self._look_at or (self._looking is not None and not self._looking.done()):
            return
        if is_hopeful:
            self._pauses_s = backoff(*LOOK_S)
        self._pause_s = next(self._pauses_s) if is_urgent else CALM_S
        self._look_at = now + self._pause_s
        self._looking = self._group.create_task(self._sources.look())

    def _tell(self, wanted: Needs, here: list[int], now: float) -> None:
        """Tell training what has come, and the owner what has not."""
        if all(number in here for number in self._held_out):
            self._has_held_out.set()
        if self._is_awaited and self._step is not None and self._is_here(self._step):
            self._is_awaited = False
            self.on_supplied()
        is_short = self._is_awaited or not self._has_held_out.is_set()
        if not is_short:
            self._quiet_since = now
            if self._is_told:
                self._is_told = False
                self._notebook.note("text again")
        elif now - self._quiet_since >= QUIET_S and not self._is_told and not self._rates.rests:
            self._is_told = True
            lacking = sum(number not in here for number in wanted.now)
            faults = [self._faults[number] for number in wanted.now if number not in here and number in self._faults]
            why = self._full_why or next(iter(faults), self._sources.fault) or "nobody who was asked has it"
            self._notebook.note("no text", shards=lacking, why=why, seconds=self._pause_s)

    # --- fetches ------------------------------------------------------------------------------------------------------

    def _ended(self, fetch: ShardFetch, task: asyncio.Task[FetchOutcome]) -> None:
        """Free the place of a fetch in the plan, even if it was cancelled before it began."""
        was_slow = fetch in self._given_up
        self._given_up.discard(fetch)
        if not task.cancelled() and task.exception() is None:
            outcome = task.result()
        else:
            outcome = FetchOutcome.FAILED if was_slow else FetchOutcome.CANCELLED
        self._plan.ended(fetch, outcome, self._clock())
        del self._tasks[fetch]
        self._changed.set()

    async def _fetch(self, fetch: ShardFetch) -> FetchOutcome:
        digest, began = self._index.digests[fetch.shard], self._clock()

        def received(size_bytes: int) -> None:
            self._quiet_since = self._clock()
            self._plan.received(fetch, size_bytes)

        try:
            data = await self._sources.fetch(fetch.source, fetch.shard, received)
        except BusyError:
            return FetchOutcome.BUSY
        except NetworkError as error:
            self._faults[fetch.shard] = str(error)
            return FetchOutcome.FAILED
        except RemoteError as error:
            self._note_refusal(fetch, str(error))
            return FetchOutcome.FALSE
        if data is None:
            return FetchOutcome.FAILED
        try:
            await self._keep(digest, data)
        except ValueError:
            self._note_refusal(fetch, "it has another digest, so the file there is damaged or was edited")
            return FetchOutcome.FALSE
        except HomeError as error:
            pause_s = next(self._full_s)
            self._full_until, self._full_why = self._clock() + pause_s, error.problem
            self._notebook.note("text not stored", why=error.problem, remedy=error.remedy, seconds=pause_s)
            return FetchOutcome.CANCELLED
        self._full_s, self._full_why = backoff(*FULL_S), ""
        self._faults.pop(fetch.shard, None)
        self._notebook.note(
            "got shard", shard=fetch.shard, source=fetch.source, size_bytes=len(data), seconds=self._clock() - began
        )
        return FetchOutcome.WHOLE

    def _note_refusal(self, fetch: ShardFetch, why: str) -> None:
        name = self._sources.name(fetch.source)
        self._faults[fetch.shard] = f"shard {fetch.shard} of {name} was refused: {why}"
        self._notebook.note("shard refused", source=name, shard=fetch.shard, why=why)

    async def _keep(self, digest: str, data: bytes) -> None:
        """Store a shard, and drop others beyond the cap. Raises ValueError and HomeError."""
        kept = {self._index.digests[number] for number in (*self._needs().all, *self._held_out)}
        try:
            await asyncio.to_thread(self._store.add, digest, data)
        except HomeError:
            before = await asyncio.to_thread(self._store.drop, math.inf, kept)
            if await asyncio.to_thread(self._store.drop, before - ROOM_BYTES, kept) >= before:
                raise
            await asyncio.to_thread(self._store.add, digest, data)
        await asyncio.to_thread(self._store.drop, self._most_bytes, kept)

    # --- what is here -------------------------------------------------------------------------------------------------

    def _has(self, number: int) -> bool:
        return self._store.has(self._index.digests[number])

    def _is_here(self, step: int) -> bool:
        """Return whether all shards of an inner step are here, and of the window in which it begins."""
        span, shards = next(self._walk.spans(step * self._per_step))
        if not all(map(self._has, shards)):
            return False
        self._span, self._window = span, shards
        last = (step + 1) * self._per_step - 1
        return last in span or all(self._has(each.shard) for each in self._walk.sequences(step, self._per_step))
