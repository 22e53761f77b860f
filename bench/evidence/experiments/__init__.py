"""Tuning and experiments R1 to R10, one module each, in ``EXPERIMENTS``: what decides most comes first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bench.evidence.experiments.r1_quality import R1
from bench.evidence.experiments.r2_speedup import R2
from bench.evidence.experiments.r3_straggler import R3
from bench.evidence.experiments.r4_utilization import R4
from bench.evidence.experiments.r5_codecs import R5
from bench.evidence.experiments.r6_churn import R6
from bench.evidence.experiments.r7_larger import R7
from bench.evidence.experiments.r8_stages import R8
from bench.evidence.experiments.r9_uneven import R9
from bench.evidence.experiments.r10_adversaries import R10
from bench.evidence.layout import Experiment
from bench.evidence.tuning import TUNING

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {each.id: each for each in (TUNING, R1, R2, R9, R5, R3, R6, R10, R7, R8, R4)}
)

__all__ = ["EXPERIMENTS"]
