"""Checks that the run's model fits this machine's memory, before anything large is allocated."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from p2ptrain.base import cgroups
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import SETTINGS_FILE, Manifest, parameter_count
from p2ptrain.outer.fragments import layer_slices
from p2ptrain.recipes import RECIPES, Recipe
from p2ptrain.train.accelerator import is_out_of_memory, shares_host_memory
from p2ptrain.train.activations import pass_bytes
from p2ptrain.train.autofit import CPU_ACTIVATION_BYTES

HOST_BYTES = 12
"""Minimum host memory in bytes per parameter, in fp32: slow weights, momentum, and the new slow weights of an outer
step while partners may still download the old ones."""

FRAGMENT_BYTES = 12
"""Additional bytes per parameter of one fragment: pseudo-gradient, update and new momentum."""

SHOWN_BYTES = 4
"""Additional bytes per parameter if partners get the fast weights: a copy."""

PHASE_BYTES = 28
"""Bytes per parameter, instead of all these, if the recipe waits for partners or mixes pseudo-gradients: these and the
states before and after the outer step are kept for all fragments."""

CPU_BYTES = 16
"""Additional bytes per parameter on the CPU and on chips that share its memory: fast weights, gradient and AdamW's two
moments. Activations come on top."""

BASE_BYTES = 500_000_000
"""Host memory in bytes of Python and torch without a model: 0.6 GB for the demo's peer (our measurement)."""

HEAP = 1.4
"""Resident memory over live bytes of tensors: 1.2 to 1.45 (our measurement, three presets). glibc keeps freed blocks; a
lower M_MMAP_THRESHOLD returns them, at 38 % more time for llama-15m."""

RECOMPUTED_HEAP = 3.0
"""``HEAP`` if activations are recomputed: 2.9 and 3 (our measurement, llama-15m and llama-135m)."""

COMPILER_BYTES = 800_000_000
"""Host memory in bytes of the compiler's process and of g++ without weights: for llama-15m (our measurement)."""

COMPILED_COPIES = 3
"""Weights and two gradients, with which that process tries what it made."""


def check_memory(manifest: Manifest, device: torch.device, installed_bytes: int | None = None) -> None:
    """Raise DeviceError if the model cannot fit ``installed_bytes``, or by default what this process may use."""
    needed = _state_bytes(manifest, device)
    if shares_host_memory(device):
        needed += _least_activation_bytes(manifest)
    _check(manifest, needed, installed_bytes)


def check_ranks(manifest: Manifest, devices: Sequence[torch.device], stages: int, installed_bytes: int) -> None:
    """Raise DeviceError if the ranks of this computer need more of the host's memory; ranks check cards themselves.

    The host holds the outer state once, and for each rank without a card a stage's inner state, with the activations
    of as many sequences as stages follow. Before that each rank draws the initial weights of the whole model.
    """
    whole, kept = parameter_count(manifest.model), pass_bytes(manifest.model, manifest.training.sequence_length)
    replicas = sum(each.type in ("cpu", "mps") for each in devices) / stages
    inner = CPU_BYTES * whole + HEAP * kept * (stages + 1) / 2
    drawn = 4 * whole * len(devices)
    needed = len(devices) * BASE_BYTES + max(drawn, _outer_bytes(manifest) + replicas * inner)
    _check(manifest, needed, installed_bytes)


def _check(manifest: Manifest, needed: float, installed_bytes: int | None) -> None:
    there = installed_memory() if installed_bytes is None else installed_bytes
    if needed > there:
        raise DeviceError(
            f"The run's model has {parameter_count(manifest.model):,} parameters and needs at least "
            f"{needed / 1e9:.1f} GB of memory, but this machine has {there / 1e9:.1f} GB.",
            "Join from a machine with more memory, or join a run with a smaller model.",
        )


