"""Our copy of the weights, for newcomers to compare with what a donor gave them, and to take pieces of.

A protocol of its own (docs/PROTOCOL.md), so that a peer that does not speak it is one fewer to compare with and nothing
worse. One question a stream: the sketch of a fragment (``train.sketch``) or the fragment itself, of the slow weights as
they are now. Both cost us something, so both are rationed (``rate_limiter``).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch

from p2ptrain.errors import NetworkError, RemoteError
from p2ptrain.ids import PeerId, short
from p2ptrain.net.links import Limits
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.rate_limiter import Allowance, RateLimiter
from p2ptrain.net.talk import hear, say
from p2ptrain.ports import Clock, Link, Notebook
from p2ptrain.swarm.pieces import Action, Cancel, Compare, Fetch, Gathering
from p2ptrain.train.payloads import Payloads
from p2ptrain.train.sketch import SKETCH_BYTES, distance, sketch

COPIES_PROTOCOL = "/p2ptrain/copies/1"

LIMITS = Limits(inbound=12)
"""One newcomer may ask for several fragments at once. A guess."""

EACH = Allowance(burst=128.0, per_s=0.1)
"""Answers to one peer: a newcomer asks a donor for about one in two of its fragments. A guess."""
OVERALL = Allowance(burst=512.0, per_s=1.0)
"""To all together: a sketch of 8 million weights takes .2 s of a core. A guess."""
SKETCH_DEADLINE_S = 60.0
"""For a comparison, dialing included; a busy machine sketches a large fragment within it. A guess."""
_MAX_WORDS = 120
_MAX_QUESTION_BYTES = 64


Dial = Callable[[PeerId, Sequence[str]], Awaitable[Link]]


class Copies:
    """Answers others.

    Args:
        payloads: of our learner.
        work: runs a function off the loop.
    """

    def __init__(self, payloads: Payloads, work: Callable[..., Awaitable[Any]], clock: Clock) -> None:
        self._payloads = payloads
        self._work = work
        self._clock = clock
        self._rations: RateLimiter[PeerId] = RateLimiter(EACH, OVERALL)

    async def answer(self, link: Link) -> None:
        """One question. Raises NetworkError and RemoteError."""
        slow = self._payloads.published.slow
        match await hear(link, "copies", _MAX_QUESTION_BYTES):
            case ["sketch", int(fragment), int(seed)] if 0 <= fragment < len(slow) and 0 <= seed < 2**63:
                self._ration(link.peer)
                await send_payload(link, [await self._work(sketch, slow[fragment], seed)])
            case ["piece", int(fragment)] if 0 <= fragment < len(slow):
                self._ration(link.peer)
                await send_payload(link, [slow[fragment].numpy().data])  # never written to: no copy is needed
            case other:
                raise RemoteError(f"a question about copies was due, not {str(other)[:_MAX_WORDS]}")

    def _ration(self, peer: PeerId) -> None:
        if not self._rations.admits(peer, self._clock()):
            raise NetworkError(f"{short(peer)} asked for copies too often")


class Gatherer:
    """Performs what a ``Gathering`` asks for. Each call owns its tasks, and ends them before it returns.

    Args:
        dial: opens a link to a peer's ``Copies``.
        sizes: bytes of each fragment in fp32.
        work: runs a function off the loop.
        notebook: told where nobody could be asked.
    """

    def __init__(
        self, dial: Dial, sizes: Sequence[int], work: Callable[..., Awaitable[Any]], notebook: Notebook
    ) -> None:
        self._dial = dial
        self._sizes = tuple(sizes)
        self._work = work
        self._notebook = notebook

    async def complete(
        self, giver: PeerId, parts: Sequence[bytearray], others: Mapping[PeerId, Sequence[str]]
    ) -> list[bytearray]:
        """All parts of a model of which a donor gave the first ones, or all, believed by others where any can be asked.

        Args:
            others: whom to ask, and their addresses.

        Raises:
            RemoteError: others' weights are near each other's and far from the donor's.
            NetworkError: what the donor did not give is not to be had, or it is one's word against another's.
        """
        others = {peer: places for peer, places in others.items() if peer != giver}
        here = dict(enumerate(parts))
        gathering = Gathering(self._sizes, list(others), dict.fromkeys(here, giver))
        loop = asyncio.get_running_loop()
        outcomes: asyncio.Queue[Callable[[], list[Action]]] = asyncio.Queue()
        running: dict[tuple[PeerId, int], asyncio.Task[None]] = {}

        async def perform(action: Fetch | Compare) -> None:
            donor, number = action.donor, action.piece
            try:
                if isinstance(action, Fetch):
                    async with asyncio.timeout_at(action.deadline):
                        part = await self._ask(donor, others[donor], ["piece", number], self._sizes[number])
                    outcomes.put_nowait(lambda: _take(gathering, here, donor, number, part))
                else:
                    async with asyncio.timeout(SKETCH_DEADLINE_S):
                        far = await self._compare(donor, others[donor], number, here[number])
                    outcomes.put_nowait(lambda: gathering.compared(donor, number, far, loop.time()))
            except (NetworkError, RemoteError, TimeoutError):
                outcomes.put_nowait(lambda: _lose(gathering, donor))

        async with asyncio.TaskGroup() as tasks:
            actions = gathering.act(loop.time())
            while True:
                for action in actions:
                    place = action.donor, action.piece
                    if (task := running.pop(place, None)) is not None:
                        task.cancel()
                    if not isinstance(action, Cancel):
                        running[place] = tasks.create_task(perform(action))
                if gathering.is_done or gathering.is_stuck:
                    break
                try:
                    async with asyncio.timeout_at(gathering.next_deadline(loop.time())):
                        outcome = await outcomes.get()
                except TimeoutError:
                    actions = gathering.act(loop.time())
                else:
                    actions = outcome()
            for task in running.values():
                task.cancel()
        return self._judged(gathering, giver, here)

    def _judged(self, gathering: Gathering, giver: PeerId, here: Mapping[int, bytearray]) -> list[bytearray]:
        if giver in gathering.dropped:
            raise RemoteError("its weights are far from those of others")
        if not gathering.is_done:
            if gathering.is_disputed:
                raise NetworkError(f"the weights of {short(giver)} and of others are far apart")
            if len(gathering.here) < len(self._sizes):
                raise NetworkError(f"{short(giver)} broke off, and nobody else gave the rest of the weights")
            self._notebook.note("unconfirmed", peer=giver, why="nobody else could be asked for its copy")
        return [here[number] for number in range(len(self._sizes))]

    async def _compare(self, donor: PeerId, addresses: Sequence[str], number: int, part: bytearray) -> float:
        seed = secrets.randbits(63)
        theirs = await self._ask(donor, addresses, ["sketch", number, seed], SKETCH_BYTES)
        mine = await self._work(sketch, torch.frombuffer(part, dtype=torch.float32), seed)
        return distance(mine, bytes(theirs))

    async def _ask(self, donor: PeerId, addresses: Sequence[str], question: list[Any], size: int) -> bytearray:
        link = await self._dial(donor, addresses)
        try:
            await say(link, question)
            return (await receive_payload(link, [size]))[0]
        finally:
            await link.close()


def _take(
    gathering: Gathering, here: dict[int, bytearray], donor: PeerId, number: int, part: bytearray
) -> list[Action]:
    """Keep a piece, if it is the first of two to come."""
    lacked = number not in gathering.here
    actions = gathering.fetched(donor, number, asyncio.get_running_loop().time())
    if lacked and number in gathering.here:
        here[number] = part
    return actions


def _lose(gathering: Gathering, donor: PeerId) -> list[Action]:
    gathering.lost(donor)
    return gathering.act(asyncio.get_running_loop().time())
