"""Double of a card whose results arrive only when somebody waits for them."""

from __future__ import annotations

import torch
from torch import Tensor

from p2ptrain.train.device_copies import Arrival, DeviceCopies


class LateEvent:
    def __init__(self, name: str, copies: list[tuple[Tensor, Tensor]], waits: list[str]) -> None:
        self.name = name
        self.waits = waits
        self.is_past = False
        self._copies = copies

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        if not self.is_past:
            self.waits.append(self.name)
            self.arrive()

    def arrive(self) -> None:
        self.is_past = True
        for copy, values in self._copies:
            copy.copy_(values)


class LateCopies(DeviceCopies):
    """Copies that hold NaN until somebody waits for them; ``waits`` names those that had to."""

    are_late = True

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.events: list[LateEvent] = []

    def result(self, values: Tensor) -> Arrival:
        return self._arrival("result", (values,))

    def arrive(self) -> None:
        """Let everything arrive that is on its way."""
        for event in self.events:
            event.arrive()

    def _arrival(self, kind: str, parts: tuple[Tensor, ...]) -> Arrival:
        copies = tuple(torch.full_like(part, torch.nan) for part in parts)
        number = sum(each.name.startswith(kind) for each in self.events)
        event = LateEvent(f"{kind} {number}", list(zip(copies, parts, strict=True)), self.waits)
        self.events.append(event)
        return Arrival(copies, event)
