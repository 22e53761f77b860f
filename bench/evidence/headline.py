"""From the simulator's report to the few numbers that are kept. The one place that knows the report's layout.

Every number is finite, or it is not there: a run that diverged has no loss, and ``diverged`` in its place.

===========================  ==========================================================================================
loss                         nats a token on the cell's split, mean over the peers' own models at the end of training
averaged_loss                the same for the average of all models
disagreement                 mean of |x_i - mean| / |mean| at the end of training
bits_per_parameter           sent by a peer in an outer step, everything counted, per parameter of the model
bytes_per_peer               sent by a peer in the whole run
utilization                  share of its time that a peer computes, mean
others_tokens_per_s          tokens a second of simulated time, mean over all but the odd peer out
solo_share                   outer steps of a peer that no exchange entered, mean share
exchanges_made, _failed, _refused   mean over peers
simulated_s                  simulated seconds from start to end
seconds_to:L                 simulated seconds until the mean loss first was L nats or less, for a ladder of L
fast_seconds_to:L            the same for the odd peer's own model
events_per_s                 events of the simulator a second of real time
directory_bytes_per_peer     sent and received for presence in the directory, a peer, mean
===========================  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LADDER = (3.0, 2.75, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 1.95, 1.9, 1.85, 1.8, 1.75, 1.7, 1.65, 1.6, 1.55, 1.5)
"""Losses whose times are kept, in place of whole curves."""

_PLAIN = (
    "loss",
    "averaged_loss",
    "disagreement",
    "bits_per_parameter",
    "bytes_per_peer",
    "utilization",
    "others_tokens_per_s",
    "solo_share",
    "exchanges_made",
    "exchanges_failed",
    "exchanges_refused",
    "simulated_s",
    "events_per_s",
    "directory_bytes_per_peer",
)


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a report has, by name."""
    found = {name: report[name] for name in _PLAIN if report.get(name) is not None}
    found |= {f"seconds_to:{rung}": at for rung, at in times_to(report.get("curve", ()))}
    found |= {f"fast_seconds_to:{rung}": at for rung, at in times_to(report.get("odd_peer_curve", ()))}
    if not math.isfinite(float(report.get("loss", 0.0))):
        found["diverged"] = 1
    return {name: _rounded(float(number)) for name, number in found.items() if math.isfinite(number)}


def times_to(curve: Sequence[Mapping[str, float]]) -> Iterable[tuple[float, float]]:
    """For each rung of the ladder that the curve reaches: the rung, and the time of the first point there.

    Times between two points are interpolated in a straight line, so that two runs are not told apart by how often
    they were looked at.
    """
    for rung in LADDER:
        before: Mapping[str, float] | None = None
        for point in curve:
            if point["loss"] <= rung:
                yield rung, point["time_s"] if before is None else _between(before, point, rung)
                break
            before = point


def _between(before: Mapping[str, float], after: Mapping[str, float], rung: float) -> float:
    share = (before["loss"] - rung) / (before["loss"] - after["loss"])
    return before["time_s"] + share * (after["time_s"] - before["time_s"])


def _rounded(number: float) -> float:
    """To six significant digits: files stay small, and no table shows more."""
    return float(f"{number:.6g}")
