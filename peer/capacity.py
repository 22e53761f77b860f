"""Checks that the run's model fits this machine's memory, before anything large is allocated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from p2ptrain.base import cgroups
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import SETTINGS_FILE, Manifest, parameter_count
from p2ptrain.recipes import RECIPES
from p2ptrain.train.autofit import CPU_ACTIVATION_BYTES, cpu_micro_batch, cpu_sequence_bytes

HOST_BYTES = 28
"""Minimum host memory in bytes per parameter, in fp32: slow weights and momentum, old and new during an outer step,
and the weights while they are built."""

SHOWN_BYTES = 8
"""Additional bytes per parameter if partners get the fast weights: the current copy, and the next one in the making."""

CPU_BYTES = 12
"""Additional bytes per parameter on the CPU: gradients and AdamW's two moments. Activations come on top."""

BASE_BYTES = 500_000_000
"""Host memory in bytes of Python and torch without a model: 0.6 GB for the demo's peer (our measurement)."""

COMPILER_BYTES = 800_000_000
"""Host memory in bytes of the compiler's process and of g++ without weights: for llama-15m (our measurement)."""

COMPILED_COPIES = 3
"""Weights and two gradients, with which that process tries what it made."""

_ALLOCATOR = "DefaultCPUAllocator"
"""Marker in torch's plain RuntimeError when host memory is exhausted."""


def check_memory(manifest: Manifest, device: torch.device, installed_bytes: int | None = None) -> None:
    """Raise DeviceError if the model cannot fit ``installed_bytes``, or by default what this process may use."""
    parameters, needed = parameter_count(manifest.model), _state_bytes(manifest, device)
    if device.type == "cpu":
        training = manifest.training
        needed += cpu_micro_batch(manifest.model, training) * cpu_sequence_bytes(manifest.model, training)
    there = installed_memory() if installed_bytes is None else installed_bytes
    if needed > there:
        raise DeviceError(
            f"The run's model has {parameters:,} parameters and needs at least {needed / 1e9:.1f} GB of memory, but "
            f"this machine has {there / 1e9:.1f} GB.",
            "Join from a machine with more memory, or join a run with a smaller model.",
        )


def activation_bytes(manifest: Manifest, device: torch.device, allowed_bytes: float) -> int:
    """Return the host memory for activations if the peer may use ``allowed_bytes``; of no use with a card.

    Raises DeviceError if the model needs more, with one sequence at once.
    """
    fixed = BASE_BYTES + _state_bytes(manifest, device)
    one = cpu_sequence_bytes(manifest.model, manifest.training) if device.type == "cpu" else 0
    if fixed + one > allowed_bytes:
        raise DeviceError(
            f"The run's model needs at least {(fixed + one) / 1e9:.1f} GB of memory with Python and torch, but "
            f"memory_gb in {SETTINGS_FILE} allows {allowed_bytes / 1e9:g} GB.",
            "Raise memory_gb, or join a run with a smaller model.",
        )
    return int(min(CPU_ACTIVATION_BYTES, allowed_bytes - fixed))


def _state_bytes(manifest: Manifest, device: torch.device) -> int:
    """Return the host memory of weights, momentum and moments in bytes."""
    shows_fast = RECIPES[manifest.outer.recipe].mix("fast") is not None
    each = HOST_BYTES + (SHOWN_BYTES if shows_fast else 0) + (CPU_BYTES if device.type == "cpu" else 0)
    return parameter_count(manifest.model) * each


def installed_memory(root: Path = cgroups.ROOT) -> int:
    """Return this machine's memory in bytes, or the smaller limit of a container or slice."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cgroups.limits(root).memory_bytes))


def compiler_fault(manifest: Manifest, micro_batch: int, allowed_bytes: float) -> str:
    """Return why the compiler of the training step does not fit into memory beside this peer; "" if it does."""
    weights = 4 * COMPILED_COPIES * parameter_count(manifest.model)
    needed = COMPILER_BYTES + weights + micro_batch * cpu_sequence_bytes(manifest.model, manifest.training)
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
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _ALLOCATOR not in str(error):
            raise
        raise DeviceError(
            f"The run's model does not fit the free memory of {device}.",
            "Close other programs that use it, or choose another device with --device.",
        ) from error
