"""Names of a peer's devices, and the checks that a run can be trained on them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from p2ptrain.base.device_names import DEVICES_NAME, DEVICES_WORDS
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest
from p2ptrain.outer.fragments import layer_slices, stage_starts
from p2ptrain.train import accelerator
from p2ptrain.train.replicas import Mesh
from p2ptrain.train.stages import divisors_down
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


def check_team(
    manifest: Manifest, devices: Sequence[torch.device], stages: int | None, memory_bytes: float, others: int = 0
) -> Mesh:
    """Return the mesh of a team on these devices. Raises DeviceError if it cannot train the run in so much host memory.

    Args:
        stages: of the pipeline; None: as many as possible, since each holds the less.
        others: ranks on other computers, whose memory is not known before they join. All ranks are then stages.
    """
    ranks, sequences = len(devices) + others, manifest.training.sequences_per_step
    if ranks > sequences:
        raise DeviceError(
            f"The run's inner steps have {sequences} sequences, too few for a team of {ranks} devices.",
            f"Use at most {sequences}.",
        )
    most, why = _most_stages(manifest)
    possible = [each for each in divisors_down(ranks) if each <= most]
    if others:
        if ranks > most:
            raise DeviceError(f"{why}, too few for a team of {ranks} devices.", f"Use at most {most}.")
        if stages not in (None, ranks):
            raise DeviceError("A team on several computers has as many stages as devices.", "Omit --stages.")
        return Mesh(ranks)
    stages = possible[0] if stages is None else stages
    words = ", ".join(map(str, reversed(possible)))
    remedy = f"Choose the number of stages among {words}."
    if ranks % stages:
        raise DeviceError(f"{stages} stages do not divide {ranks} device{'s' if ranks > 1 else ''}.", remedy)
    if stages > most:
        raise DeviceError(f"{why}, too few for {stages} stages.", remedy)
    mesh = Mesh.of(ranks, stages)
    places = [_place(each) for each in devices]
    try:
        check_team_memory(manifest, places, int(memory_bytes), mesh.replicas)
    except DeviceError as error:
        if stages < possible[0] or most >= ranks or not _shared_fits(manifest, places, int(memory_bytes)):
            raise
        raise DeviceError(
            f"{error.problem} {why}, so {ranks} devices hold the model {mesh.replicas} times instead of sharing it.",
            "Use larger devices or fewer, or join a run whose author set outer.cut to layers with enough fragments.",
        ) from None
    return mesh


def _shared_fits(manifest: Manifest, places: Sequence[StagePlace], memory_bytes: int) -> bool:
    """Return whether devices have the memory for the model if each has a stage."""
    with contextlib.suppress(DeviceError):
        check_team_memory(manifest, places, memory_bytes)
        return True
    return False


def _most_stages(manifest: Manifest) -> tuple[int, str]:
    """Return the most stages of a pipeline that trains the run, and what limits them."""
    outer, units, blocks = manifest.outer, manifest.model.unit_parameters(), manifest.model.config.num_hidden_layers
    if outer.cut != "layers":
        return 1, f"This run cuts its weights without regard to layers (outer.cut is {outer.cut!r})"
    starts = stage_starts(units, layer_slices(units, outer.fragments))
    return min(
        (blocks, f"The run's model has {blocks} layers"),
        (max(1, len(starts)), f"The run's {outer.fragments} fragments begin with {len(starts)} of the model's layers"),
    )


def _place(device: torch.device) -> StagePlace:
    if device.type == "cpu" or accelerator.shares_host_memory(device):
        return StagePlace(str(device))
    return StagePlace(str(device), accelerator.free_bytes(device))


def rank_threads(devices: Sequence[torch.device]) -> int:
    """Return the threads of each rank: an equal share of those that a single process would use."""
    return max(1, torch.get_num_threads() // max(1, sum(each.type == "cpu" for each in devices)))
