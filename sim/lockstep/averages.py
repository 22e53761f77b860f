"""Cost of averages on a scenario's lines, in seconds and in bytes, without simulating single messages.

::

    ring all-reduce     2 (N-1)/N  m / narrowest line                 +  2 (N-1) latencies
    gathering           m / narrowest up  +  (N-1) m / narrowest down  +  2 latencies
    swap with partners  k m / narrowest line                          +  1 latency

Ring all-reduce: Patarasuk and Yuan, 2009; as many bytes go up as down. Gathering: SparseLoCo's peers upload their
message once to a store that all others read (arXiv 2508.15706); no peer is done before the slowest has uploaded. A
latency is the sum of both sides' ``latency_s``, the largest in the scenario; the store counts as a side.

**Failures.** In an attempt each peer's part fails with probability ``run.failed_exchanges``, independently. All peers
repeat an all-reduce from the start until no part fails: the result is exact, and every attempt costs its full time and
bytes. In a gathering, only peers whose part failed repeat it. After ``MOST_ATTEMPTS`` an average is taken as made and
the report counts it, because a ring of many peers on such lines would never end. Fragments that are averaged one by one
also fail one by one.

Legend: N peers, m bytes of one peer's message, k partners.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

from p2ptrain.recipes import RECIPES, Mix
from sim.scenario import MEGABIT, Scenario

GATHERS = frozenset({"sparseloco"})
"""Recipes whose messages do not add up to one message: every peer gets all of them."""

MOST_ATTEMPTS = 100
"""Most attempts of one average. Guess: failure rates of recorded all-reduces over the internet would settle it."""


@dataclass(frozen=True, slots=True)
class AverageCost:
    """Cost of one average of an outer step for a peer, with all attempts."""

    seconds: float
    """Seconds until the last peer has the average."""
    up_bytes: float
    """Bytes sent, mean of all peers."""
    down_bytes: float
    """Bytes received, mean of all peers."""


class Averages:
    """Computes the costs of the averages of one simulation, and draws which attempts fail.

    Args:
        random: used only if attempts may fail.
    """

    def __init__(self, scenario: Scenario, random: Random) -> None:
        outer, groups = scenario.outer, scenario.peers
        self._peers = scenario.total_peers
        self._partners = outer.partners
        self._fragments = outer.fragments if RECIPES[outer.recipe].delay == "inner_steps" else 1
        self._gathers = outer.recipe in GATHERS
        self._failing = scenario.run.failed_exchanges
        self._random = random
        self._up = min(group.up_mbit_s or inf for group in groups) * MEGABIT
        self._down = min(group.down_mbit_s or inf for group in groups) * MEGABIT
        self._latency_s = 2 * max(group.latency_s for group in groups)
        self._repeated = self._given_up = 0

    def cost(self, mix: Mix, message_bytes: float) -> AverageCost:
        """Return the cost of one outer step's average of this stream.

        Args:
            message_bytes: m, of all fragments together.
        """
        if self._peers == 1:
            return AverageCost(0.0, 0.0, 0.0)
        if mix.who != "all":
            swapped = self._partners * message_bytes
            return AverageCost(swapped / min(self._up, self._down) + self._latency_s, swapped, swapped)
        drawn = [self._attempts() for _ in range(self._fragments)]
        rounds, parts = (sum(each) / self._fragments for each in zip(*drawn, strict=True))
        others = self._peers - 1
        if self._gathers:
            seconds = message_bytes / self._up + others * message_bytes / self._down + 2 * self._latency_s
            return AverageCost(rounds * seconds, parts * message_bytes, parts * others * message_bytes)
        passed = 2 * others / self._peers * message_bytes
        seconds = passed / min(self._up, self._down) + 2 * others * self._latency_s
        return AverageCost(rounds * seconds, parts * passed, parts * passed)

    def notes(self) -> dict[str, int]:
        """Return the number of failed attempts, and of averages that failed in every attempt."""
        counts = {
            "averages that failed and were made again": self._repeated,
            f"averages taken as made after {MOST_ATTEMPTS} attempts": self._given_up,
        }
        return {note: count for note, count in counts.items() if count}

    def _attempts(self) -> tuple[int, float]:
        """Draw attempts until one average is made; return their number and how many a peer takes part in, mean."""
        parts, missing = 0, self._peers
        for attempt in range(1, MOST_ATTEMPTS + 1):
            parts += missing
            failed = sum(self._random.random() < self._failing for _ in range(missing)) if self._failing else 0
            if not failed:
                break
            if attempt == MOST_ATTEMPTS:
                self._given_up += 1
            else:
                self._repeated += 1
            missing = failed if self._gathers else self._peers
        return attempt, parts / self._peers
