"""Check of how fast this machine trains the run's model, and of what would make it faster."""

from __future__ import annotations

import torch

from p2ptrain.base import cgroups
from p2ptrain.manifest import Manifest
from p2ptrain.train.accelerator import choose_device, explained
from p2ptrain.train.autofit import Placement, place, trial_s
from p2ptrain.train.memory import CPU_ACTIVATION_BYTES, activation_bytes
from p2ptrain.train.model import flat_model
from peer.doctor.findings import Finding, note, ok


def check_speed(manifest: Manifest, name: str, allowed_bytes: float, threads: int) -> Finding:
    """Time a pass of the run's model on the device, as a peer would compute it. Takes its memory and some seconds.

    Args:
        name: the device's.
        allowed_bytes: host memory that the peer plans with.
        threads: the owner's number of CPU threads; 0: torch's.

    Raises DeviceError if the model does not fit.
    """
    device, training = choose_device(name), manifest.training
    cpu_bytes = activation_bytes(manifest, device, allowed_bytes)
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        with explained(device):
            model = flat_model(manifest.model, manifest.run.seed, device)
            how = place(model, manifest.model, training, cpu_bytes)
            seconds = trial_s(model, how, training.sequence_length)
            used = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    speed = how.micro_batch * training.sequence_length / seconds
    at_once = f"{how.micro_batch} of {training.sequences_per_step} sequences at once"
    at_once += ", activations computed twice to save memory" if how.recomputes else ""
    words = f"about {speed:,.0f} tokens/s without compiled code, in {how.computes_in}, {at_once}"
    fixes = faster(device, how, training.sequences_per_step, used, cpu_bytes)
    return note("speed", words, " ".join(fixes)) if fixes else ok("speed", words)


def faster(device: torch.device, how: Placement, sequences: int, threads: int, cpu_bytes: int) -> list[str]:
    """Return sentences on what would make training faster on this machine."""
    found = []
    if device.type == "cpu" and threads < (cpus := cgroups.usable_cpus()):
        found.append(f"Raise threads in settings.toml or OMP_NUM_THREADS: {threads} of {cpus} CPUs would train.")
    if device.type == "cpu" and how.micro_batch < sequences and cpu_bytes < CPU_ACTIVATION_BYTES:
        found.append("Raise memory_gb in settings.toml: more sequences at once are faster.")
    if device.type not in ("cpu", "mps") and how.micro_batch < sequences:
        found.append("Close other programs that use the card's memory: more sequences at once may be faster.")
    return found
