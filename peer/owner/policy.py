"""The policy: whether a peer participates or is paused, by commands, settings, time and readings. Pure."""

from __future__ import annotations

from calendar import monthrange
from dataclasses import dataclass
from datetime import datetime

from p2ptrain.manifest import SETTINGS_FILE
from peer.messages import size
from peer.owner.pause import end_in_words
from peer.owner.settings import Settings
from peer.owner.traffic import Month
from peer.participation import Mode

GIVEN_SHARE = 0.25
"""Maximum share of the monthly budget that serves others: weights for newcomers, circuits, samples, answers. The rest
is reserved for exchanges, because strangers can ask for any amount under any number of names. Guess: the share that
real newcomers ask for."""


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """A mode and its reason, which is empty for SWARM."""

    mode: Mode
    why: str = ""
    gives: bool = False
    """Whether this peer serves others beyond exchanges (``Throttles.gives``)."""

    @property
    def has_given_its_share(self) -> bool:
        return self.mode is Mode.SWARM and not self.gives


def may_give(settings: Settings, now: datetime, month: Month) -> bool:
    """Return whether others have received less than their share, which grows evenly over the days of the month."""
    passed = now.day / monthrange(now.year, now.month)[1]
    return month.given < GIVEN_SHARE * passed * settings.monthly_bytes


def decide(
    settings: Settings, *, paused_until: float | None, now: datetime, month: Month, rest: str = ""
) -> PolicyDecision:
    """Decide the mode: paused by the owner, outside the hours, to rest or without budget, else present.

    ``paused_until`` is the end of the owner's pause (``peer.owner.pause``), None if there is none; ``now`` is the local
    time of this machine; ``rest`` is the reason of ``peer.owner.resting``.
    """
    if paused_until is not None and now.timestamp() < paused_until:
        return PolicyDecision(Mode.PAUSED, f"requested by its owner{end_in_words(paused_until, now)}")
    if not settings.is_hour(60 * now.hour + now.minute):
        return PolicyDecision(Mode.PAUSED, f"outside the hours {settings.hours} in {SETTINGS_FILE}")
    if rest:
        return PolicyDecision(Mode.PAUSED, rest)
    if month.both >= settings.monthly_bytes:
        used, allowed = size(month.both), size(settings.monthly_bytes)
        return PolicyDecision(
            Mode.PAUSED, f"this month's traffic is used up, {used} of {allowed} (monthly_gb in {SETTINGS_FILE})"
        )
    return PolicyDecision(Mode.SWARM, gives=may_give(settings, now, month))
