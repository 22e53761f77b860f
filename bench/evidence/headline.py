"""From the simulator's report to the few numbers that are kept. The one place that knows the report's layout.

Every number is finite, or it is not there: a run that diverged has no loss, and ``diverged`` in its place.

===========================  ==========================================================================================
loss                         nats a token on the cell's split, mean over the peers' own weights at the end of training
averaged_loss                the same for the mean of all weights
disagreement                 mean of |x_i - mean| / |mean| at the end of training
bits_per_parameter           sent by a peer in an outer step, everything counted, per parameter of the model
payload_bits_per_parameter   of this, fragments in exchanges: without frames, offers and the directory
bytes_per_peer               sent by a peer in the whole run
utilization                  share of its time that a peer computes, mean
others_utilization           the same for all but the odd peer out
solo_share                   outer steps that no exchange entered, of all
exchanges, _failed, _declined   mean of a peer
exchanges_per_outer_step     mean of a peer; one that it asked for and one that it answered are two
simulated_s                  simulated seconds from start to end
seconds_to:L                 simulated seconds until the mean loss first was L nats or less, for a ladder of L
fast_seconds_to:L            the same for the odd peer's own weights; where all are alike, for all
events_per_s                 events of the simulator a second of real time
directory_bytes_per_peer     sent and received for presence in the directory, mean of a peer
===========================  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.evidence.scenario import ODD, OTHERS

LADDER = (3.0, 2.75, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 1.95, 1.9, 1.85, 1.8, 1.75, 1.7, 1.65, 1.6, 1.55, 1.5)
"""Losses whose times are kept, in place of whole curves."""


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a report has, by name."""
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
        "events_per_s": report["cost"]["events_per_s"],
        "directory_bytes_per_peer": overall["up"]["directory"] + overall["down"]["directory"],
    }
    found |= {f"seconds_to:{rung}": at for rung, at in times_to(_points(curve, None))}
    found |= {f"fast_seconds_to:{rung}": at for rung, at in times_to(_points(curve, ODD))}
    kept = {name: _rounded(float(each)) for name, each in found.items() if each is not None and math.isfinite(each)}
    learns_language = report["scenario"]["learner"]["kind"] == "lm"
    return {**kept, "diverged": 1.0} if learns_language and "loss" not in kept else kept


def times_to(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """For each rung of the ladder that a curve of (seconds, loss) reaches: the rung, and when.

    Between two points the loss is taken to fall in a straight line, so that two runs are not told apart by how often
    they were looked at.
    """
    for rung in LADDER:
        before: tuple[float, float] | None = None
        for time_s, loss in points:
            if loss <= rung:
                yield rung, time_s if before is None else _between(before, (time_s, loss), rung)
                break
            before = time_s, loss


def _between(before: tuple[float, float], after: tuple[float, float], rung: float) -> float:
    share = (before[1] - rung) / (before[1] - after[1])
    return before[0] + share * (after[0] - before[0])


def _points(curve: Sequence[Mapping[str, Any]], group: str | None) -> list[tuple[float, float]]:
    """Seconds and losses; of one group where it is named. Without the last point, unless it is the only one: it is
    judged on the whole split and all others on a part of it, so that the two do not make one curve."""
    pairs = [
        (point["time_s"], point["validation"] if group is None else point["groups"].get(group, point["validation"]))
        for point in (curve[:-1] or curve)
    ]
    return [(time_s, loss) for time_s, loss in pairs if loss is not None]


def _rounded(number: float) -> float:
    """To six significant digits: files stay small, and no table shows more."""
    return float(f"{number:.6g}")
