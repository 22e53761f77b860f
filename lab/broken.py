"""Exchanges that somebody's death or sleep broke off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.artifacts import Artifacts
from lab.script import Do

HEARD_S = 2.0
"""Partners may hear of it so long before it counts as done: who was killed is waited for. A guess: .1 s, and some on a
busy machine."""

BREAKS_OFF = (Do.KILL, Do.FREEZE)


def broken_off(one: Artifacts, left: Sequence[Artifacts], done: Sequence[Mapping[str, Any]]) -> int:
    """One peer's exchanges that were under way when the partner was killed or fell asleep, and came to nothing.

    Both had agreed. What was never answered, or failed for another reason, is none of these.
    """
    ids = {each.part.name: each.peer_id for each in left}
    away = [(ids[act["who"]], float(act["time"])) for act in done if act["do"] in BREAKS_OFF and act["who"] in ids]
    return sum(
        any(each.partner == peer_id and each.began < time <= each.ended + HEARD_S for peer_id, time in away)
        for each in one.broken()
    )