def activation_bytes(
    manifest: Manifest, device: torch.device, allowed_bytes: float, installed_bytes: int | None = None
) -> int:
    """Return the host memory for activations if the peer may use ``allowed_bytes``; of no use with a card.

    More than CPU_ACTIVATION_BYTES only if one sequence needs it to keep its activations, and there is as much. Raises
    DeviceError if the model needs more than is allowed, with one sequence at once and activations recomputed.
    """
    fixed = BASE_BYTES + _state_bytes(manifest, device)
    one = _least_activation_bytes(manifest) if shares_host_memory(device) else 0
    if fixed + one > allowed_bytes:
        raise DeviceError(
            f"The run's model needs at least {(fixed + one) / 1e9:.1f} GB of memory with Python and torch, but "
            f"memory_gb in {SETTINGS_FILE} allows {allowed_bytes / 1e9:g} GB.",
            "Raise memory_gb, or join a run with a smaller model.",
        )
    there = installed_memory() if installed_bytes is None else installed_bytes
    kept = pass_bytes(manifest.model, manifest.training.sequence_length)
    return int(min(max(CPU_ACTIVATION_BYTES, kept), (min(allowed_bytes, there) - fixed) / HEAP))


def _least_activation_bytes(manifest: Manifest) -> int:
    """Return the resident memory of one sequence's activations, recomputed if that takes less."""
    kept, recomputed = (
        pass_bytes(manifest.model, manifest.training.sequence_length, recomputes=each) for each in (False, True)
    )
    return int(min(HEAP * kept, RECOMPUTED_HEAP * recomputed))


def host_bytes(recipe: Recipe, fragments: float) -> float:
    """Return the most bytes per parameter that the outer state of a peer takes, on the host for any device.

    Args:
        fragments: all weights over those of the longest fragment.
    """
    if recipe.blocks or recipe.mix("pseudo_gradient") is not None:
        return PHASE_BYTES
    shown = SHOWN_BYTES if recipe.mix("fast") is not None else 0
    return HOST_BYTES + FRAGMENT_BYTES / fragments + shown


def _state_bytes(manifest: Manifest, device: torch.device) -> int:
    """Return the host memory of weights, momentum and moments in bytes."""
    inner = CPU_BYTES * parameter_count(manifest.model) if shares_host_memory(device) else 0
    return math.ceil(_outer_bytes(manifest) + inner)


def _outer_bytes(manifest: Manifest) -> float:
    """Return the host memory of the outer state in bytes."""
    outer = manifest.outer
    fragments: float = outer.fragments
    if outer.cut == "layers":
        pieces = layer_slices(manifest.model.unit_parameters(), outer.fragments)
        fragments = parameter_count(manifest.model) / max(piece.stop - piece.start for piece in pieces)
    return parameter_count(manifest.model) * host_bytes(RECIPES[outer.recipe], fragments)


def installed_memory(root: Path = cgroups.ROOT) -> int:
    """Return this machine's memory in bytes, or the smaller limit of a container or slice."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cgroups.limits(root).memory_bytes))


def compiler_fault(manifest: Manifest, device: torch.device, micro_batch: int, allowed_bytes: float) -> str:
    """Return why the compiler of the training step does not fit into host memory beside this peer; "" if it does."""
    needed = float(COMPILER_BYTES)
    if shares_host_memory(device):
        training = manifest.training
        needed += 4 * COMPILED_COPIES * parameter_count(manifest.model)
        needed += HEAP * pass_bytes(manifest.model, training.sequence_length, micro_batch)
    ours = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available, min(installed_memory(), allowed_bytes) - ours)
    if needed <= free:
        return ""
    return f"the compiler needs {needed / 1e9:.1f} GB of memory, and {max(0.0, free) / 1e9:.1f} GB are free"


@contextlib.contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Convert running out of memory in this block to a DeviceError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"The run's model does not fit the free memory of {device}.",
            "Close other programs that use it, or choose another device with --device.",
        ) from error
