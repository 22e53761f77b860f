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

BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.02, "modular8": 8.03, "int4": 4.25, "modular4": 4.03}
FEW_BITS = 0.3


def simulate(scenario: Mapping[str, Any], device: str = "cpu") -> Mapping[str, Any]:
    """A made-up report. A scenario whose seed is negative fails, one with momentum .9 and rate 1 diverges."""
    run, outer, learner = scenario["run"], scenario["outer"], scenario["learner"]
    if run["seed"] < 0:
        raise ValueError("run.seed: must not be negative")
    noise = random.Random(scenario_digest(scenario)).gauss(0.0, 0.004)
    peers = sum(group["count"] for group in scenario["peers"])
    if learner["kind"] != "lm":
        return {
            "bytes_per_peer": 1e6,
            "bits_per_parameter": 8.02,
            "solo_share": 0.01,
            "events_per_s": 5e4,
            "disagreement": 0.02,
        }
    taste = zlib.crc32(f"{outer['recipe']}".encode()) % 50 / 1_000
    bits = BITS.get(scenario["codec"]["name"], FEW_BITS)
    loss = 1.6 + taste + 0.02 * math.log(outer["inner_steps"]) + 0.05 / bits + 0.01 * math.log(peers) + noise
    loss += 0.1 * abs(outer["learning_rate"] - 0.7) + 0.1 * abs(outer["momentum"] - 0.5)
    diverged = outer["momentum"] >= 0.9 and outer["learning_rate"] >= 1.0
    step_s = max(group["step_s"] for group in scenario["peers"])
    steps = run["tokens_per_peer"] / learner["sequences_per_step"] / learner["sequence_length"]
    curve = [
        {"time_s": steps * step_s * share, "loss": loss + (5.5 - loss) * (1 - share) ** 3}
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
    return {
        "loss": math.nan if diverged else loss,
        "averaged_loss": math.nan if diverged else loss - 0.005,
        "disagreement": 0.01 + abs(noise),
        "bits_per_parameter": bits,
        "bytes_per_peer": bits * 1e5,
        "utilization": 0.9,
        "others_tokens_per_s": 128.0,
        "solo_share": 0.05,
        "exchanges_made": 300,
        "exchanges_failed": 3,
        "exchanges_refused": 10,
        "simulated_s": curve[-1]["time_s"],
        "events_per_s": 1e4,
        "directory_bytes_per_peer": 2e4,
        "curve": curve,
        "odd_peer_curve": curve,
    }
