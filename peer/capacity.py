"""Whether this machine can hold the run's model at all, asked before anything large is allocated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.recipes import RECIPES
from p2ptrain.train.autofit import cpu_micro_batch, cpu_sequence_bytes

HOST_BYTES = 28
"""Host memory per parameter, at least, in fp32: slow weights and momentum, old and new of both during an outer step,
and the weights as they are built. A machine with less than this in all cannot take part whatever else it does."""

SHOWN_BYTES = 8
"""More of it where partners get the fast weights: the copy that they get now, and the next one while it is made."""

CPU_BYTES = 12
"""More of it when the host is also the device: gradients and AdamW's two moments. Activations come on top."""

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows what containers and slices may use."""
OWN_CGROUP = Path("/proc/self/cgroup")

_ALLOCATOR = "DefaultCPUAllocator"
"""In torch's plain RuntimeError where the host has no memory left."""


def check_memory(manifest: Manifest, device: torch.device, installed_bytes: int | None = None) -> None:
    """Raise DeviceError when the model cannot fit.

    Args:
        installed_bytes: the memory that we may use; None: ask the operating system.
    """
    parameters = parameter_count(manifest.model)
    shows_fast = RECIPES[manifest.outer.recipe].mix("fast") is not None
    each = HOST_BYTES + (SHOWN_BYTES if shows_fast else 0) + (CPU_BYTES if device.type == "cpu" else 0)
    needed = parameters * each
    if device.type == "cpu":
        training = manifest.training
        needed += cpu_micro_batch(manifest.model, training) * cpu_sequence_bytes(manifest.model, training)
    there = installed_memory() if installed_bytes is None else installed_bytes
    if needed > there:
        raise DeviceError(
            f"The run's model has {parameters:,} parameters and needs at least {needed / 1e9:.1f} GB of memory, and "
            f"this machine has {there / 1e9:.1f} GB.",
            "Join from a machine with more memory, or join a run with a smaller model.",
        )


def installed_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """This machine's memory in bytes; less where a container or a slice leaves us less of it."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    """Those of our control group and of the ones around it, versions 2 and 1 (man 7 cgroups)."""
    try:
        memberships = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # no Linux
        return
    for _, controllers, path in memberships:
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        group = root / path.lstrip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                yield int((each / name).read_text())


@contextlib.contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Running out of memory in this block is told as a DeviceError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _ALLOCATOR not in str(error):
            raise
        raise DeviceError(
            f"The run's model does not fit the memory that is free on {device}.",
            "Close other programs that use it, or take another device with --device.",
        ) from error
