"""Whose text a page shows that has room for one: that of whoever has waited longest, and long enough to be read. Pure.

A text that came in first, or changes most often, is none the better for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.base.ids import PeerId
from p2ptrain.page import SampleText

HELD_S = 20.0
"""A text is shown for so long at least. A guess: to read a hundred words; and no peer writes more often."""


@dataclass(slots=True)
class SampleRotation:
    """What peers told last, and what is shown of it."""

    shown: SampleText | None = None
    _told: dict[PeerId, SampleText] = field(default_factory=dict)
    """By peer; ``at``: since when it is this one."""
    _waits: dict[PeerId, float] = field(default_factory=dict)
    """Since when each of them has waited for its turn: since it had one, or since it first told."""
    _new: set[PeerId] = field(default_factory=set)
    """Those whose text was not shown yet."""
    _turn_at: float = float("-inf")

    def told(self, text: SampleText) -> None:
        """A peer's text of this moment; also the same again."""
        peer = PeerId(text.peer)
        if peer not in self._told or self._told[peer].text != text.text:
            self._told[peer] = text
            self._waits.setdefault(peer, text.at)
            self._new.add(peer)
        self.turn(text.at)

    def keep(self, peers: set[PeerId]) -> None:
        """The others are gone. What is shown stays until somebody else's turn comes."""
        self._told = {peer: text for peer, text in self._told.items() if peer in peers}
        self._waits = {peer: since for peer, since in self._waits.items() if peer in peers}
        self._new &= peers

    def forget(self, peer: PeerId, now: float) -> None:
        """It is not to be shown any more, from now on."""
        self._told.pop(peer, None)
        self._waits.pop(peer, None)
        self._new.discard(peer)
        if self.shown is not None and self.shown.peer == peer:
            self.shown, self._turn_at = None, float("-inf")
            self.turn(now)

    def turn(self, now: float) -> None:
        """Whoever has waited longest is next, of those who have written anything since their last turn."""
        if now - self._turn_at < HELD_S:
            return
        ready = self._new if self.shown is not None else self._new or set(self._told)
        if ready:
            peer = min(ready, key=lambda each: (self._waits[each], each))
            self.shown, self._turn_at, self._waits[peer] = self._told[peer], now, now
            self._new.discard(peer)
