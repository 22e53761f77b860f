"""Figure of how soon a peer exchanges again after an event in its network, a sleep or a jump of its clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lab.artifacts import Artifacts
from lab.script import NETWORK_ACTS, ActKind

RETURNS = NETWORK_ACTS - {ActKind.UNROUTE, ActKind.CUT_LAN, ActKind.MEND_LAN} | {ActKind.RESUME, ActKind.JUMP}
"""Acts after which exchanges should work again."""


def longest_return_s(one: Artifacts, done: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the longest time in seconds from such an event to the end of an exchange that began after it.

    Infinite if none followed; None without an event. An event does not count if others of the peer followed before an
    exchange did.
    """
    acts = sorted((float(act["time"]), str(act["do"])) for act in done if act["who"] == one.peer.name)
    ends = [*(time for time, _ in acts[1:]), math.inf]
    found = []
    for (time, kind), until in zip(acts, ends, strict=False):
        if kind not in RETURNS:
            continue
        ended = min((each.ended for each in one.exchanges() if each.began >= time), default=math.inf)
        if ended <= until:
            found.append(ended - time)
    return max(found, default=None)
