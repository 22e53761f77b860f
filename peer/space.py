"""Disk space that a peer needs: in its home for checkpoints, in the cache for the text of all runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.tokens.packing import FLAG_BITS
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import bytes_of
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
DEFAULT_TEXT_GB = 8.0
"""Disk cap of the text: 4 billion tokens of 2 bytes, so that most corpora stay whole for other peers and later epochs.
Guess: survey the volunteers' free disk space."""


def text_bytes(given_gb: float | None) -> float:
    """Return the disk cap of the text that an owner has set, or the default."""
    return 1e9 * (DEFAULT_TEXT_GB if given_gb is None else given_gb)


def check_space(home: Path, manifest: Manifest, store: ShardStore, most_bytes: float) -> list[str]:
    """Return warnings for the owner, each two sentences, on disks that will be full in the run.

    Args:
        most_bytes: disk cap of the text.

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
    needed, tokens = home_bytes(home, manifest), token_bytes(store, manifest, most_bytes)
    beside, its_free = room(store.directory)
    shares = share_disk(place, beside)
    warnings = []
    needed += tokens if shares else 0
    if free < needed:
        what = "the home and the run's text" if shares and tokens else "the home"
        warnings.append(
            f"{size(free)} are free at {place}, but {what} may take {size(needed)}. Free some space, or saving fails"
        )
    if not shares and its_free is not None and its_free < tokens:
        warnings.append(
            f"{size(its_free)} are free at {beside}, but the run's text may take {size(tokens)}. Free some space, set "
            "XDG_CACHE_HOME to a directory on another disk, or start with a smaller --text-gb"
        )
    return warnings


def home_bytes(home: Path, manifest: Manifest | None) -> int:
    """Return the disk space in bytes that a home may still take, without a manifest as far as it is known."""
    if manifest is None:
        return SPARE_BYTES
    present = min(len(list((home / "checkpoints").glob("step-*"))), CHECKPOINTS - 1)
    each = (CHECKPOINTS - present) * CHECKPOINT_BYTES + TRAINED_BYTES
    return SPARE_BYTES + each * parameter_count(manifest.model)


def token_bytes(store: ShardStore, manifest: Manifest, most_bytes: float) -> int:
    """Return the disk space in bytes that the run's text may still take; 0 for one that ships with the package."""
    corpus, ids = manifest.corpus, manifest.model.config.vocab_size
    if corpus.kind != "shards":
        return 0
    whole = (corpus.training_tokens + corpus.held_out_tokens) * bytes_of(ids << FLAG_BITS if corpus.template else ids)
    return int(min(whole, max(0.0, most_bytes - store.size_bytes)))


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
