"""Disk space that a peer needs: in its home for checkpoints, in the cache for the run's tokens."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.data.corpus import has_stream, most_stream_bytes
from p2ptrain.manifest import Manifest, parameter_count
from peer.messages import size

CHECKPOINT_BYTES = 20
"""Disk space of a checkpoint in bytes per parameter: slow weights, momentum, fast weights and AdamW's two moments in
fp32."""
CHECKPOINTS = 3
"""Checkpoints that must fit: two that are kept (``checkpoint.store.KEPT``), and a third being written."""
TRAINED_BYTES = 4
"""Disk space in bytes per parameter of the weights that are saved when training ends."""


SPARE_BYTES = 1_000_000_000
"""Additional disk space of a home, for logs and everything else. Guess: its size after a long session."""


def check_space(home: Path, manifest: Manifest, cache: Path) -> list[str]:
    """Return warnings for the owner, each two sentences, on disks that will be full in the run.

    Raises HomeError if the disk of the home has no room for one checkpoint.
    """
    each = CHECKPOINT_BYTES * parameter_count(manifest.model)
    place, free = room(home)
    if free is None:
        return []  # the code that writes there reports it
    if free < each:
        raise HomeError(
            f"A checkpoint of this run takes {size(each)}, but only {size(free)} are free at {place}, so nothing could "
            "be saved.",
            f"Free {size(each - free)} there, better {size(3 * each)}, or choose another disk with --home.",
        )
    needed, tokens = home_bytes(home, manifest), token_bytes(cache, manifest)
    beside, its_free = room(cache)
    shares = share_disk(place, beside)
    warnings = []
    needed += tokens if shares else 0
    if free < needed:
        what = "the home and the run's tokens" if shares and tokens else "the home"
        warnings.append(
            f"{size(free)} are free at {place}, but {what} may take {size(needed)}. Free some space, or saving fails"
        )
    if not shares and its_free is not None and its_free < tokens:
        warnings.append(
            f"{size(its_free)} are free at {beside}, but the run's tokens may take {size(tokens)}. Free some space, or "
            "set XDG_CACHE_HOME to a directory on another disk"
        )
    return warnings


def home_bytes(home: Path, manifest: Manifest | None) -> int:
    """Return the disk space in bytes that a home may still take, without a manifest as far as it is known."""
    if manifest is None:
        return SPARE_BYTES
    present = min(len(list((home / "checkpoints").glob("step-*"))), CHECKPOINTS - 1)
    each = (CHECKPOINTS - present) * CHECKPOINT_BYTES + TRAINED_BYTES
    return SPARE_BYTES + each * parameter_count(manifest.model)


def token_bytes(cache: Path, manifest: Manifest) -> int:
    """Return the disk space in bytes that the run's tokens may still take in the cache."""
    return 0 if has_stream(manifest, cache) else most_stream_bytes(manifest)


def share_disk(place: Path, other: Path) -> bool:
    """Report whether two existing directories are on one disk."""
    return place.stat().st_dev == other.stat().st_dev


def room(path: Path) -> tuple[Path, int | None]:
    """Return the nearest existing directory of ``path``, and the free bytes of its disk; None if not writable."""
    place = path.absolute()
    try:
        while not files.exists(place):
            place = place.parent
        free = shutil.disk_usage(place).free
    except OSError:
        return place, None
    return place, free if os.access(place, os.W_OK) else None
