"""Peers that lie, for simulations of attacks: an honest peer between whose core and whose links something sits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from p2ptrain.swarm.events import Announce
from p2ptrain.swarm.messages import Accept, Decline, Message, Offer, WeightsReply, WeightsRequest

Lie = Literal["progress", "garbage", "silent", "stalling"]
"""progress: it claims to be at the run's end. garbage: its payloads are random bytes. silent: it never answers.
stalling: it agrees to exchange, and never sends its payload."""


@dataclass(slots=True)
class Liar:
    """What a liar does to what its core says, sends and hears."""

    lie: Lie
    progress: float
    """What it claims, in tokens per peer."""
    random: Random
    garble: Callable[[Any, Random], Any]
    """Another payload of the same sizes."""

    def says(self, message: Message) -> Message:
        if self.lie != "progress":
            return message
        if isinstance(message, Offer | Accept):
            return replace(message, terms=replace(message.terms, progress=self.progress))
        if isinstance(message, Decline | WeightsReply | WeightsRequest):
            return replace(message, progress=self.progress)
        return message

    def announces(self, effect: Announce) -> Announce:
        return replace(effect, progress=self.progress) if self.lie == "progress" else effect

    def sends(self, payload: Any) -> Any:
        """None: nothing at all."""
        if self.lie == "stalling":
            return None
        return self.garble(payload, self.random) if self.lie == "garbage" else payload

    def hears(self, message: Message) -> bool:
        return self.lie != "silent" or not isinstance(message, Offer | WeightsRequest)
