"""Peers that lie, for simulations of attacks: an honest peer between whose core and whose links something sits.

``scenario.Lie`` names the lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from p2ptrain.outer import l2_norm
from p2ptrain.sim.scenario import Forgery, Lie
from p2ptrain.swarm.events import Announce
from p2ptrain.swarm.messages import Accept, Decline, Message, Offer, WeightsReply, WeightsRequest
from p2ptrain.train.payloads import Encoded, Payloads

SCALE = 3.0
"""Of weights that are scaled. A guess: enough to ruin a model that takes them in."""

Question = tuple[tuple[int, ...], Sequence[Any], Sequence[Any], Any]
"""What a payload answers: fragments, our wishes, theirs, and the snapshot that ours told of."""


@dataclass(slots=True)
class Adversary:
    """What a liar does to what its core says, sends and hears."""

    lie: Lie
    progress: float
    """The run's end, in tokens per peer."""
    random: Random
    garble: Callable[[Any, Random], Any]
    """Another payload of the same sizes."""
    first: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """What it sent of these fragments when it sent them first, where it is stale."""

    @property
    def _claim(self) -> float | None:
        """The progress that it speaks of; None: its own."""
        return {"progress": self.progress, "behind": 0.0}.get(self.lie)

    def says(self, message: Message) -> Message:
        claim = self._claim
        if claim is None:
            return message
        if isinstance(message, Offer | Accept):
            settled = message.terms.settled or self.lie == "behind"  # or it would be sent to catch up
            return replace(message, terms=replace(message.terms, progress=claim, settled=settled))
        if isinstance(message, Decline | WeightsReply | WeightsRequest):
            return replace(message, progress=claim)
        return message

    def announces(self, effect: Announce) -> Announce:
        return effect if self._claim is None else replace(effect, progress=self._claim)

    def sends(self, payload: Any, payloads: Any, question: Question) -> Any:
        """In place of its true payload; None: nothing at all."""
        match self.lie:
            case "stalling":
                return None
            case "garbage":
                return self.garble(payload, self.random)
            case "nan":
                return replace(payload, parts=tuple(b"\xff" * len(part) for part in payload.parts))
            case "stale":
                return self.first.setdefault(question[0], payload)
            case "scaled" | "flipped" | "random":
                return forged(payloads, question, self.lie, self.random)
        return payload

    def gives(self, parts: Sequence[Any]) -> Sequence[Any]:
        """To a newcomer, in place of its weights, fp32."""
        if self.lie == "nan":
            return [b"\xff" * len(part) for part in parts]
        if self.lie == "scaled" or self.lie == "flipped" or self.lie == "random":
            weights = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts)
            return [falsified(each, self.lie, self.random).numpy().tobytes() for each in weights]
        return parts

    def hears(self, message: Message) -> bool:
        return self.lie != "silent" or not isinstance(message, Offer | WeightsRequest)


def forged(payloads: Payloads, question: Question, lie: Forgery, random: Random) -> Encoded:
    """What it would send if its weights were what it says."""
    fragments, mine, theirs, true = question
    false = replace(true, parts=tuple(falsified(part, lie, random) for part in true.parts))
    return payloads.encode(fragments, mine, theirs, false)


def falsified(
    weights: Tensor,  # [n] fp32
    lie: Forgery,
    random: Random,
) -> Tensor:
    """[n] fp32."""
    if lie == "random":
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        noise = torch.randn(weights.shape, generator=generator)
        return noise * (l2_norm(weights) / l2_norm(noise))
    return weights * (SCALE if lie == "scaled" else -1.0)
