"""Simulator with invented reports. They depend on the scenario alone and look like a run with a falling loss."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from bench.evidence.run import digest

BITS = 32.0
LOOKS = 8


def simulate(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a report of a scenario; the loss is best at learning rates of .012 (inner) and .7 and momentum .6."""
    outer, peers = wanted["outer"], sum(group["count"] for group in wanted["peers"])
    noise = random.Random(digest(wanted)).gauss(0.0, 0.001)
    loss = 1.6 + noise + 0.1 * abs(outer["learning_rate"] - 0.7) + 0.1 * abs(outer["momentum"] - 0.6)
    loss += 10 * abs(wanted["learner"]["learning_rate"] - 0.012)
    end_s = wanted["run"]["tokens"] / (128 * peers)
    figures = {
        "peers": peers,
        "utilization": 0.9,
        "up": {"total": BITS * 1e5},
        "bits_per_parameter": BITS,
        "payload_bits_per_parameter": 0.98 * BITS,
        "outer_steps": 300 * peers,
        "exchanges": 300 * peers,
        "exchanges_failed": 3 * peers,
        "offers_declined": 10 * peers,
        "solo_share": 0.05,
    }
    return {
        "scenario": dict(wanted),
        "simulated_s": end_s,
        "overall": figures,
        "groups": {group["name"]: figures for group in wanted["peers"]},
        "curve": [_point(end_s, look / LOOKS, loss) for look in range(1, LOOKS + 1)],
    }


def _point(end_s: float, share: float, loss: float) -> dict[str, Any]:
    now = loss + (5.5 - loss) * (1 - share) ** 3
    return {
        "time_s": end_s * share,
        "validation": now,
        "validation_of_mean": now - 0.005,
        "disagreement": 0.01,
        "groups": {"fast": now, "slow": now + 0.1},
    }
