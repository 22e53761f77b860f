"""Bytes that a simulated peer sent and received, by purpose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SimulatedTraffic:
    """Bytes of one peer, with frames and digests; broken transfers count as far as they came."""

    payload_up: float = 0.0
    """Fragments in exchanges."""
    payload_down: float = 0.0
    weights_up: float = 0.0
    """Whole models, from donors to newcomers."""
    weights_down: float = 0.0
    control_up: float = 0.0
    """Messages of the protocol."""
    control_down: float = 0.0
    directory_up: float = 0.0
    """Presence records: storing its own and looking up others'."""
    directory_down: float = 0.0

    @property
    def up(self) -> float:
        return self.payload_up + self.weights_up + self.control_up + self.directory_up

    @property
    def down(self) -> float:
        return self.payload_down + self.weights_down + self.control_down + self.directory_down
