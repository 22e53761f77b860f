"""Short reasons instead of p2pd's errors, for people. The event log keeps p2pd's own words.

p2pd reports a failed dial as ``failed to dial: failed to dial ID: all dials failed * [address] reason * [address]
reason``, and each reason may name the address again. docs/ERRORS.md explains the short reasons.

It reports the cause of a failed dial once, to the request that caused the dial. For the next seconds to minutes it
answers "dial backoff" to every request for that address; ``BackoffReasons`` adds the cause.
"""

from __future__ import annotations

import re

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import steady
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.ports import Clock

MAX_NAMED = 3
"""Most addresses that are named with one reason. Guess: count the addresses of real peers."""
BACKOFF = "dial backoff"
MAX_REMEMBERED = 1024
"""Most recently failed addresses. Guess: count the addresses dialed during one backoff in a full swarm."""
LONGEST_S = 300.0
"""Longest backoff of p2pd (``BackoffMax`` in go-libp2p's swarm); an older failure is not the cause."""
MAX_LETTERS = 400
"""Longest reason, which the other side may influence. Guess: measure p2pd's own messages; twice the longest."""

_ATTEMPT = re.compile(r"\* \[([^\]\s]+)\] (.*?)(?=\s*\* \[|$)", re.DOTALL)
_SHORT = {
    "connection refused": "connection refused",
    "peer id mismatch": "another node answers",
    "i/o timeout": "no answer",
    "no route to host": "no route to it",
    "network is unreachable": "not reachable from this network",
    "connection reset by peer": "it closed the connection",
    "NO_RESERVATION": "no longer at this relay",
    "RESOURCE_LIMIT_EXCEEDED": "the relay is full",
    "CONNECTION_FAILED": "the relay cannot reach it",
    "context deadline exceeded": "connected, but then no answer",
    "dial backoff": "failed moments ago, not retried yet",
    "failed to find any peer in table": "no address of it is known",
    "protocols not supported": "it takes no part in exchanges now, or has another version",
}
"""Parts of p2pd's reasons, and their short forms; the first match counts. Source: go-libp2p, its circuit relay, Go's
package net, errno(3)."""


def short_reason(error: str) -> str:
    """Return a short form of a NetworkError's text, or of several separated by "; ".

    Text that is not p2pd's is unchanged.
    """
    return "; ".join(dict.fromkeys(map(_one, error.split("; "))))


def _one(error: str) -> str:
    if not error.startswith("failed to "):
        return error
    places: dict[str, dict[str, None]] = {}
    for place, reason in _ATTEMPT.findall(error):
        places.setdefault(_phrase(reason), {})[_name(place)] = None
    return "; ".join(f"{reason} ({_listed(list(named))})" for reason, named in places.items()) or _phrase(error)


def _phrase(reason: str) -> str:
    last = reason.removeprefix("dial backoff after: ")
    return next((short for words, short in _SHORT.items() if words in last), last)


def _name(place: str) -> str:
    relay, circuit, _ = place.partition("/p2p-circuit")
    return ("relay " if circuit else "") + address.host_port(relay)


def _listed(places: list[str]) -> str:
    more = len(places) - MAX_NAMED
    return ", ".join(places[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


class BackoffReasons:
    """The last failure of each address of each peer, and its time."""

    def __init__(self, clock: Clock = steady) -> None:
        self._clock = clock
        self._heard: BoundedDict[tuple[PeerId, str], tuple[str, float]] = BoundedDict(MAX_REMEMBERED)

    def completed(self, peer: PeerId, words: str) -> str:
        """Return p2pd's error (``… * [address] reason * [address] reason``) with the cause of each backoff added.

        A known cause turns ``dial backoff`` into ``dial backoff after: reason``.
        """
        return _ATTEMPT.sub(lambda match: self._with_reason(peer, match[1], match[2]), words)

    def forget(self, peer: PeerId) -> None:
        """Drop all failures of a peer that was reached."""
        for key in [each for each in self._heard if each[0] == peer]:
            del self._heard[key]

    def _with_reason(self, peer: PeerId, place: str, reason: str) -> str:
        key = peer, place
        if reason == BACKOFF:
            before, at = self._heard.get(key, ("", -LONGEST_S))
            is_why = before and self._clock() - at <= LONGEST_S
            return f"* [{place}] {BACKOFF}" + (f" after: {before}" if is_why else "")
        self._heard[key] = reason[:MAX_LETTERS], self._clock()
        return f"* [{place}] {reason}"
