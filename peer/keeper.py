"""A node without a trainer: a keeper, which holds some fragments of the model for others (``swarm.keeping``).

It builds no model, reads no text and needs the memory of its fragments alone. Everything else is as for a peer that
trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from p2ptrain.base.errors import DeviceError, HomeError, UserError
from p2ptrain.host.keeper import Keeper
from p2ptrain.host.rules import codecs_of, fragments_of, matrices_of
from p2ptrain.host.tasks import TaskFigures
from p2ptrain.manifest import SignedManifest
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import NOT_READ, GoesOn, HeldOutLoss
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import keeping
from p2ptrain.train.memory import BASE_BYTES, installed_memory
from p2ptrain.train.model import shape_module
from peer.home import Home
from peer.start_options import StartOptions

LIVE_COPIES = 3
"""Copies of the kept weights that may be live at once: those published, those of a download or of a snapshot that a
newcomer takes, and displacements on their way."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class KeeperTask:
    """A keeper's ``PeerTask``: it computes nothing."""

    figures: TaskFigures

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        return NOT_READ

    def sample(self, new_tokens: int) -> str:
        return ""


def held_of(text: str, fragments: int) -> frozenset[int]:
    """Return the fragments that ``--keep`` names, of a run with so many. Raises UserError."""
    if text == ALL:
        return frozenset(range(fragments))
    held = parsed(text)
    if max(held) >= fragments:
        raise UserError(
            f"--keep {text}: this run has only the fragments 0 to {fragments - 1}.",
            f"Name some of these, such as --keep 0-{max(fragments // 2 - 1, 0)}, or --keep {ALL}.",
        )
    return held


def parsed(text: str) -> frozenset[int]:
    """Return the fragments in a text. Raises UserError."""
    try:
        return keeping.parse(text)
    except ValueError as error:
        raise UserError(
            f"--keep {text}: {error}.", f"Name fragments of the model, such as --keep 0-3, or --keep {ALL}."
        ) from None


def check_options(given: StartOptions, kept: str, home: Home) -> None:
    """Raise UserError if this start's options are of a peer that trains, but its home keeps fragments."""
    if given.keep is None and any(each is not None for each in (given.device, given.stages, given.team, given.at)):
        raise UserError(
            f"The peer in {home.path} keeps fragments {kept} and does not train.",
            "Omit --device, --devices, --stages, --team and --at, or use another --home to train.",
        )


def check_run(signed: SignedManifest) -> None:
    """Raise UserError if fragments of this run cannot be kept."""
    outer = signed.manifest.outer
    if RECIPES[outer.recipe].can_be_kept and outer.topology == "random":
        return
    raise UserError(
        f"Nobody can keep fragments of this run: with recipe {outer.recipe} and topology {outer.topology}, peers "
        "exchange by plan or more than weights.",
        "Join without --keep, or keep fragments of a run with recipe swarm.",
    )


def keeper_of(signed: SignedManifest, kept: str, memory_bytes: float) -> Keeper:
    """Return the learner of a node that keeps fragments of a run that ``check_run`` admits. Raises UserError.

    Args:
        kept: as ``--keep``.
        memory_bytes: memory that the owner lends.
    """
    manifest = signed.manifest
    held = held_of(kept, manifest.outer.fragments)
    layout = FlatLayout.of(shape_module(manifest.model))
    fragments = fragments_of(manifest.outer, layout)
    check_memory(sum(fragments[each].stop - fragments[each].start for each in held), memory_bytes)
    codec, _ = codecs_of(manifest.codec)
    return Keeper(fragments, held, codec, matrices_of(layout, fragments), RECIPES[manifest.outer.recipe])


def check_memory(weights: int, memory_bytes: float) -> None:
    """Raise DeviceError if so many kept weights do not fit into this machine's memory."""
    needed, there = BASE_BYTES + 4 * LIVE_COPIES * weights, min(memory_bytes, installed_memory())
    if needed > there:
        raise DeviceError(
            f"These fragments take {needed / 1e9:.1f} GB of memory while they are exchanged, but this machine has "
            f"{there / 1e9:.1f} GB.",
            "Keep fewer fragments.",
        )


def check_checkpoint(state: Mapping[str, Any], held: frozenset[int] | None, home: Home) -> None:
    """Raise HomeError if a checkpoint's state is not of what this start keeps; ``held`` None: of a peer that trains."""
    kept = kept_in(state)
    if held is None and kept is not None:
        raise HomeError(
            f"The checkpoints in {home.checkpoints} are those of a keeper, which has a part of the model.",
            "Give the same --keep as before, or use another --home to train.",
        )
    if held is not None and state.get("kept") != [list(each) for each in keeping.ranges_of(held)]:
        what = "a peer that trains" if kept is None else f"a keeper of fragments {kept}"
        raise HomeError(
            f"The checkpoints in {home.path} are those of {what}.",
            "Use another --home, or give the same --keep as before.",
        )


def kept_in(state: Mapping[str, Any]) -> str | None:
    """Return the fragments of a keeper's checkpoint in words; None for one of a peer that trains."""
    with suppress(TypeError, ValueError, KeyError):
        return keeping.words(keeping.fragments_in(tuple((first, last) for first, last in state["kept"])))
    return None
