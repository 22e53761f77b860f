"""Rotation of the peers' generated texts on a page that shows one: the peer that waited longest is next. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.base.ids import PeerId
from p2ptrain.page.samples import SampleText

HELD_S = 20.0
"""Shortest time that a text is shown, for a hundred words. Guess: ask readers; no peer writes more often."""


@dataclass(slots=True)
class SampleRotation:
    """The newest text of each peer, and the one that is shown."""

    shown: SampleText | None = None
    _told: dict[PeerId, SampleText] = field(default_factory=dict)
    """The text of each peer; ``at`` is when it arrived first."""
    _waits: dict[PeerId, float] = field(default_factory=dict)
    """When each peer's wait began: at its last turn, or at its first text."""
    _new: set[PeerId] = field(default_factory=set)  # peers with a text that was not shown yet
    _turn_at: float = float("-inf")

    def told(self, text: SampleText) -> None:
        """Take a peer's current text, which may be unchanged."""
        peer = PeerId(text.peer)
        if peer not in self._told or self._told[peer].text != text.text:
            self._told[peer] = text
            self._waits.setdefault(peer, text.at)
            self._new.add(peer)
        self.turn(text.at)

    def keep(self, peers: set[PeerId]) -> None:
        """Drop all other peers. The shown text stays until the next turn."""
        self._told = {peer: text for peer, text in self._told.items() if peer in peers}
        self._waits = {peer: since for peer, since in self._waits.items() if peer in peers}
        self._new &= peers

    def forget(self, peer: PeerId, now: float) -> None:
        """Drop a peer's text, and show another one if it is shown."""
        self._told.pop(peer, None)
        self._waits.pop(peer, None)
        self._new.discard(peer)
        if self.shown is not None and self.shown.peer == peer:
            self.shown, self._turn_at = None, float("-inf")
            self.turn(now)

    def turn(self, now: float) -> None:
        """Show the next text if it is time: of the peers with a new text, the one that waited longest."""
        if now - self._turn_at < HELD_S:
            return
        ready = self._new if self.shown is not None else self._new or set(self._told)
        if ready:
            peer = min(ready, key=lambda each: (self._waits[each], each))
            self.shown, self._turn_at, self._waits[peer] = self._told[peer], now, now
            self._new.discard(peer)
