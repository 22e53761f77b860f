"""A simulator that makes its reports up: for rehearsals of the whole evidence in seconds, and for tests.

Its numbers mean nothing. They depend on the scenario alone, differ between seeds, and look like a run: a loss that
falls, larger H a little worse, fewer bits a little worse.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping
from typing import Any

from bench.evidence.identity import scenario_digest
from bench.evidence.pool import Outcome, Simulate

BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.02, "modular8": 8.03, "int4": 4.25, "modular4": 4.03}
FEW_BITS = 0.3
LOOKS = 8


class InlinePool:
    """A ``run.Workers`` without processes: what is started is simulated when it is asked for, in that order.

    Args:
        simulate: scenario and device -> report.
        workers: how many may be under way.
    """

    def __init__(self, simulate: Simulate, workers: int = 2) -> None:
        self.scenarios: list[Mapping[str, Any]] = []
        """All that were started."""
        self._simulate = simulate
        self._workers = workers
        self._under_way: list[tuple[int, Mapping[str, Any]]] = []

    @property
    def has_room(self) -> bool:
        return len(self._under_way) < self._workers

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def start(self, key: int, scenario: Mapping[str, Any]) -> None:
        self.scenarios.append(scenario)
        self._under_way.append((key, scenario))

    def next(self) -> Outcome:
        key, scenario = self._under_way.pop(0)
        try:
            return Outcome(key, 1.0, self._simulate(scenario, "cpu"))
        except ValueError as error:
            return Outcome(key, 1.0, None, str(error))


def simulate(scenario: Mapping[str, Any], device: str = "cpu") -> Mapping[str, Any]:
    """A made-up report. ValueError for a negative seed; rate 1 with momentum .9 diverges."""
    run, outer = scenario["run"], scenario["outer"]
    if run["seed"] < 0:
        raise ValueError("run.seed: must not be negative")
    noise = random.Random(scenario_digest(scenario)).gauss(0.0, 0.004)
    peers = sum(group["count"] for group in scenario["peers"])
    stream = "gradients" if outer["recipe"] in ("swarm_gradients", "sparseloco", "dilocox") else "name"
    bits = BITS.get(scenario["codec"][stream], FEW_BITS)
    taste = zlib.crc32(str(outer["recipe"]).encode()) % 50 / 1_000
    loss = 1.6 + taste + 0.02 * math.log(outer["inner_steps"]) + 0.05 / bits + 0.01 * math.log(peers) + noise
    loss += 0.1 * abs(outer["learning_rate"] - 0.7) + 0.1 * abs(outer["momentum"] - 0.5)
    diverged = outer["momentum"] >= 0.9 and outer["learning_rate"] >= 1.0
    learns = scenario["learner"]["kind"] == "lm" and not diverged
    end_s = run["tokens_per_peer"] / 128 * max(group["step_s"] for group in scenario["peers"])
    curve = [_point(end_s, look / LOOKS, loss if learns else None, 0.01 + abs(noise)) for look in range(1, LOOKS + 1)]
    figures = {
        "peers": peers,
        "utilization": 0.9,
        "up": {"total": bits * 1e5, "directory": 1e4},
        "down": {"total": bits * 1e5, "directory": 1e4},
        "bits_per_parameter": bits,
        "payload_bits_per_parameter": 0.98 * bits,
        "outer_steps": 300 * peers,
        "exchanges": 300 * peers,
        "exchanges_failed": 3 * peers,
        "offers_declined": 10 * peers,
        "solo_share": 0.05,
    }
    return {
        "scenario": dict(scenario),
        "simulated_s": end_s,
        "overall": figures,
        "groups": {group["name"]: figures for group in scenario["peers"]},
        "curve": curve,
        "cost": {"events_per_s": 5e4},
    }


def _point(end_s: float, share: float, loss: float | None, disagreement: float) -> dict[str, Any]:
    now = None if loss is None else loss + (5.5 - loss) * (1 - share) ** 3
    averaged = None if now is None else now - 0.005
    groups = {"odd": now, "others": now}
    return {
        "time_s": end_s * share,
        "validation": now,
        "validation_of_mean": averaged,
        "disagreement": disagreement,
        "groups": groups,
    }
