"""Figures of a partition: its effect on exchanges, and how soon the swarm recovers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from lab.artifacts import LAST, Artifacts, ExchangeArtifact
from lab.script import ActKind

HEALED = 2.0
"""Distance, over that before the partition, at which a peer has recovered. Guess: single exchanges differ by half;
distances of undisturbed runs would settle it."""

Sides = Sequence[Sequence[str]]
"""Names of the peers on each side."""


def exchanges_across(
    artifacts: Sequence[Artifacts], done: Sequence[Mapping[str, Any]], key: str, sides: Sides
) -> tuple[int, int]:
    """Count exchanges between sides of a partition: begun and ended during it, and begun after it healed."""
    when = _times(done, key)
    if ActKind.PART not in when:
        return 0, 0
    healed = when.get(ActKind.HEAL, math.inf)
    found = [each for one in artifacts for each in _exchanges_across(one, artifacts, sides)]
    during = sum(each.began > when[ActKind.PART] and each.ended < healed for each in found)
    return during, sum(each.began > healed for each in found)


def exchanges_within(
    artifacts: Sequence[Artifacts], done: Sequence[Mapping[str, Any]], key: str, sides: Sides
) -> int | None:
    """Count exchanges within a side during a partition, on the side with the fewest; each of both peers counts them.

    Only sides with two peers count. None without one, or if the partition never came.
    """
    when = _times(done, key)
    if ActKind.PART not in when:
        return None
    healed = when.get(ActKind.HEAL, math.inf)
    ids = {one.peer.name: one.peer_id for one in artifacts}
    found = []
    for side in sides:
        names = [name for name in side if name in ids]
        if len(names) > 1:
            those = [each for one in artifacts if one.peer.name in names for each in one.exchanges()]
            partners = {ids[name] for name in names}
            found.append(
                sum(
                    each.partner in partners and each.began > when[ActKind.PART] and each.ended < healed
                    for each in those
                )
            )
    return min(found, default=None)


def steps_to_contact(
    artifacts: Sequence[Artifacts], done: Sequence[Mapping[str, Any]], key: str, sides: Sides
) -> int | None:
    """Return the outer steps of the slowest peer from the end of a partition until an exchange across begins.

    None if no exchange across begins or the partition never ended.
    """
    when = _times(done, key)
    if ActKind.PART not in when or ActKind.HEAL not in when:
        return None
    healed, there = when[ActKind.HEAL], [one for one in artifacts if _side(one.peer.name, sides) is not None]
    contact = min(
        (each.began for one in there for each in _exchanges_across(one, artifacts, sides) if each.began > healed),
        default=None,
    )
    if contact is None:
        return None
    return max((one.step_at(contact) or 0) - (one.step_at(healed) or 0) for one in there)


def steps_to_heal(
    artifacts: Sequence[Artifacts], done: Sequence[Mapping[str, Any]], key: str, sides: Sides
) -> int | None:
    """Return the outer steps of the slowest peer until it is at most HEALED times as far from the other side as before.

    The count begins at the first exchange across after the partition: no peer can know earlier that it is over. The
    distance before is the median of a peer's last exchanges. None if a peer never comes that near, or made no exchange
    before the partition.
    """
    when = _times(done, key)
    if ActKind.PART not in when or ActKind.HEAL not in when:
        return None
    parted, healed, slowest = when[ActKind.PART], when[ActKind.HEAL], 0
    later = {
        one.peer.name: [each for each in _exchanges_across(one, artifacts, sides) if each.began > healed]
        for one in artifacts
        if _side(one.peer.name, sides) is not None
    }
    contact = min((each.began for those in later.values() for each in those), default=math.inf)
    for one in artifacts:
        if one.peer.name not in later:
            continue
        before = [each.distance for each in one.exchanges() if each.ended < parted][-LAST:]
        near = [each for each in later[one.peer.name] if before and each.distance <= HEALED * median(before)]
        if not near:
            return None
        slowest = max(slowest, (one.step_at(near[0].ended) or 0) - (one.step_at(contact) or 0))
    return slowest if later else None


def _exchanges_across(one: Artifacts, artifacts: Sequence[Artifacts], sides: Sides) -> Iterator[ExchangeArtifact]:
    """Yield a peer's exchanges with peers of other sides, in order."""
    names = {each.peer_id: each.peer.name for each in artifacts}
    ours = _side(one.peer.name, sides)
    for each in one.exchanges():
        theirs = _side(names.get(each.partner, ""), sides)
        if ours is not None and theirs is not None and ours != theirs:
            yield each


def _side(name: str, sides: Sides) -> int | None:
    return next((place for place, side in enumerate(sides) if name in side), None)


def _times(done: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    return {act["do"]: float(act["time"]) for act in done if act["who"] == key}
