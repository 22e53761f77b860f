"""Rate of the lines between stages, and the form of activations that it calls for.

In one computer activations travel in fp32, so that a team computes what one process computes. On a network all ranks
measure their lines, both ways at once as in training, and take the most exact form with which the slowest line delays
no stage, or else the shortest.
"""

from __future__ import annotations

import time

import torch

from p2ptrain.train.boundary import BOUNDARIES, Boundary
from p2ptrain.train.team_group import Direction, TeamGroup, TensorTransfer

TRIAL_BYTES = 1 << 20
"""Bytes of a trial, each way: 80 ms of a line of 100 Mbit/s."""
TRIALS = 3
"""Trials, of which the shortest counts: the first opens TCP's window."""
SPARE = 0.8
"""Most of a micro-batch's computation that its tensor may travel, so that delays of a line seldom delay a stage. Guess:
lines with other traffic would settle it."""


def line_bytes_per_s(group: TeamGroup) -> float:
    """Return the rate of the slowest line between neighbours, each way while both are used, a collective.

    Raises TeamError.
    """
    name, shortest_s = "trial of the line", float("inf")
    neighbours: dict[Direction, tuple[int, int]] = {
        "forward": (group.rank - 1, group.rank + 1),
        "backward": (group.rank + 1, group.rank - 1),
    }
    for trial in range(TRIALS):
        group.least(name, 0)  # all begin
        began, transfers = time.perf_counter(), list[TensorTransfer]()
        for direction, (source, to) in neighbours.items():
            if 0 <= source < group.size:
                into = torch.empty(TRIAL_BYTES, dtype=torch.uint8)
                transfers.append(group.begin_receive(name, into, source, direction, trial))
            if 0 <= to < group.size:
                values = torch.zeros(TRIAL_BYTES, dtype=torch.uint8)
                transfers.append(group.begin_send(name, values, to, direction, trial))
        for each in transfers:
            each.wait()
        shortest_s = min(shortest_s, time.perf_counter() - began)
    rates = group.gather(name, torch.tensor([TRIAL_BYTES / shortest_s], dtype=torch.float64))
    return float(rates.min())


def chosen_boundary(
    bytes_per_s: float,  # of the slowest line, each way
    tokens: int,  # of a micro-batch
    width: int,
    slowest_s: float,  # of the slowest stage for a micro-batch, forward and backward
) -> Boundary:
    """Return the most exact form whose tensors travel in ``SPARE`` of the computation; the shortest if none does."""
    fitting = (each for each in BOUNDARIES if tokens * each.bytes_per_token(width) / bytes_per_s <= SPARE * slowest_s)
    return next(fitting, BOUNDARIES[-1])
