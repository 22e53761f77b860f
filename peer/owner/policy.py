"""What follows from all that an owner said: whether a peer takes part, trains alone or rests, and why. Pure."""

from __future__ import annotations

from calendar import monthrange
from dataclasses import dataclass
from datetime import datetime

from p2ptrain.manifest import SETTINGS_FILE
from peer.messages import size
from peer.owner.settings import Settings
from peer.owner.traffic import Month
from peer.participation import Mode

GIVEN_SHARE = 0.25
"""Of a month's budget, what others get for their own sake: copies of weights for newcomers, circuits, samples, answers.
Strangers may ask for more than a home has, under as many names as they like; the rest is for exchanges. A guess."""


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """A wish and its reason; none for PRESENT."""

    wish: Mode
    why: str = ""
    gives: bool = False
    """Whether others get bytes for their own sake (``Throttles.gives``)."""

    @property
    def has_given_its_share(self) -> bool:
        return self.wish is Mode.PRESENT and not self.gives


def may_give(settings: Settings, now: datetime, month: Month) -> bool:
    """Whether others have had less than their share, of which a day's worth is added each day."""
    passed = now.day / monthrange(now.year, now.month)[1]
    return month.given < GIVEN_SHARE * passed * settings.monthly_bytes


def decide(settings: Settings, *, paused: bool, now: datetime, month: Month) -> PolicyDecision:
    """The first reason that speaks decides: what rests uses no traffic.

    Args:
        now: by this machine's clock.
        month: what was moved in this month.
    """
    if paused:
        return PolicyDecision(Mode.ABSENT, "its owner asked for it")
    if not settings.is_hour(60 * now.hour + now.minute):
        return PolicyDecision(Mode.ABSENT, f"outside of the hours {settings.hours} in {SETTINGS_FILE}")
    if month.both >= settings.monthly_bytes:
        used, allowed = size(month.both), size(settings.monthly_bytes)
        return PolicyDecision(Mode.ALONE, f"this month's traffic is used up, {used} of {allowed}")
    return PolicyDecision(Mode.PRESENT, gives=may_give(settings, now, month))
