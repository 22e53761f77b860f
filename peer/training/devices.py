"""Names of a peer's devices, and the checks that a run can be trained on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p2ptrain.base.device_names import DEVICES_NAME, DEVICES_WORDS
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import Manifest
from p2ptrain.train import accelerator
from p2ptrain.train.memory import check_ranks
from p2ptrain.train.ranks import Mesh
from p2ptrain.train.stages import divisors_down


def choose_devices(names: str, tries: bool = False) -> list[torch.device]:
    """Return the devices of these names, separated by commas, in their order; ``all``: all cards of one kind.

    Raises DeviceError if one is missing or named twice; the CPU may be.

    Args:
        tries: whether they are used, which takes memory of cards until this process ends; else they are counted. Also
            raises DeviceError if one is unusable.
    """
    names = names.replace(" ", "")
    if DEVICES_NAME.fullmatch(names) is None:
        raise DeviceError(f"There is no device {names!r}.", f"Name devices as follows: {DEVICES_WORDS}.")
    parts = names.split(",")
    if len(parts) > 1 and "auto" in parts:
        raise DeviceError(f"{names!r} lets this machine choose one of several devices.", "Name each device.")
    if names == "all":
        parts = _all_cards()
    choose = accelerator.choose_device if tries else accelerator.expected_device
    chosen = [choose(name) for name in reversed(parts)][::-1]  # the first one last: it is current
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


def other_ranks(team: int | None, at: str | None, devices: Sequence[torch.device]) -> int:
    """Return how many ranks other computers of the owner bring, one each. Raises DeviceError if that is not clear."""
    if team is None and at is None:
        return 0
    if team is None or at is None:
        raise DeviceError(
            "--team and --at belong together: how many devices, and where other computers reach this one.",
            "Give both, as --team 2 --at 192.168.1.5, or neither.",
        )
    if team <= len(devices):
        raise DeviceError(
            f"--team {team} leaves no place for another computer, since this one has {len(devices)} devices.",
            f"Give --team {len(devices) + 1} for one more, or omit --team and --at.",
        )
    return team - len(devices)


def mesh_of(
    manifest: Manifest, devices: Sequence[torch.device], stages: int | None, memory_bytes: float, others: int = 0
) -> Mesh:
    """Return the mesh of the ranks. Raises DeviceError if they cannot train the run.

    Args:
        devices: of this computer.
        stages: of a replica; None: as many as possible, since each holds the less.
        memory_bytes: of this computer; that of others is not known.
        others: ranks on other computers.
    """
    ranks, sequences = len(devices) + others, manifest.training.sequences_per_step
    if ranks > sequences:
        raise DeviceError(
            f"The run's inner steps have {sequences} sequences, too few for {ranks} devices.",
            f"Use at most {sequences}.",
        )
    blocks = manifest.model.config.num_hidden_layers
    has_one_kind = len({each.type for each in devices}) == 1  # stages exchange activations
    possible = [each for each in divisors_down(ranks) if each <= blocks and (has_one_kind or each == 1)]
    stages = possible[0] if stages is None else stages
    choice = " or ".join(map(str, reversed(possible)))
    remedy = f"Give --stages {choice}."
    if ranks % stages:
        raise DeviceError(f"{stages} stages do not divide {ranks} device{'s' if ranks > 1 else ''}.", remedy)
    if stages > blocks:
        raise DeviceError(f"The run's model has {blocks} layers, too few for {stages} stages.", remedy)
    if stages not in possible:
        raise DeviceError("Stages on devices of several kinds cannot exchange activations.", remedy)
    mesh = Mesh.of(ranks, stages)
    if not others:
        check_ranks(manifest, devices, stages, int(memory_bytes))
    return mesh


def rank_threads(devices: Sequence[torch.device]) -> int:
    """Return torch's threads of each rank: an equal share of those that a single process would use."""
    return max(1, torch.get_num_threads() // max(1, sum(each.type == "cpu" for each in devices)))
