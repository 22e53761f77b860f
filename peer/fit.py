"""Whether this machine can hold the run's model at all, asked before anything large is allocated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from p2ptrain.errors import DeviceError
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.recipes import RECIPES

HOST_BYTES = 28
"""Host memory per parameter, at least, in fp32: slow weights and momentum, old and new of both during an outer step,
and the weights as they are built. A machine with less than this in all cannot take part whatever else it does."""

SHOWN_BYTES = 8
"""More of it where partners get the fast weights: the copy that they get now, and the next one while it is made."""

CPU_BYTES = 12
"""More of it when the host is also the device: gradients and AdamW's two moments."""


def check_memory(manifest: Manifest, device: torch.device, installed_bytes: int | None = None) -> None:
    """Raise DeviceError when the model cannot fit.

    Args:
        installed_bytes: this machine's memory; None: ask the operating system.
    """
    parameters = parameter_count(manifest.model)
    shows_fast = RECIPES[manifest.outer.recipe].mix("fast") is not None
    each = HOST_BYTES + (SHOWN_BYTES if shows_fast else 0) + (CPU_BYTES if device.type == "cpu" else 0)
    needed = parameters * each
    there = installed_memory() if installed_bytes is None else installed_bytes
    if needed > there:
        raise DeviceError(
            f"The run's model has {parameters:,} parameters and needs at least {needed / 1e9:.1f} GB of memory, and "
            f"this machine has {there / 1e9:.1f} GB.",
            "Join from a machine with more memory, or join a run with a smaller model.",
        )


def installed_memory() -> int:
    """This machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Running out of memory in this block is told as a DeviceError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceError(
            f"The run's model does not fit the memory that is free on {device}.",
            "Close other programs that use it, or take another device with --device.",
        ) from error
