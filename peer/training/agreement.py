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
from p2ptrain.train.autofit import BF16_PARAMETERS, CARD_MEMORY_FRACTION, Placement, cpu_placement
from p2ptrain.train.ranks import Mesh, Ranks, shares
from p2ptrain.train.stage_costs import trials, unit_costs
from p2ptrain.train.stages import StageRange, balanced_cut, fitting_micro_batch, least_limit, slowest_stage_s

MOST_TRIALS = 4
"""Maximum of micro-batches that ranks try. Guess: trials of large models."""
TYPES = (None, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Agreement:
    stages: tuple[StageRange, ...]
    """Stages of a replica, in order; all replicas are cut alike."""
    placement: Placement
    counts: tuple[int, ...]
    """Micro-batches of an inner step that each replica computes."""
    slowest_s: float = 0.0
    """Seconds of the slowest stage for a micro-batch, forward and backward."""


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
    on_cpu = any(each["limit"] is None for each in found)
    types = {each["type"] for each in found}
    autocast = TYPES[types.pop()] if len(types) == 1 else None
    sizes = candidates(manifest, ranks.size, min(each["most"] for each in found))
    kinds = {autocast, None} if on_cpu else {autocast}  # a CPU may be faster in fp32
    ways = [Placement(kind, size) for kind in TYPES if kind in kinds for size in sizes]
    length = manifest.training.sequence_length
    seconds = ranks.in_turn(lambda: trials(manifest.model, length, ways, device))
    by_way = [[each[way] for each in seconds] for way in range(len(ways))]
    agreed = balanced(manifest, ways, by_way, [each["limit"] for each in found], ranks.mesh.stages)
    if on_cpu:  # replicas of a stage take the same step, on whatever they compute
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
    return cpu_placement(manifest.model, manifest.training, activation_bytes // kept).micro_batch


def candidates(manifest: Manifest, ranks: int, most: int) -> list[int]:
    """Return micro-batches up to ``most`` that a pipeline of these ranks may use, the largest first, each at most half
    of the one before. Raises DeviceError if there is none.
    """
    sequences, found = manifest.training.sequences_per_step, list[int]()
    while len(found) < MOST_TRIALS and (size := fitting_micro_batch(sequences, most, ranks)) is not None:
        found.append(size)
        most = size // 2
    if not found:
        raise DeviceError(
            f"The run has {sequences} sequences per inner step, too few for {ranks} devices.",
            f"Use at most {sequences} devices.",
        )
    return found


def balanced(
    manifest: Manifest,
    ways: Sequence[Placement],  # of falling micro-batches
    seconds: Sequence[Sequence[Sequence[float]]],  # of each unit, by placement and rank
    limits: Sequence[int | None],  # bytes of each rank's device
    stages: int,
) -> Agreement:
    """Return placement, cut and shares for the shortest inner step; recompute activations if nothing else fits.

    In 1F1B a step takes as long as the slowest stage for all micro-batches and for one more per further stage. All
    replicas have one cut, by the mean times of their devices. Raises DeviceError if no cut fits the devices.
    """
    mesh = Mesh.of(len(limits), stages)
    model, sequences, length = manifest.model, manifest.training.sequences_per_step, manifest.training.sequence_length
    bounds = [least_limit(limits[stage :: mesh.stages]) for stage in range(mesh.stages)]
    for recomputes in (False, True):
        found: list[tuple[float, Agreement]] = []
        for way, own in zip(ways, seconds, strict=True):
            micro_batches = sequences // way.micro_batch
            if micro_batches < mesh.ranks:
                continue
            tried = Placement(way.autocast, way.micro_batch, recomputes)
            means = [
                [fmean(each) for each in zip(*own[stage :: mesh.stages], strict=True)] for stage in range(mesh.stages)
            ]
            cut = balanced_cut(unit_costs(model, length, tried, means), bounds, micro_batches)
            if cut is None:
                continue
            slowest = [
                slowest_stage_s(unit_costs(model, length, tried, own[first : first + mesh.stages]), cut)
                for first in range(0, mesh.ranks, mesh.stages)
            ]
            counts = shares(micro_batches, mesh.stages, slowest)
            step_s = max((count + mesh.stages - 1) * each for count, each in zip(counts, slowest, strict=True))
            found.append((step_s, Agreement(cut, tried, counts, max(slowest))))
        if found:
            return min(found, key=lambda each: each[0])[1]
    raise DeviceError(
        f"No cut of the run's model into {Mesh(mesh.stages)} fits the free memory of the devices.",
        "Close other programs that use them, or name more devices.",
    )
