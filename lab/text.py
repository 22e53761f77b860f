"""Text of a scenario in shards, which its peers fetch from the bootstrap and from each other, and figures of that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lab.artifacts import Artifacts
from p2ptrain.manifest import Manifest, with_changes
from p2ptrain.tokens.index import SHARD_BYTES
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter

SHARDS, FILES = "shards", "files"
"""Folders of an author's directory: the shards, and what the manifest names by digest."""
WORDS = 200
"""Different words of the text."""


def write_text(folder: Path, manifest: Manifest, shards: int, seed: int) -> Manifest:
    """Write shards of random words, and a held-out one, to a folder; return the manifest that names them."""
    rng = Random(seed)
    words = [bytes(rng.choices(range(97, 123), k=rng.randint(2, 9))) + b" " for _ in range(WORDS)]
    writer = ShardWriter(ShardStore(folder / SHARDS), 2)
    for number in range(shards + 1):
        tokens = SHARD_BYTES // 2 if number else SHARD_BYTES // 64
        text = b"".join(rng.choices(words, k=tokens // 3))[:tokens]
        writer.add(np.frombuffer(text, dtype=np.uint8), is_training=number > 0)
    index = writer.finish(manifest.training.sequence_length)
    (folder / FILES).mkdir(parents=True, exist_ok=True)
    (folder / FILES / index.root).write_bytes(index.to_bytes())
    corpus: dict[str, Any] = {"kind": "shards", "root": index.root}
    corpus |= {"training_tokens": index.training_tokens, "held_out_tokens": index.held_out_tokens}
    return with_changes(manifest, {"corpus": corpus})


def text_figures(honest: Sequence[Artifacts]) -> dict[str, Any]:
    """Return figures of how peers got their text; None of what nobody noted.

    ``bootstrap_copies`` is how often bootstraps sent each shard that anybody fetched, ``shards_from_peers`` how many
    fetches other peers answered, ``first_step_s`` the longest time from a peer's first note to its first progress.
    """
    peers = {each.peer_id for each in honest}
    notes = [note for each in honest for note in each.of("got shard")]
    elsewhere = sum(note.get("source") not in peers for note in notes)
    shards = {note.get("shard") for note in notes}
    return {
        "shards_fetched": len(notes),
        "shards_from_peers": len(notes) - elsewhere,
        "bootstrap_copies": elsewhere / len(shards) if shards else None,
        "shards_refused": sum(each.count("shard refused") for each in honest),
        "first_step_s": max((found for each in honest if (found := _first_step_s(each)) is not None), default=None),
    }


def _first_step_s(one: Artifacts) -> float | None:
    began = min((float(note["time"]) for note in one.notes if "time" in note), default=None)
    stepped = None if began is None else one.first("progress", began)
    return None if began is None or stepped is None else stepped - began
