"""Adversarial peers, for simulations of attacks: an honest peer whose messages are changed on their way to its links.

``scenario.Lie`` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from p2ptrain.host.payloads import Encoded, Payloads
from p2ptrain.outer.mixing import l2_norm
from p2ptrain.swarm.events import Announce
from p2ptrain.swarm.messages import Accept, Decline, Message, Offer, WeightsReply, WeightsRequest
from sim.counting import Blank, BlankPayload
from sim.scenario import Forgery, Lie

SCALE = 3.0
"""Factor of scaled weights. Guess: the smallest factor that ruins an unprotected run would settle it."""

Question = tuple[tuple[int, ...], Sequence[Any], Sequence[Any], Any]
"""Arguments of a payload: fragments, our proposals, the partner's proposals, and the snapshot of our proposals."""


@dataclass(slots=True)
class Adversary:
    """Changes what an adversarial peer's core says, sends and hears."""

    lie: Lie
    progress: float
    """Tokens of all peers at the run's end."""
    random: Random
    garble: Callable[[Any, Random], Any]
    """Makes another payload of the same sizes."""
    first: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """First payload sent of these fragments, for ``lie`` stale."""

    @property
    def _claim(self) -> float | None:
        """Progress that it claims; None for its true progress."""
        return {"progress": self.progress, "behind": 0.0}.get(self.lie)

    def says(self, message: Message) -> Message:
        claim = self._claim
        if claim is None:
            return message
        if isinstance(message, Offer | Accept):
            settled = message.terms.settled or self.lie == "behind"  # an unsettled peer would be sent to catch up
            return replace(message, terms=replace(message.terms, progress=claim, settled=settled))
        if isinstance(message, Decline | WeightsReply | WeightsRequest):
            return replace(message, progress=claim)
        return message

    def announces(self, effect: Announce) -> Announce:
        return effect if self._claim is None else replace(effect, progress=self._claim)

    def sends(self, payload: Any, payloads: Any, question: Question) -> Any:
        """Return what is sent in place of the true payload; None for nothing at all."""
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
        """Return what a newcomer gets in place of the weights, fp32."""
        if self.lie == "nan":
            return [b"\xff" * len(part) for part in parts]
        if self.lie == "scaled" or self.lie == "flipped" or self.lie == "random":
            weights = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts)
            return [falsified(each, self.lie, self.random).numpy().tobytes() for each in weights]
        return parts

    def hears(self, message: Message) -> bool:
        return self.lie != "silent" or not isinstance(message, Offer | WeightsRequest)


def garbled(payload: Any, random: Random) -> Any:
    """Return a payload of equal sizes with arbitrary content."""
    if isinstance(payload, BlankPayload):
        return replace(payload, parts=tuple(Blank(part.size, garbage=True) for part in payload.parts))
    return replace(payload, parts=tuple(random.randbytes(len(part)) for part in payload.parts))


def forged(payloads: Payloads, question: Question, lie: Forgery, random: Random) -> Encoded:
    """Encode the payload of falsified weights."""
    fragments, mine, theirs, snapshot = question
    true = snapshot or payloads.current(fragments)
    false = replace(true, parts=tuple(falsified(part, lie, random) for part in true.parts))
    return payloads.encode(fragments, mine, theirs, false)


def falsified(
    weights: Tensor,  # [n] fp32
    lie: Forgery,
    random: Random,
) -> Tensor:
    """Return falsified weights, [n] fp32."""
    if lie == "random":
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        noise = torch.randn(weights.shape, generator=generator)
        return noise * (l2_norm(weights) / l2_norm(noise))
    return weights * (SCALE if lie == "scaled" else -1.0)
