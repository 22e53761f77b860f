"""Atomic checkpoints: complete or absent.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors`` (every tensor, by name) and ``state.json``
(everything else, readable, with a BLAKE3 digest of each file of tensors and one of itself). It is written under a
temporary name, every file is flushed to the disk, and then it is renamed: a crash, a power cut or a full disk leaves
earlier checkpoints unchanged. Loading checks the digests and falls back to the previous checkpoint if the newest is
corrupt; the last two are kept for that.

The ranks of a team write one file each, ``tensors-00001-of-00002.safetensors``, with their parts of the flat vectors.
The files in order hold what one process would have saved, so that any number of ranks, or one process, resumes it.

A checkpoint is torn if its content differs from what was written. One that cannot be read may still be whole (a disk
that comes back, a newer p2ptrain). Then nothing is loaded, because continuing from an older checkpoint would eventually
remove it.

Replacing a checkpoint of the same step takes two renames: the old one away, the new one into its place. In between, the
old one is still found under its new name. One process at a time writes ``state.json`` and renames, because the peer's
home is locked.
"""

from p2ptrain.checkpoint.store import (
    ALONE,
    TORN,
    Checkpoint,
    Checkpoints,
    CheckpointStore,
    Found,
    PartRecord,
    Share,
    Torn,
    checkpoints_in,
    explained,
    load,
    load_latest,
    part_of,
    save,
    write_part,
    write_whole,
)
from p2ptrain.checkpoint.tensor_files import (
    PIECE_ELEMENTS,
    StoredTensors,
    VectorRange,
    parts,
    pieces_of,
    plainly,
    system_error,
    write_streamed,
)

__all__ = [
    "ALONE",
    "PIECE_ELEMENTS",
    "TORN",
    "Checkpoint",
    "CheckpointStore",
    "Checkpoints",
    "Found",
    "PartRecord",
    "Share",
    "StoredTensors",
    "Torn",
    "VectorRange",
    "checkpoints_in",
    "explained",
    "load",
    "load_latest",
    "part_of",
    "parts",
    "pieces_of",
    "plainly",
    "save",
    "system_error",
    "write_part",
    "write_streamed",
    "write_whole",
]
