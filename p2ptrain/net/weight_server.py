"""Our copy of the weights, for newcomers to take pieces of, and to compare with what others gave them.

A talk of questions and answers on one stream. Whoever was promised our weights (``WeightsReply``) asks on the stream of
that promise; anybody else on ``COPIES_PROTOCOL``, a protocol of its own, so that a peer that does not speak it is one
fewer to ask and nothing worse. All pieces on a stream are of one snapshot, the one at the first that is asked for;
sketches are of the weights that we have right then. Both cost us something, so they are rationed: by what share of the
weights they are of.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.links import Limits
from p2ptrain.net.payload import send_payload
from p2ptrain.net.rate_limiter import RateLimit, RateLimiter, TokenBucket
from p2ptrain.net.rpc import hear
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, Link
from p2ptrain.swarm.download_plan import Span, cut
from p2ptrain.swarm.rules import GIVEN_BYTES, GIVEN_TO_ONE
from p2ptrain.train.payloads import Payloads
from p2ptrain.train.sketch import sketch

COPIES_PROTOCOL = "/p2ptrain/copies/2"

LIMITS = Limits(inbound=12)
"""One newcomer has two streams here, one for pieces and one for comparisons. A guess."""

PROMISED = 2.0
"""Whole models that may be asked for where we promised one: pieces that came broken are asked for again. A guess."""
EACH = RateLimit(burst=3.0, per_s=6.0 / 3600.0)
"""Whole models of one peer beyond that: a newcomer takes about a third of a donor's pieces, and compares as many. It
may catch up as often within an hour as a donor promises its weights (``rules.GIVEN_TO_ONE``)."""
LEAST_MODEL = GIVEN_BYTES / GIVEN_TO_ONE
"""A smaller one counts by its bytes, as ``rules.given_to_one`` has it."""
OVERALL = RateLimit(burst=12.0, per_s=72.0 / 3600.0)
"""To all together; a sketch of 8 million weights takes .2 s of a core. A guess."""
LONGEST_S = 900.0
"""A stream, or whoever takes a small piece now and then would be given old weights for ever, and with it whoever shares
them. As long as a pull may take (``net.weight_download``)."""
MOST_PINNED = 2
"""Snapshots kept at once for those whom we promised nothing, each as large as the weights. Who comes third shares the
younger one, ..."""
SHARED_S = 60.0
"""... if it is no older than this. A guess. Whom we promised our weights takes a snapshot of its own, one at a time."""
_MAX_WORDS = 120
_MAX_QUESTION_BYTES = 64


@dataclass(slots=True, eq=False)  # of tensors, which have no truth value when they are compared
class _Pin:
    """A snapshot that somebody is taking."""

    slow: Sequence[Tensor]
    since: float
    askers: int = 0


Keep = Callable[[Sequence[Tensor]], contextlib.AbstractContextManager[Sequence[Tensor]]]
"""Which snapshot an asker takes pieces of, by the one that we have; kept until it has enough."""


class WeightServer:
    """Answers others.

    Args:
        payloads: of our learner.
        work: runs a function off the loop.
        given: told how many bytes of weights somebody took.
        rates: whether we give. To whom a transport of exchanges leads, what it takes is counted here.
        counts: whether somebody may take part: it may have been banned since its stream began.
    """

    def __init__(
        self,
        payloads: Payloads,
        work: Callable[..., Awaitable[Any]],
        clock: Clock,
        given: Callable[[PeerId, int], None] = lambda peer, size: None,
        rates: Throttles | None = None,
        counts: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        self._counts = counts
        self._payloads = payloads
        self._work = work
        self._clock = clock
        self._given = given
        self._rates = rates or Throttles()
        self._spans = cut(payloads.weight_sizes())
        self._total = max(sum(payloads.weight_sizes()), 1)
        self._rations: RateLimiter[PeerId] = RateLimiter(EACH, OVERALL)
        self._pins: list[_Pin] = []

    async def answer(self, link: Link) -> None:
        """Serve a stream of ``COPIES_PROTOCOL`` until its opener has enough. Raises NetworkError, RemoteError.

        Once others have had their share of the month it still compares: sketches are small, and defend newcomers.
        """

        def admits(span: Span, is_piece: bool) -> bool:
            if self._rates.rests or (is_piece and not self._rates.gives):
                raise NetworkError(f"{short(link.peer)} asked for weights while we give none")
            return self._rations.admits(link.peer, self._clock(), span.size / max(self._total, LEAST_MODEL))

        await self._serve(link, admits, self._pinned, self._clock() + LONGEST_S)

    async def give(self, link: Link) -> int:
        """Serve whom we promised our weights, until it has enough; how many bytes of them it took.

        Raises NetworkError, RemoteError.
        """
        promised = TokenBucket(RateLimit(PROMISED, 0.0), self._clock())

        def admits(span: Span, is_piece: bool) -> bool:
            is_due = promised.take(self._clock(), span.size / self._total)
            self._rates.give(span.size if is_due and is_piece else 0)
            return is_due

        return await self._serve(link, admits, contextlib.nullcontext, math.inf)  # the promise has its own end

    async def _serve(self, link: Link, admits: Callable[[Span, bool], bool], keep: Keep, until: float) -> int:
        sent = 0
        try:
            with contextlib.ExitStack() as stack:
                kept: Sequence[Tensor] | None = None
                while (question := await self._question(link)) is not None:
                    span, seed = question
                    if not self._counts(link.peer):
                        raise NetworkError(f"{short(link.peer)} may not take part any more")
                    if not admits(span, seed is None):
                        raise NetworkError(f"{short(link.peer)} asked for copies too often")
                    left_s = until - self._clock()
                    if left_s < 0:
                        raise NetworkError(f"{short(link.peer)} asked for copies for too long")
                    answer: bytes | memoryview
                    if seed is not None:
                        answer = await self._sketch(span, seed)
                    else:
                        if kept is None:
                            kept = stack.enter_context(keep(await self._work(self._payloads.slow)))
                        answer = _lying_in(kept, span).numpy().data  # nobody writes to it: no copy
                    try:
                        async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                            await send_payload(link, [answer])
                    except TimeoutError:
                        raise NetworkError(f"{short(link.peer)} took copies for too long") from None
                    sent += span.size if seed is None else 0
        finally:
            if sent:
                self._given(link.peer, sent)
        return sent

    async def _sketch(self, span: Span, seed: int) -> bytes:
        """Of the weights that we have right now, which nobody keeps while it is sent."""
        made: bytes = await self._work(lambda: sketch(_lying_in(self._payloads.slow(), span), seed))
        return made

    async def _question(self, link: Link) -> tuple[Span, int | None] | None:
        """Which piece is asked for, or is to be sketched with which seed; None: it has enough."""
        match await hear(link, "copies", _MAX_QUESTION_BYTES):
            case ["sketch", int(piece), int(seed)] if 0 <= piece < len(self._spans) and 0 <= seed < 2**63:
                return self._spans[piece], seed
            case ["piece", int(piece)] if 0 <= piece < len(self._spans):
                return self._spans[piece], None
            case ["enough"]:
                return None
            case other:
                raise RemoteError(f"a question about copies was due, not {str(other)[:_MAX_WORDS]}")

    @contextlib.contextmanager
    def _pinned(self, slow: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Keep this snapshot for one more asker; or the youngest kept, if there are as many as may be.

        Raises NetworkError where that one is too old to be shared.
        """
        now = self._clock()
        pin = next((pin for pin in self._pins if pin.slow is slow), None)
        if pin is None and len(self._pins) < MOST_PINNED:
            self._pins.append(pin := _Pin(slow, now))
        pin = pin or self._pins[-1]
        if pin.slow is not slow and now - pin.since > SHARED_S:
            raise NetworkError("others are taking older weights, and no more can be kept for them")
        pin.askers += 1
        try:
            yield pin.slow
        finally:
            pin.askers -= 1
            if not pin.askers:
                self._pins.remove(pin)


def _lying_in(slow: Sequence[Tensor], span: Span) -> Tensor:
    """[n] fp32 one piece of a model; a view."""
    return slow[span.fragment][span.start // 4 : span.stop // 4]
