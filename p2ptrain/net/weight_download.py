"""Weight download: takes a model from several donors at once and confirms each piece by another donor's copy.

``swarm.download_plan`` decides which piece to ask of which donor; this module sends the requests. Pieces of the donor
that accepted our request come on that request's stream; all other requests, and its comparisons, use streams of
``weight_server.COPIES_PROTOCOL``. Pieces of a failed download are kept for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.host.sketch import SKETCH_BYTES, PieceStore, distance
from p2ptrain.net.payload import receive_payload
from p2ptrain.net.rpc import send_message
from p2ptrain.ports import Link, Notebook, Opaque
from p2ptrain.swarm.download_plan import Action, Cancel, Compare, DownloadPlan, Fetch, Span, cut
from p2ptrain.swarm.keeping import words

SKETCH_DEADLINE_S = 60.0
"""Timeout of a comparison, dialing included. Guess: measure sketches of large pieces on slow
machines."""
REST_S = 10.0
"""Idle time after which a stream is ended, well before the other side's timeout (``links.Limits.idle_s``); it is opened
again when needed."""
KEEP_S = 900.0
"""How long the pieces of a failed download are kept after its beginning, as long as a download may take."""
FAREWELL_S = 2.0
"""Timeout to end all streams. Guess: closing times between real homes would settle it."""

Dial = Callable[[PeerId, Sequence[str]], Awaitable[Link]]


@dataclass(slots=True)
class _ReceivedWeights:
    """Weights received so far."""

    pieces: PieceStore
    givers: dict[int, PeerId]
    """Donor of each received piece."""
    since: float
    """Beginning of the download, on the event loop's clock."""


