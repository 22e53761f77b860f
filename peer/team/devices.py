"""Names of a peer's devices, and the checks that a run can be trained on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2ptrain.base.device_names import DEVICES_NAME, DEVICES_WORDS
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest
from p2ptrain.outer.fragments import layer_slices, stage_starts
from p2ptrain.train import accelerator
from peer.capacity import StagePlace, check_team_memory


def choose_devices(names: str) -> list[torch.device]:
    """Return the devices of these names, separated by commas, in their order; ``all``: all cards of one kind.

    The first one becomes the current device of this thread. Raises DeviceError if one is missing, unusable or named
    twice; the CPU may be.
    """
    names = names.replace(" ", "")
    if DEVICES_NAME.fullmatch(names) is None:
        raise DeviceError(f"There is no device {names!r}.", f"Name devices as follows: {DEVICES_WORDS}.")
    parts = names.split(",")
    if len(parts) > 1 and "auto" in parts:
        raise DeviceError(f"{names!r} lets this machine choose one of several devices.", "Name each device.")
    if names == "all":
        parts = _all_cards()
    chosen = [accelerator.choose_device(name) for name in reversed(parts)][::-1]  # the first one last: it is current
    places = [(each.type, each.index or 0) for each in chosen]
    for device, place in zip(chosen, places, strict=True):
        if device.type != "cpu" and places.count(place) > 1:
            raise DeviceError(f"The device {device} is named twice in {names!r}.", "Name each card once.")
    return chosen


def _all_cards() -> list[str]:
    for kind in accelerator.KINDS:
        if found := accelerator.cards(kind):
            return [str(each) for each in found]
    raise DeviceError("This machine has no card that torch can use, so `all` names no device.", "Name the CPU: cpu.")


def check_team(manifest: Manifest, devices: Sequence[torch.device], memory_bytes: float, others: int = 0) -> None:
    """Raise DeviceError unless a team on these devices can train the run in so much host memory.

    Args:
        others: ranks on other computers, whose memory is not known before they join.
    """
    ranks, outer, sequences = len(devices) + others, manifest.outer, manifest.training.sequences_per_step
    if outer.cut != "layers":
        raise DeviceError(
            f"This run cuts its weights without regard to layers (outer.cut is {outer.cut!r}), so it trains on one "
            f"device, not on {ranks}.",
            'Name one device, or join a run whose manifest has outer.cut = "layers".',
        )
    units = manifest.model.unit_parameters()
    blocks, starts = manifest.model.config.num_hidden_layers, stage_starts(units, layer_slices(units, outer.fragments))
    most, why = min(
        (blocks, f"The run's model has {blocks} layers"),
        (sequences, f"The run's inner steps have {sequences} sequences"),
        (max(1, len(starts)), f"The run's {outer.fragments} fragments begin with {len(starts)} of the model's layers"),
    )
    if ranks > most:
        raise DeviceError(f"{why}, too few for a team of {ranks} devices.", f"Use at most {most}.")
    if not others:
        check_team_memory(manifest, [_place(each) for each in devices], int(memory_bytes))


def _place(device: torch.device) -> StagePlace:
    if device.type == "cpu" or accelerator.shares_host_memory(device):
        return StagePlace(str(device))
    return StagePlace(str(device), accelerator.free_bytes(device))


def rank_threads(devices: Sequence[torch.device]) -> int:
    """Return the threads of each rank: an equal share of those that a single process would use."""
    return max(1, torch.get_num_threads() // max(1, sum(each.type == "cpu" for each in devices)))
