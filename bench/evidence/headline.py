"""Conversion of the simulator's report to the numbers that are kept.

All numbers are finite. A run that diverged has no loss but ``diverged`` = 1.

===============================  ======================================================================================
loss                             nats per token on the cell's split, mean over the peers' weights at the end of training
averaged_loss                    loss of the mean of all weights
disagreement                     mean of |x_i - mean| / |mean| at the end of training
bits_per_parameter               all bits that a peer sends in an outer step, per parameter of the model
payload_bits_per_parameter       payload only: without frames, offers and directory
bytes_per_peer                   bytes that a peer sends in the whole run
utilization                      share of time that a peer computes, mean over peers
others_utilization               utilization of all peers except the one with the slow line
solo_share                       share of outer steps without any exchange
exchanges, _failed, _declined    mean over peers
exchanges_per_outer_step         mean over peers; exchanges started and answered both count
simulated_s                      simulated seconds from start to end
seconds_to:L                     simulated seconds until the mean loss is at most L nats, for a ladder of losses
fast_seconds_to:L, slow_ …       seconds_to:L of the fastest and of the slowest peers; of all peers if speeds are equal
===============================  ======================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.evidence.scenario import FAST, OTHERS, SLOW

LADDER = (3.0, 2.75, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 1.95, 1.9, 1.85, 1.8, 1.75, 1.7, 1.65, 1.6, 1.55, 1.5)
"""Losses whose times are kept instead of whole curves."""


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a report by name, rounded to six significant digits."""
    overall, curve = report["overall"], report["curve"]
    last = curve[-1] if curve else {}
    peers = max(1, overall["peers"])
    found = {
        "loss": last.get("validation"),
        "averaged_loss": last.get("validation_of_mean"),
        "disagreement": last.get("disagreement"),
        "bits_per_parameter": overall["bits_per_parameter"],
        "payload_bits_per_parameter": overall["payload_bits_per_parameter"],
        "bytes_per_peer": overall["up"]["total"],
        "utilization": overall["utilization"],
        "others_utilization": report["groups"].get(OTHERS, overall)["utilization"],
        "solo_share": overall["solo_share"],
        "exchanges": overall["exchanges"] / peers,
        "exchanges_failed": overall["exchanges_failed"] / peers,
        "exchanges_per_outer_step": overall["exchanges"] / max(1, overall["outer_steps"]),
        "exchanges_declined": overall["offers_declined"] / peers,
        "simulated_s": report["simulated_s"],
    }
    found |= {f"seconds_to:{rung}": at for rung, at in times_to(_points(curve, None))}
    for group in (FAST, SLOW):
        found |= {f"{group}_seconds_to:{rung}": at for rung, at in times_to(_points(curve, group))}
    kept = {name: float(f"{each:.6g}") for name, each in found.items() if each is not None and math.isfinite(each)}
    return kept if "loss" in kept else {**kept, "diverged": 1.0}


def times_to(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Yield each rung of the ladder that a curve of (seconds, loss) reaches, and when.

    Times are interpolated linearly, so that they depend little on how often a run was evaluated.
    """
    for rung in LADDER:
        before: tuple[float, float] | None = None
        for time_s, loss in points:
            if loss <= rung:
                share = 1.0 if before is None else (before[1] - rung) / (before[1] - loss)
                yield rung, time_s if before is None else before[0] + share * (time_s - before[0])
                break
            before = time_s, loss


def _points(curve: Sequence[Mapping[str, Any]], group: str | None) -> list[tuple[float, float]]:
    """Return seconds and losses of all peers or of one group.

    The last point is left out: it is evaluated on the whole split and the others on a part of it.
    """
    pairs = [
        (point["time_s"], point["validation"] if group is None else point["groups"].get(group, point["validation"]))
        for point in curve[:-1]
    ]
    return [(time_s, loss) for time_s, loss in pairs if loss is not None]
