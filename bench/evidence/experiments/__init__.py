"""R1 to R11, one file each. ``EXPERIMENTS`` has them in order; ``all_cells`` what they need run, tuning included."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bench.evidence.cells import Cell
from bench.evidence.contenders import CONFIRMED, ONE_CELL, SWARM_BLOCKING, SWARM_BOTH, SWARM_GRADIENTS, SWARM_SLOW
from bench.evidence.experiments.r1_quality import R1
from bench.evidence.experiments.r2_single_step import R2
from bench.evidence.experiments.r3_straggler import R3
from bench.evidence.experiments.r4_utilization import R4
from bench.evidence.experiments.r5_codecs import R5
from bench.evidence.experiments.r6_churn import R6
from bench.evidence.experiments.r7_growth import R7
from bench.evidence.experiments.r8_outer_optimizer import R8
from bench.evidence.experiments.r9_uneven import R9
from bench.evidence.experiments.r10_liars import R10
from bench.evidence.experiments.r11_doubts import R11
from bench.evidence.grid import tuning_cells
from bench.evidence.layout import Experiment

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {each.id: each for each in (R1, R2, R3, R4, R5, R6, R7, R8, R9, R10, R11)}
)


def all_cells() -> list[Cell]:
    """The tuning's cells and those of all experiments."""
    tuning = [
        *tuning_cells((*CONFIRMED, SWARM_SLOW, SWARM_BLOCKING)),
        *tuning_cells((SWARM_BOTH, SWARM_GRADIENTS), tier=2),
        *tuning_cells(ONE_CELL, tier=4),
    ]
    return [*tuning, *(cell for each in EXPERIMENTS.values() for cell in each.cells)]


__all__ = ["EXPERIMENTS", "all_cells"]
