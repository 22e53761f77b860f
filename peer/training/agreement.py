"""What the ranks of a trainer agree on before they train: autocast type, micro-batch, and where the model is cut.

All ranks compute the same from the same gathered numbers, so nobody decides for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import BF16_PARAMETERS, Placement, block_s, placement_within
from p2ptrain.train.memory import CARD_MEMORY_FRACTION
from p2ptrain.train.ranks import Mesh, Ranks, shares
from p2ptrain.train.stages import (
    StageRange,
    balanced_cut,
    fitting_micro_batch,
    least_limit,
    slowest_stage_s,
    unit_costs,
)

FULL = 2
"""Micro-batches of an inner step for each rank, if there are as many sequences: a pipeline then waits for at most a
third of the time. Guess: steps of larger and of more micro-batches."""
TYPES = (None, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Agreement:
    stages: tuple[StageRange, ...]
    """Stages of a replica, in order; all replicas are cut alike."""
    placement: Placement
    counts: tuple[int, ...]
    """Micro-batches of an inner step that each replica computes."""


def agree(
    ranks: Ranks, manifest: Manifest, device: torch.device, activation_bytes: int, most_sequences: int
) -> Agreement:
    """Measure this rank's device and return what all ranks agree on, a collective. Raises DeviceError.

    Args:
        activation_bytes, most_sequences: as in ``TrainerPlan``.
    """
    most_sequences = min(most_sequences, _most_at_once(manifest, device, activation_bytes))
    free = accelerator.free_bytes(device) if device.type != "cpu" else None
    own = {
        "type": TYPES.index(_type_of(manifest, device)),
        "most": most_sequences,
        "limit": None if free is None else int(CARD_MEMORY_FRACTION * free),
    }
    found = ranks.gather(own)
    types = {each["type"] for each in found}
    autocast = TYPES[types.pop()] if len(types) == 1 else None
    way = Placement(autocast, micro_batch_of(manifest, ranks.size, min(each["most"] for each in found)))
    length = manifest.training.sequence_length
    seconds = ranks.in_turn(lambda: block_s(manifest.model, length, way, device))
    agreed = balanced(manifest, way, seconds, [each["limit"] for each in found], ranks.mesh.stages)
    if any(each["limit"] is None for each in found):  # replicas of a stage take the same step, whatever computes it
        agreed = replace(agreed, placement=replace(agreed.placement, muon=torch.float32))
    return agreed


def _type_of(manifest: Manifest, device: torch.device) -> torch.dtype | None:
    """Return the type in which a device computes matrix products fast; None: fp32."""
    if device.type == "cpu":
        is_large = parameter_count(manifest.model) >= BF16_PARAMETERS
        return torch.bfloat16 if is_large and accelerator.has_fast_bf16() else None
    half = accelerator.half_type(device)
    return half if accelerator.autocasts(device, half) else None


def _most_at_once(manifest: Manifest, device: torch.device, activation_bytes: int) -> int:
    if device.type != "cpu":
        return manifest.training.sequences_per_step
    kept = 2  # of S stages with a share of 1 / S each, the first keeps 2 S - 1 micro-batches
    return placement_within(manifest.model, manifest.training, activation_bytes // kept).micro_batch


def micro_batch_of(manifest: Manifest, ranks: int, most: int) -> int:
    """Return the largest micro-batch up to ``most`` of which an inner step has ``FULL`` for each rank, or else one."""
    sequences = manifest.training.sequences_per_step
    for least in (FULL * ranks, ranks):
        if (size := fitting_micro_batch(sequences, most, least)) is not None:
            return size
    raise AssertionError(f"{ranks} ranks of {sequences} sequences, which devices.mesh_of refuses")


def balanced(
    manifest: Manifest,
    way: Placement,
    seconds: Sequence[float],  # ``autofit.block_s`` of each rank
    limits: Sequence[int | None],  # bytes of each rank's device
    stages: int,
) -> Agreement:
    """Return cut and shares for the shortest inner step; recompute activations if nothing else fits.

    In 1F1B a step takes as long as the slowest stage for all micro-batches and for one more per further stage. All
    replicas have one cut, by the mean times of their devices. Raises DeviceError if no cut fits the devices.
    """
    mesh = Mesh.of(len(limits), stages)
    model, length = manifest.model, manifest.training.sequence_length
    micro_batches = manifest.training.sequences_per_step // way.micro_batch
    bounds = [least_limit(limits[stage :: mesh.stages]) for stage in range(mesh.stages)]
    means = [fmean(seconds[stage :: mesh.stages]) for stage in range(mesh.stages)]
    for recomputes in (False, True):
        tried = replace(way, recomputes=recomputes)
        cut = balanced_cut(unit_costs(model, length, tried, means), bounds, micro_batches)
        if cut is not None:
            slowest = [
                slowest_stage_s(unit_costs(model, length, tried, seconds[first : first + mesh.stages]), cut)
                for first in range(0, mesh.ranks, mesh.stages)
            ]
            return Agreement(cut, tried, shares(micro_batches, mesh.stages, slowest))
    raise DeviceError(
        f"No cut of the run's model into {Mesh(mesh.stages)} fits the free memory of the devices.",
        "Close other programs that use them, or name more devices.",
    )
