"""Atomic checkpoints: complete or absent.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors`` (every tensor, by name) and ``state.json``
(everything else, readable, with a BLAKE3 digest of each file of tensors and one of itself). It is written under a
temporary name, every file is flushed to the disk, and then it is renamed: a crash, a power cut or a full disk leaves
earlier checkpoints unchanged. Loading checks the digests and falls back to the previous checkpoint if the newest is
corrupt; the last two are kept for that.

A checkpoint is torn if its content differs from what was written. One that cannot be read may still be whole (a disk
that comes back, a newer p2ptrain). Then nothing is loaded, because continuing from an older checkpoint would eventually
remove it.

Replacing a checkpoint of the same step takes two renames: the old one away, the new one into its place. In between, the
old one is still found under its new name. One process at a time writes ``state.json`` and renames, because the peer's
home is locked.
"""

from p2ptrain.checkpoint.store import (
    Checkpoint,
    Checkpoints,
    Found,
    Torn,
    checkpoints_in,
    explained,
    load,
    load_latest,
    save,
)
from p2ptrain.checkpoint.tensor_files import (
    PIECE_ELEMENTS,
    StoredTensors,
    parts,
    pieces_of,
    plainly,
    system_error,
    write_streamed,
)

__all__ = [
    "PIECE_ELEMENTS",
    "Checkpoint",
    "Checkpoints",
    "Found",
    "StoredTensors",
    "Torn",
    "checkpoints_in",
    "explained",
    "load",
    "load_latest",
    "parts",
    "pieces_of",
    "plainly",
    "save",
    "system_error",
    "write_streamed",
]
