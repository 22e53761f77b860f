"""What the ranks of a team agree on before they train: autocast type, micro-batch, and where the model is cut.

All ranks compute the same from the same gathered numbers, so nobody decides for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest
from p2ptrain.outer.fragments import layer_slices, stage_starts
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import CARD_MEMORY_FRACTION, Placement, cpu_placement
from p2ptrain.train.stage_costs import unit_costs, unit_seconds
from p2ptrain.train.stages import StageRange, balanced_cut, divisors_down, fitting_micro_batch, stages_at
from p2ptrain.train.team_group import TeamGroup

PIPELINED = 4
"""Micro-batches of a step per stage, at least, if the sequences allow it: 1F1B then idles for 1 / (4 + 1) of the time
at most. Guess: tokens per second of cards with larger and fewer micro-batches would settle it."""
NO_LIMIT = -1.0
TYPES = (None, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Agreement:
    stages: tuple[StageRange, ...]
    placement: Placement


def agree(
    group: TeamGroup,
    manifest: Manifest,
    device: torch.device,
    activation_bytes: int,
    most_sequences: int,
    starts: Sequence[int],
) -> Agreement:
    """Measure this rank's device and return what all ranks agree on, a collective. Raises DeviceError and TeamError.

    Args:
        activation_bytes, most_sequences, starts: as in ``RankPlan``.
    """
    own = [float(TYPES.index(_type_of(device))), float(_most_at_once(manifest, device, activation_bytes))]
    types, most = group.gather("agreement: types", torch.tensor(own, dtype=torch.float64)).view(-1, 2).unbind(1)
    autocast = TYPES[int(types[0])] if len(set(types.tolist())) == 1 else None
    placement = Placement(autocast, _micro_batch(manifest, group.size, min(most_sequences, int(most.min()))))
    if starts:
        return Agreement(stages_at(starts, manifest.model.config.num_hidden_layers), placement)
    seconds, limits = _measured(group, manifest, device, placement)
    return _balanced(manifest, placement, seconds, limits)


def _type_of(device: torch.device) -> torch.dtype | None:
    """Return the type in which a device computes matrix products fast; None: fp32."""
    if device.type == "cpu":
        return None
    half = accelerator.half_type(device)
    return half if accelerator.autocasts(device, half) else None


def _most_at_once(manifest: Manifest, device: torch.device, activation_bytes: int) -> int:
    if device.type != "cpu":
        return manifest.training.sequences_per_step
    return cpu_placement(manifest.model, manifest.training, activation_bytes).micro_batch


def _micro_batch(manifest: Manifest, ranks: int, most: int) -> int:
    """Return the largest micro-batch up to ``most`` that keeps the pipeline full, or the nearest to it."""
    sequences = manifest.training.sequences_per_step
    filling = fitting_micro_batch(sequences, most, PIPELINED * ranks)
    found = filling or fitting_micro_batch(sequences, 1, ranks)
    if found is None:
        raise DeviceError(
            f"The run has {sequences} sequences per inner step, too few for a pipeline of {ranks} devices.",
            f"Use at most {sequences} devices.",
        )
    return found


def _measured(
    group: TeamGroup, manifest: Manifest, device: torch.device, placement: Placement
) -> tuple[list[list[float]], list[int | None]]:
    """Return the seconds of each unit and the memory limit of each rank's device; one rank at a time measures."""
    length, own = manifest.training.sequence_length, list[float]()
    for rank in range(group.size):
        measures = rank == group.rank

        def measure(measures: bool = measures) -> list[float]:
            return unit_seconds(manifest.model, length, placement, device) if measures else []

        own = group.together(f"trial on rank {rank}", measure) or own
    free = accelerator.free_bytes(device) if device.type != "cpu" else None
    limit = NO_LIMIT if free is None else CARD_MEMORY_FRACTION * free
    rows = group.gather("agreement: trials", torch.tensor([*own, limit], dtype=torch.float64)).view(group.size, -1)
    limits = [None if row[-1] == NO_LIMIT else int(row[-1]) for row in rows.tolist()]
    return rows[:, :-1].tolist(), limits


def _balanced(
    manifest: Manifest, placement: Placement, seconds: Sequence[Sequence[float]], limits: Sequence[int | None]
) -> Agreement:
    """Return the cut whose slowest stage is fastest, with the largest micro-batch that fits all devices."""
    training, units = manifest.training, manifest.model.unit_parameters()
    starts = stage_starts(units, layer_slices(units, manifest.outer.fragments))
    for way in _smaller(placement, training.sequences_per_step):
        costs = unit_costs(manifest.model, training.sequence_length, way, seconds)
        cut = balanced_cut(costs, limits, training.sequences_per_step // way.micro_batch, starts)
        if cut is not None:
            return Agreement(cut, way)
    raise DeviceError(
        f"No cut of the run's model into {len(limits)} stages fits the free memory of the devices.",
        "Close other programs that use them, or name more devices.",
    )


def _smaller(placement: Placement, sequences: int) -> Iterator[Placement]:
    """Yield placements with smaller and smaller micro-batches, then with recomputed activations."""
    sizes = [each for each in divisors_down(sequences) if each <= placement.micro_batch]
    for recomputes in (False, True):
        for size in sizes:
            yield Placement(placement.autocast, size, recomputes)
