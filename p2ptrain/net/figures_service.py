"""Figures protocol: a peer sends its own figures to monitors of the swarm; one request and one response.

::

    ["figures", serial]        ["figures", [[name, value], …], news since that serial]  or  ["kept"]

    news: ["exchange", serial, at, partner, seconds, bytes, distance, path]
          ["failure", serial, at, line]
          ["checkpoint", serial, at, step]

Peers whose owners did not agree answer "kept". The protocol is separate from exchanges and best effort; figures are
unverified, shown to people and used for nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net.links import Limits, origin_of
from p2ptrain.net.rate_limiter import SlidingWindowLimit
from p2ptrain.net.rpc import receive_message, request, send_message
from p2ptrain.ports import Clock, Link, Transport

FIGURES_PROTOCOL = "/p2ptrain/figures/1"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=1)
"""A response has a few kilobytes. Guess: the number of monitors per peer would settle it."""
DEADLINE_S = 10.0
"""Timeout of a request and its response, dialing included. Guess: response times over relays would settle it."""
_ABOUT = "figures"
MAX_ANSWER_BYTES = 32 << 10
MAX_FIELDS = 64
"""Most fields of a row, more than any peer has."""
MAX_TOLD = 64
"""Most news in one response: a minute of a fast peer."""

Telling = Callable[[int], tuple[dict[str, Any], list[list[Any]]]]
"""Function from a serial number to our row and the news since then, oldest first."""


@dataclass(slots=True)
class FiguresService:
    """Request handler of the figures protocol.

    Args:
        telling: returns the source of our figures; None if the owner does not share them.
    """

    telling: Callable[[], Telling | None]
    clock: Clock = time.monotonic
    _allowance: SlidingWindowLimit = field(
        default_factory=lambda: SlidingWindowLimit(overall=120, each=40, window_s=60.0)
    )
    """Rate limit; a monitor asks every 3 s (``bootstrap.swarm_view``), half of its limit. Guess: the number of monitors
    per peer would settle it."""

    async def answer(self, link: Link) -> None:
        """Answer one request, over any link. Raises NetworkError and RemoteError."""
        match await receive_message(link, _ABOUT, 64):
            case ["figures", int(serial)]:
                pass
            case _:
                raise RemoteError("expected a request for figures, got something else")
        if not self._allowance.take(link.peer, self.clock(), origin_of(link)):
            raise NetworkError(f"{short(link.peer)} sent too many requests for figures")
        telling = self.telling()
        if telling is None:
            await send_message(link, ["kept"])
        else:
            row, news = telling(serial)
            known = [[name, value] for name, value in row.items() if value is not None]
            await send_message(link, ["figures", known, news[-MAX_TOLD:]])
        await link.close()


async def ask_figures(
    transport: Transport, peer: PeerId, addresses: Sequence[str], serial: int
) -> tuple[dict[str, Any], list[Any]] | None:
    """Ask a peer for its row and its news since ``serial``, unverified; None if its owner does not share them.

    Raises NetworkError and RemoteError.
    """
    question = ["figures", serial]
    match await request(
        transport, peer, addresses, question, about=_ABOUT, most_bytes=MAX_ANSWER_BYTES, deadline_s=DEADLINE_S
    ):
        case ["figures", list(row), list(news)] if all(map(_is_pair, row[:MAX_FIELDS])):
            return dict(row[:MAX_FIELDS]), news[:MAX_TOLD]
        case ["kept"]:
            return None
        case _:
            raise RemoteError("expected figures, got something else")


def _is_pair(field: object) -> bool:
    return isinstance(field, list) and len(field) == 2 and isinstance(field[0], str)
