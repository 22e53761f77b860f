"""Weight server: serves pieces of this peer's weights to newcomers, and sketches to compare with other donors' copies.

Requests and responses alternate on one stream. A newcomer whose request we accepted (``WeightsReply``) uses that
request's stream; others use ``COPIES_PROTOCOL``, a separate protocol, so that a peer without it is merely one donor
fewer. All pieces on a stream are of one snapshot, taken at the first piece; sketches are of the current weights. Both
are rate-limited by their share of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.links import Limits
from p2ptrain.net.payload import send_payload
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter, TokenBucket
from p2ptrain.net.rpc import receive_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, DonorWeights, Link, Opaque
from p2ptrain.swarm.download_plan import Span, cut
from p2ptrain.swarm.rules import GIVEN_BYTES, GIVEN_TO_ONE

COPIES_PROTOCOL = "/p2ptrain/copies/2"

LIMITS = Limits(inbound=12)
"""Limits of the protocol's streams; a newcomer has two, for pieces and for comparisons. Guess: concurrent newcomers per
donor would settle it."""

ACCEPTED_BUDGET = 2.0
"""Whole models that a newcomer may request where we accepted one, since broken pieces are requested again. Guess: the
share of repeated pieces would settle it."""
EACH = RateLimit(burst=3.0, per_s=6.0 / 3600.0)
"""Rate limit of one peer besides that, in whole models: a newcomer takes about a third of a donor's pieces and compares
as many. A peer may catch up as often per hour as a donor accepts its requests (``rules.GIVEN_TO_ONE``)."""
MIN_MODEL = GIVEN_BYTES / GIVEN_TO_ONE
"""Size in bytes below which a model costs less than one, as in ``rules.given_to_one``."""
OVERALL = RateLimit(burst=12.0, per_s=72.0 / 3600.0)
"""Rate limit of all peers in whole models; a sketch of 8 million weights takes .2 s of a core. Guess: a donor's
slowdown by many newcomers would settle it."""
LONGEST_S = 900.0
"""Longest duration of a stream, as long as a download may take (``net.weight_download``). Without it a slow newcomer
would keep old weights in memory forever, also for those that share them."""
MAX_PINNED = 2
"""Most snapshots kept at once besides those for accepted requests, each as large as the weights. A third newcomer
shares the younger one."""
SHARED_S = 60.0
"""Greatest age of a snapshot that is shared. Guess: sketch distances by age of the weights would settle it."""
_MAX_WORDS = 120
_MAX_QUESTION_BYTES = 64


@dataclass(slots=True, eq=False)
class _Pin:
    """Snapshot in use by newcomers."""

    slow: Opaque
    since: float
    askers: int = 0


Keep = Callable[[Opaque], contextlib.AbstractContextManager[Opaque]]
"""Function from the current snapshot to the one to serve, kept until the context ends."""


class WeightServer:
    """Server of this peer's weights.

    Args:
        weights: our learner's.
        work: runs a function off the event loop.
        given: called with each newcomer and the bytes of weights that it took.
        rates: say whether we serve; weights sent on streams of exchanges are counted there.
        counts: returns whether a peer may take part; it may have been banned since its stream began.
        held: the fragments that this peer holds; None: all.
    """

    def __init__(
        self,
        weights: DonorWeights,
        work: Callable[..., Awaitable[Any]],
        clock: Clock,
        given: Callable[[PeerId, int], None] = lambda peer, size: None,
        rates: Throttles | None = None,
        counts: Callable[[PeerId], bool] = lambda peer: True,
        held: frozenset[int] | None = None,
    ) -> None:
        self._counts = counts
        self._held = held
        self._weights = weights
        self._work = work
        self._clock = clock
        self._given = given
        self._rates = rates or Throttles()
        self._spans = cut(weights.weight_sizes())
        self._total = max(sum(weights.weight_sizes()), 1)
        self._rate_limits: RateLimiter[PeerId] = RateLimiter(EACH, OVERALL)
        self._pins: list[_Pin] = []

    async def answer(self, link: Link) -> None:
        """Serve a stream of ``COPIES_PROTOCOL`` until its initiator has enough. Raises NetworkError and RemoteError.

        When others have used their share of the monthly budget, sketches are still served: they are small and protect
        newcomers.
        """

        def admits(span: Span, is_piece: bool) -> bool:
            if self._rates.rests or (is_piece and not self._rates.gives):
                raise NetworkError(f"{short(link.peer)} asked for weights, but this peer is not serving any")
            return self._rate_limits.admits(link.peer, self._clock(), span.size / max(self._total, MIN_MODEL))

        await self._serve(link, admits, self._pinned, self._clock() + LONGEST_S)

    async def give(self, link: Link) -> int:
        """Serve a newcomer whose request we accepted until it has enough; return the bytes of weights that it took.

        Raises NetworkError and RemoteError.
        """
        accepted = TokenBucket(RateLimit(ACCEPTED_BUDGET, 0.0), self._clock())

        def admits(span: Span, is_piece: bool) -> bool:
            is_due = accepted.take(self._clock(), span.size / self._total)
            self._rates.give(span.size if is_due and is_piece else 0)
            return is_due

        return await self._serve(link, admits, contextlib.nullcontext, math.inf)  # the core has its own deadline

    async def _serve(self, link: Link, admits: Callable[[Span, bool], bool], keep: Keep, until: float) -> int:
        sent = 0
        try:
            with contextlib.ExitStack() as stack:
                kept: Opaque | None = None
                while (question := await self._question(link)) is not None:
                    span, seed = question
                    if self._held is not None and span.fragment not in self._held:
                        raise NetworkError(f"{short(link.peer)} asked for a fragment that this peer does not hold")
                    if not self._counts(link.peer):
                        raise NetworkError(f"{short(link.peer)} is no longer admitted")
                    if not admits(span, seed is None):
                        raise NetworkError(f"{short(link.peer)} sent too many weight requests")
                    left_s = until - self._clock()
                    if left_s < 0:
                        raise NetworkError(f"{short(link.peer)} kept requesting weights for too long")
                    answer: bytes | memoryview
                    if seed is not None:
                        answer = await self._work(self._weights.sketch, span, seed)
                    else:
                        if kept is None:
                            kept = stack.enter_context(keep(await self._work(self._weights.slow)))
                        answer = await self._work(self._weights.piece, kept, span)
                    try:
                        async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                            await send_payload(link, [answer])
                    except TimeoutError:
                        raise NetworkError(f"{short(link.peer)} took too long to read weights") from None
                    sent += span.size if seed is None else 0
        finally:
            if sent:
                self._given(link.peer, sent)
        return sent

    async def _question(self, link: Link) -> tuple[Span, int | None] | None:
        """Receive a request: a piece, and the seed if it asks for a sketch; None: the newcomer has enough."""
        match await receive_message(link, "weights", _MAX_QUESTION_BYTES):
            case ["sketch", int(piece), int(seed)] if 0 <= piece < len(self._spans) and 0 <= seed < 2**63:
                return self._spans[piece], seed
            case ["piece", int(piece)] if 0 <= piece < len(self._spans):
                return self._spans[piece], None
            case ["enough"]:
                return None
            case other:
                raise RemoteError(f"expected a weight request, got {str(other)[:_MAX_WORDS]}")

    @contextlib.contextmanager
    def _pinned(self, slow: Opaque) -> Iterator[Opaque]:
        """Keep this snapshot for one more newcomer, or share the youngest one if the limit is reached.

        Raises NetworkError if that one is too old to be shared.
        """
        now = self._clock()
        pin = next((pin for pin in self._pins if pin.slow is slow), None)
        if pin is None and len(self._pins) < MAX_PINNED:
            self._pins.append(pin := _Pin(slow, now))
        pin = pin or self._pins[-1]
        if pin.slow is not slow and now - pin.since > SHARED_S:
            raise NetworkError("others are still downloading older weights, and no more versions can be kept")
        pin.askers += 1
        try:
            yield pin.slow
        finally:
            pin.askers -= 1
            if not pin.askers:
                self._pins.remove(pin)
