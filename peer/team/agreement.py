"""What the ranks of a team agree on before they train: autocast type, micro-batch, and where the model is cut.

All ranks compute the same from the same gathered numbers, so nobody decides for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.outer.fragments import layer_slices, stage_starts
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import BF16_PARAMETERS, CARD_MEMORY_FRACTION, Placement, cpu_placement
from p2ptrain.train.boundary import EXACT, Boundary
from p2ptrain.train.replicas import Mesh, shares
from p2ptrain.train.stage_costs import trials, unit_costs
from p2ptrain.train.stage_lines import chosen_boundary, line_bytes_per_s
from p2ptrain.train.stages import StageRange, balanced_cut, fitting_micro_batch, least_limit, slowest_stage_s
from p2ptrain.train.team_group import TeamGroup

MOST_TRIALS = 4
"""Maximum of micro-batches that ranks try. Guess: trials of large models."""
NO_LIMIT = -1.0
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
    is_eager: bool = True
    """Whether stages keep more micro-batches so as not to wait for tensors (``pipeline_schedule.warm_up``)."""
    boundary: Boundary = EXACT


def agree(
    group: TeamGroup,
    manifest: Manifest,
    device: torch.device,
    activation_bytes: int,
    most_sequences: int,
    starts: Sequence[int],
    stages: int,
) -> Agreement:
    """Measure this rank's device and return what all ranks agree on, a collective. Raises DeviceError and TeamError.

    Args:
        activation_bytes, most_sequences, starts, stages: as in ``RankPlan``.
    """
    most_sequences = min(most_sequences, _most_at_once(manifest, device, activation_bytes))
    own = [float(TYPES.index(_type_of(manifest, device))), float(most_sequences), float(device.type == "cpu")]
    types, most, on_cpu = group.gather("agreement: types", torch.tensor(own, dtype=torch.float64)).view(-1, 3).unbind(1)
    autocast = TYPES[int(types[0])] if len(set(types.tolist())) == 1 else None
    sizes = candidates(manifest, group.size, int(most.min()))
    kinds = {autocast, None} if on_cpu.any() else {autocast}  # a CPU may be faster in fp32
    ways = [Placement(kind, size) for kind in TYPES if kind in kinds for size in sizes]
    seconds, limits = _measured(group, manifest, device, ways)
    agreed = balanced(manifest, ways, seconds, limits, starts, stages)
    if on_cpu.any():  # replicas of a stage take the same step, on whatever they compute
        agreed = replace(agreed, placement=replace(agreed.placement, muon=torch.float32))
    if group.is_local:
        return agreed
    tokens = agreed.placement.micro_batch * manifest.training.sequence_length
    rate = line_bytes_per_s(group)
    return replace(agreed, boundary=chosen_boundary(rate, tokens, manifest.model.config.hidden_size, agreed.slowest_s))


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


def _measured(
    group: TeamGroup, manifest: Manifest, device: torch.device, ways: Sequence[Placement]
) -> tuple[list[list[list[float]]], list[int | None]]:
    """Return the seconds of each unit, by placement and rank, and each rank's memory limit. Ranks measure in turn."""
    length, own = manifest.training.sequence_length, list[float]()
    for rank in range(group.size):
        measures = rank == group.rank

        def measure(measures: bool = measures) -> list[float]:
            tried = trials(manifest.model, length, ways if measures else (), device)
            return [each for way in tried for each in way]

        own = group.together(f"trial on rank {rank}", measure) or own
    free = accelerator.free_bytes(device) if device.type != "cpu" else None
    limit = NO_LIMIT if free is None else CARD_MEMORY_FRACTION * free
    rows = group.gather("agreement: trials", torch.tensor([*own, limit], dtype=torch.float64)).view(group.size, -1)
    limits = [None if row[-1] == NO_LIMIT else int(row[-1]) for row in rows.tolist()]
    return rows[:, :-1].view(group.size, len(ways), -1).transpose(0, 1).tolist(), limits


def balanced(
    manifest: Manifest,
    ways: Sequence[Placement],  # of falling micro-batches
    seconds: Sequence[Sequence[Sequence[float]]],  # of each unit, by placement and rank
    limits: Sequence[int | None],  # bytes of each rank's device
    starts: Sequence[int] = (),  # first block of each stage; empty: wherever a fragment begins
    stages: int | None = None,  # None: as many as ranks
) -> Agreement:
    """Return placement, cut and shares for the shortest inner step. If memory is short, keep fewer micro-batches, and
    recompute activations if nothing else fits.

    In 1F1B a step takes as long as the slowest stage for all micro-batches and for one more per further stage. All
    replicas have one cut, by the mean times of their devices. Raises DeviceError if no cut fits the devices.
    """
    mesh = Mesh.of(len(limits), stages or len(limits))
    model, sequences, length = manifest.model, manifest.training.sequences_per_step, manifest.training.sequence_length
    allowed = [start + 1 for start in starts]
    if not starts and mesh.stages > 1:
        units = model.unit_parameters()
        allowed = [*stage_starts(units, layer_slices(units, manifest.outer.fragments))]
    bounds = [least_limit(limits[stage :: mesh.stages]) for stage in range(mesh.stages)]
    for recomputes, is_eager in product((False, True), (True, False)):
        found: list[tuple[float, Agreement]] = []
        for way, own in zip(ways, seconds, strict=True):
            micro_batches = sequences // way.micro_batch
            tried = Placement(way.autocast, way.micro_batch, recomputes)
            means = [
                [fmean(each) for each in zip(*own[stage :: mesh.stages], strict=True)] for stage in range(mesh.stages)
            ]
            cut = balanced_cut(unit_costs(model, length, tried, means), bounds, micro_batches, allowed, is_eager)
            if cut is None:
                continue
            slowest = [
                slowest_stage_s(unit_costs(model, length, tried, own[first : first + mesh.stages]), cut)
                for first in range(0, mesh.ranks, mesh.stages)
            ]
            counts = shares(micro_batches, mesh.stages, slowest)
            step_s = max((count + mesh.stages - 1) * each for count, each in zip(counts, slowest, strict=True))
            found.append((step_s, Agreement(cut, tried, counts, max(slowest), is_eager)))
        if found:
            return min(found, key=lambda each: each[0])[1]
    raise DeviceError(
        f"No cut of the run's model into {Mesh(mesh.stages)} fits the free memory of the devices.",
        "Close other programs that use them, or name more devices.",
    )
