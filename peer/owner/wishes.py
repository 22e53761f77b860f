"""What follows from all that an owner said: whether a peer takes part, trains alone or rests, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from peer.attendance import Wish
from peer.lines import size
from peer.owner.settings import FILE, Settings


@dataclass(frozen=True, slots=True)
class Verdict:
    """A wish and its reason; none for PRESENT."""

    wish: Wish
    why: str = ""


def decide(settings: Settings, *, paused: bool, now: datetime, used_bytes: int) -> Verdict:
    """The first reason that speaks decides: what rests uses no traffic.

    Args:
        now: by this machine's clock.
        used_bytes: sent and received in this month.
    """
    if paused:
        return Verdict(Wish.ABSENT, "its owner asked for it")
    if not settings.is_hour(60 * now.hour + now.minute):
        return Verdict(Wish.ABSENT, f"outside of the hours {settings.hours} in {FILE}")
    if used_bytes >= settings.monthly_bytes:
        used, allowed = size(used_bytes), size(settings.monthly_bytes)
        return Verdict(Wish.ALONE, f"this month's traffic is used up, {used} of {allowed}")
    return Verdict(Wish.PRESENT)