class Downloader:
    """Downloader of whole models. Each call owns its tasks and streams and ends them before it returns.

    Args:
        dial: opens a stream to a peer's ``WeightServer``; None: use only the donor that accepted our request.
        sizes: bytes of each fragment in fp32.
        work: runs a function off the event loop.
        notebook: receives notes on the number of donors, on repeated requests and on weights that no donor confirmed.
        taken: called with each donor and its bytes of weights.
        wanted: the fragments to take; None: all.
    """

    def __init__(
        self,
        dial: Dial | None,
        sizes: Sequence[int],
        work: Callable[..., Awaitable[Any]],
        notebook: Notebook,
        taken: Callable[[PeerId, int], None] = lambda peer, size: None,
        *,
        wanted: frozenset[int] | None = None,
    ) -> None:
        self._wanted = frozenset(range(len(sizes))) if wanted is None else wanted
        self._dial = dial
        self._sizes = tuple(sizes)
        self._work = work
        self._notebook = notebook
        self._taken = taken
        self._kept: _ReceivedWeights | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights that a download takes."""
        return sum(self._sizes[each] for each in self._wanted)

    async def download(
        self,
        accepted: Link,
        others: Mapping[PeerId, Sequence[str]],
        keepers: Mapping[PeerId, frozenset[int]] | None = None,
    ) -> Opaque:
        """Return ``PieceStore.whole`` with all wanted fragments, confirmed by other donors where possible.

        Args:
            accepted: the stream on which a donor accepted our request; closed afterwards.
            others: further donors, and the addresses of all donors.
            keepers: the fragments of each donor that holds only some.

        Raises:
            RemoteError: that donor broke the protocol, or other donors agree on weights that are far from its own.
            NetworkError: some pieces are unavailable, or two donors contradict each other.
        """
        giver, now = accepted.peer, asyncio.get_running_loop().time()
        kept, self._kept = self._kept, None
        if kept is None or now - kept.since > KEEP_S:
            held_sizes = [size if each in self._wanted else 0 for each, size in enumerate(self._sizes)]
            kept = _ReceivedWeights(PieceStore(held_sizes), {}, now)
        channels = {giver: self._channel(giver, others.get(giver, ()), accepted)}
        if self._dial is not None:
            channels |= {peer: self._channel(peer, places) for peer, places in others.items() if peer != giver}
        comparison_channels = {peer: self._channel(peer, others.get(peer, ())) for peer in channels}
        spans = cut(self._sizes)
        held = {peer: _pieces_of(spans, fragments) for peer, fragments in (keepers or {}).items()}
        wanted = _pieces_of(spans, self._wanted)
        plan = DownloadPlan([span.size for span in spans], list(channels), kept.givers, held, wanted)
        download = _Download(channels, comparison_channels, kept, spans, plan, self._work, self._taken)
        try:
            await download.run()
        finally:
            if download.plan.here and (giver in download.plan.dropped or not download.plan.is_done):
                self._keep(_ReceivedWeights(kept.pieces, download.plan.here, kept.since))
        self._check(download.plan, giver)
        self._tell(download.plan, asyncio.get_running_loop().time() - now)
        return kept.pieces.whole

    def _tell(self, plan: DownloadPlan, seconds: float) -> None:
        self._notebook.note(
            "took weights",
            donors=len(set(plan.here.values())),
            pieces=len(plan.here),
            broke_off=len(plan.broke_off),
            asked_again=plan.asked_again,
            size_bytes=self.size_bytes,
            seconds=seconds,
        )

    def _keep(self, kept: _ReceivedWeights) -> None:
        """Keep pieces for the next download, and free their memory after ``KEEP_S``."""
        self._kept, loop = kept, asyncio.get_running_loop()
        loop.call_at(kept.since + KEEP_S, self._forget, kept)

    def _forget(self, kept: _ReceivedWeights) -> None:
        if self._kept is kept:
            self._kept = None

    def _check(self, plan: DownloadPlan, giver: PeerId) -> None:
        if giver in plan.dropped:
            raise RemoteError("its weights differ too much from those of others")
        if plan.is_done:
            if not plan.was_compared:
                self._notebook.note("unconfirmed", peer=giver, why="no other peer could be asked for its copy")
            elif plan.unconfirmed:
                fragments = {cut(self._sizes)[piece].fragment for piece in plan.unconfirmed}
                why = f"only one peer holds fragments {words(fragments)}"
                self._notebook.note("unconfirmed", peer=plan.here[plan.unconfirmed[0]], why=why)
            return
        if plan.is_disputed:
            raise NetworkError(f"the weights of {short(giver)} and of others differ too much")
        if plan.lacks_pieces:
            raise NetworkError(f"{short(giver)} stopped sending, and no other peer sent the rest of the weights")
        self._kept = None
        self._notebook.note("unconfirmed", peer=giver, why="no other peer could be asked for its copy")

    def _channel(self, peer: PeerId, addresses: Sequence[str], accepted: Link | None = None) -> _DonorChannel:
        async def dial() -> Link:
            if self._dial is None:
                raise NetworkError(f"{short(peer)} ended the stream")
            return await self._dial(peer, addresses)

        return _DonorChannel(dial, accepted)


class _Download:
    """Running download of one model: its plan, its channels to the donors and its pending requests.

    Args:
        channels: channels to all donors for pieces, in order of preference; the first is the donor that accepted our
            request, on an open stream.
        comparison_channels: channels to the same donors for comparisons.
    """

    def __init__(
        self,
        channels: Mapping[PeerId, _DonorChannel],
        comparison_channels: Mapping[PeerId, _DonorChannel],
        kept: _ReceivedWeights,
        spans: Sequence[Span],
        plan: DownloadPlan,
        work: Callable[..., Awaitable[Any]],
        taken: Callable[[PeerId, int], None],
    ) -> None:
        self._spans = spans
        self.plan = plan
        self._giver = next(iter(channels))
        self._channels = channels
        self._comparison_channels = comparison_channels
        self._pieces = kept.pieces
        self._work = work
        self._taken = taken
        self.failure: RemoteError | None = None
        self._outcomes: asyncio.Queue[Callable[[], Awaitable[list[Action]]]] = asyncio.Queue()
        self._running: dict[tuple[PeerId, int, bool], asyncio.Task[None]] = {}
        """Tasks by donor, piece, and whether they compare: a donor may have one of each for a piece."""

    async def run(self) -> None:
        """Run until all pieces are received and confirmed, or no donor is left.

        Raises RemoteError as ``Downloader.download`` does.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._follow(tasks)
                for task in self._running.values():
                    task.cancel()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await asyncio.gather(*(channel.end() for channel in self._all_channels()))
        if self.failure is not None:
            raise self.failure

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        loop, plan = asyncio.get_running_loop(), self.plan
        actions = plan.act(loop.time())
        while True:
            for action in actions:
                self._begin(action, tasks)
            if plan.is_done or plan.is_stuck or self.failure is not None:
                return
            for channel in self._all_channels():
                if channel.rests_at <= loop.time():
                    tasks.create_task(channel.end())
            rest_at = min(channel.rests_at for channel in self._all_channels())
            try:
                async with asyncio.timeout_at(min(plan.next_deadline(loop.time()), rest_at)):
                    outcome = await self._outcomes.get()
            except TimeoutError:
                actions = plan.act(loop.time())
            else:
                actions = await outcome()

    def _begin(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        place = action.donor, action.piece, isinstance(action, Compare)
        if isinstance(action, Cancel) and self._channels[action.donor].is_accepted:
            return  # cancelling would break the first donor's stream: its response is ignored instead
        if (task := self._running.pop(place, None)) is not None:
            task.cancel()
        if not isinstance(action, Cancel):
            self._running[place] = tasks.create_task(self._perform(action))

    async def _perform(self, action: Fetch | Compare) -> None:
        donor, number = action.donor, action.piece
        try:
            if isinstance(action, Fetch):
                async with asyncio.timeout_at(action.deadline):
                    piece = await self._channels[donor].ask(["piece", number], self._spans[number].size)
                self._outcomes.put_nowait(partial(self._take, donor, number, piece))
            else:
                await self._compare(donor, number)
        except (NetworkError, TimeoutError):
            self._outcomes.put_nowait(partial(self._lose, donor))
        except RemoteError as error:
            self._outcomes.put_nowait(partial(self._lose, donor, error))

    async def _compare(self, donor: PeerId, number: int) -> None:
        span, seed = self._spans[number], secrets.randbits(63)
        async with asyncio.timeout(SKETCH_DEADLINE_S):
            theirs = await self._comparison_channels[donor].ask(["sketch", number, seed], SKETCH_BYTES)
        ours = await self._work(self._pieces.sketch, span, seed)
        self._outcomes.put_nowait(partial(self._judge, donor, number, distance(ours, bytes(theirs))))

    async def _judge(self, donor: PeerId, number: int, far: float) -> list[Action]:
        return self.plan.compared(donor, number, far, _now())

    async def _take(self, donor: PeerId, number: int, piece: bytearray) -> list[Action]:
        """Store a piece, unless another donor's copy came first."""
        span, lacked = self._spans[number], number not in self.plan.here
        actions = self.plan.fetched(donor, number, _now())
        if lacked and number in self.plan.here:
            await self._work(self._pieces.store, span, piece)
            self._taken(donor, span.size)
        return actions

    async def _lose(self, donor: PeerId, broke: RemoteError | None = None) -> list[Action]:
        if donor == self._giver:
            self.failure = broke
        self.plan.lost(donor)
        return self.plan.act(_now())

    def _all_channels(self) -> list[_DonorChannel]:
        return [*self._channels.values(), *self._comparison_channels.values()]


class _DonorChannel:
    """Sequential requests to one donor, over a stream that is opened when needed."""

    def __init__(self, dial: Callable[[], Awaitable[Link]], accepted: Link | None = None) -> None:
        self._dial = dial
        self._link = accepted
        self._asking = asyncio.Lock()
        self._asked_at = _now()
        self.is_accepted = accepted is not None
        """True while this is the stream on which the donor accepted our request."""

    @property
    def rests_at(self) -> float:
        """Time at which the idle stream is ended; infinity without an idle stream."""
        return float("inf") if self._link is None or self._asking.locked() else self._asked_at + REST_S

    async def ask(self, question: list[Any], size: int) -> bytearray:
        """Send a request and return its response of ``size`` bytes. An ended stream is opened once more.

        Raises NetworkError and RemoteError.
        """
        async with self._asking:
            if self._link is not None:
                with contextlib.suppress(NetworkError):
                    return await self._answer(self._link, question, size)
            self._link = await self._dial()
            return await self._answer(self._link, question, size)

    async def _answer(self, link: Link, question: list[Any], size: int) -> bytearray:
        try:
            await send_message(link, question)
            answer = (await receive_payload(link, [size]))[0]
        except BaseException:  # the rest of this response may still come, so the stream is unusable
            self._link, self.is_accepted = None, False
            with contextlib.suppress(NetworkError):
                await link.close()
            raise
        self._asked_at = _now()
        return answer

    async def end(self) -> None:
        """Tell the donor that we have enough and close the stream, without waiting for a pending response."""
        link, self._link, self.is_accepted = self._link, None, False
        if link is None:
            return
        with contextlib.suppress(NetworkError):
            try:
                if not self._asking.locked():
                    await send_message(link, ["enough"])
            finally:  # no other reference to the link remains
                await link.close()


def _pieces_of(spans: Sequence[Span], fragments: frozenset[int]) -> frozenset[int]:
    return frozenset(number for number, span in enumerate(spans) if span.fragment in fragments)


def _now() -> float:
    return asyncio.get_running_loop().time()
