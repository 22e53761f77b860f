"""Checks of this machine alone. Each returns a finding; ``command`` turns what it raises into one."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

from p2ptrain.base import cgroups
from p2ptrain.base.system_tool import ToolError, output_of
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.tokens.store import ShardStore
from peer.doctor.findings import Finding, bad, note, ok

AMD_BYTES = 6_000_000_000
"""Memory from which a chip of AMD is taken for a card. Guess: what chips inside processors get."""


def device(name: str) -> Finding:
    """Report the devices that would train, or a GPU that torch cannot use. Raises DeviceError."""
    import torch

    from p2ptrain.train import accelerator
    from peer.training.devices import choose_devices

    chosen = choose_devices(name, tries=True)
    driver = _driver()
    cards = [
        f"{accelerator.product_name(each)}, {accelerator.total_bytes(each) / 1e9:.1f} GB"
        for each in chosen
        if each.type != "cpu"
    ]
    if cards:
        return ok("device", "; ".join(cards) + (f"; driver {driver[1]}" if driver and chosen[0].type == "cuda" else ""))
    found = f"CPU, {cgroups.usable_cpus()} cores"
    if name != "auto":
        return ok("device", found)
    unused = f"{found}; this torch ({torch.__version__}) does not use the"
    slow = "Training on the CPU works, but is slow."
    if driver is not None:
        fix = (
            "Install a torch build for that driver (pytorch.org, Get Started)."
            if torch.version.cuda is None
            else "Update the driver, or install a torch build for the present one."
        )
        return note("device", f"{unused} {driver[0]}, driver {driver[1]}", f"{fix} {slow}")
    if (memory_bytes := _amd_bytes()) >= AMD_BYTES:
        fix = f"Install a torch build for ROCm (pytorch.org, Get Started). {slow}"
        return note("device", f"{unused} card of AMD with {memory_bytes / 1e9:.1f} GB", fix)
    return ok("device", found)


def memory(manifest: Manifest | None, name: str, allowed_bytes: float, stages: int | None = None) -> Finding:
    """Check that the run's model fits the memory of this machine and what the owner allows in settings.toml.

    Raises DeviceError if it does not fit.
    """
    from p2ptrain.train.memory import activation_bytes, installed_memory
    from peer.training.devices import choose_devices, mesh_of

    there = f"{installed_memory() / 1e9:.1f} GB"
    if manifest is None:
        return ok("memory", f"{there}; give a join LINK to check what its run needs")
    arranged = ""
    devices = choose_devices(name, tries=True)
    if len(devices) > 1 or (stages or 1) > 1:
        mesh = mesh_of(manifest, devices, stages, min(allowed_bytes, installed_memory()))
        arranged = f", in {mesh}"
    else:
        activation_bytes(manifest, devices[0], allowed_bytes)
    return ok("memory", f"{there}, enough for the run's {parameter_count(manifest.model):,} parameters{arranged}")


def disk(home: Path, store: ShardStore, manifest: Manifest | None) -> Finding:
    """Check the space for checkpoints in the home and for the run's text, as a peer does at its start.

    Raises HomeError if not even one checkpoint fits.
    """
    from peer.messages import size
    from peer.space import SPARE_BYTES, check_space, room, text_bytes

    (place, free), (beside, its_free) = room(home), room(store.directory)
    if free is None:
        return bad("disk", f"{place} is not writable", "Choose a directory that you can write to, with --home.")
    if its_free is None:
        return bad("disk", f"{beside} is not writable", "Set XDG_CACHE_HOME to a directory that you can write to.")
    there = f"{size(free)} free at {place}"
    if manifest is None and free < SPARE_BYTES:
        return bad("disk", there, f"Free {size(SPARE_BYTES - free)} there, or choose another disk with --home.")
    if manifest is not None and (warnings := check_space(home, manifest, store, text_bytes(None))):
        found, _, fix = " ".join(f"{each}." for each in warnings).partition(". ")
        return bad("disk", found, fix)
    return ok("disk", there)


def port(host: str, number: int, is_named: bool) -> Finding:
    """Check that a port is free; if not, the finding is BAD only for a port that the owner named."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            words = f"cannot listen on TCP port {number}: {error.strerror}"
            if not is_named:
                return note("port", f"{words}; a peer without --listen uses another one")
            listing = f"lsof -iTCP:{number}" if sys.platform == "darwin" else f"ss -ltnp sport = :{number}"
            fix = f"Stop the other program ({listing} names it), or choose another port above 1023 with --port."
            return bad("port", words, fix)
    return ok("port", f"TCP port {number} is free")


def _amd_bytes(root: Path = Path("/sys/class/drm")) -> int:
    """Return the memory of the largest card of AMD, from Linux's driver amdgpu; 0 if there is none."""
    found = [0]
    for path in root.glob("card[0-9]*/device/mem_info_vram_total"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return max(found)


def _driver() -> tuple[str, str] | None:
    """Return the name and driver of the first NVIDIA GPU, from nvidia-smi; None if there is none."""
    try:
        answer = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except ToolError:
        return None
    name, _, driver = (answer.splitlines() or [""])[0].partition(", ")
    return (name, driver) if name else None
