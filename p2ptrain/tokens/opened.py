"""Opening of a run's corpus: an author's shards by their index, or the text that ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.base import files
from p2ptrain.base.errors import CorpusError, ManifestError
from p2ptrain.base.files import cache_directory
from p2ptrain.tokens import builtin
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.tokens.index import ShardIndex, sequences_in
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter, bytes_of

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest
    from p2ptrain.manifest.sources import BuiltinCorpus, ShardsCorpus

MOST_HELD_OUT = 4
"""Most held-out shards, which each peer fetches before its first step; ``init`` writes one."""
_ASK = "If the run is not yours, ask its author for a new link."
_UNDO = (
    "If the run is yours, undo the edit of its manifest, or make it again with `p2ptrain init`; else ask its author "
    "for a new link."
)


def user_store() -> ShardStore:
    """Return the store that all peers of this user share."""
    return ShardStore(cache_directory() / "shards")


def open_corpus(
    manifest: Manifest,
    store: ShardStore,
    index: Path | None,  # the file that the run names by its root; None: its text ships with the package
) -> ShardCorpus:
    """Open a run's corpus. Its shards need not be in the store yet; those of a shipped text are written there.

    Raises:
        CorpusError: the index is missing, damaged or another one, or the text is too short.
        ManifestError: the index is not what the manifest says.
        HomeError: a shipped text cannot be written.
    """
    spec, length = manifest.corpus, manifest.training.sequence_length
    if spec.kind == "builtin":
        found = _cut(spec, store, length)
    else:
        assert spec.kind == "shards"
        found = read_index(spec, index)
        _check(found, spec, length)
    return ShardCorpus(found, store, length, manifest.model.config.vocab_size)


def end_of_turn(manifest: Manifest) -> str:
    """Return the text that ends an answer in a run's dialogues; empty if it has none, or it cannot be told."""
    return manifest.corpus.end_of_turn if manifest.corpus.kind == "shards" else ""


def read_index(spec: ShardsCorpus, path: Path | None) -> ShardIndex:
    """Read the index that a run names. Raises CorpusError."""
    if path is None:
        raise CorpusError(
            "The index of the run's text is not on this machine.",
            "Start a peer of this run; it fetches the index from others.",
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(
            f"The index of the run's text cannot be read: {path}: {files.cause(error)}.", files.remedy(error, "")
        ) from error
    try:
        found = ShardIndex.from_bytes(data)
    except ValueError as error:
        raise CorpusError(f"{path} is no index of a text: {error}.", f"Remove it and start again. {_ASK}") from error
    if found.root != spec.root:
        raise CorpusError(
            f"{path} is the index of another text: its sha256 is {found.root}, and the run's is {spec.root}.",
            f"Remove it and start again. {_ASK}",
        )
    return found


def _check(index: ShardIndex, spec: ShardsCorpus, sequence_length: int) -> None:
    """Raise ManifestError if the index is not what the manifest says, CorpusError if it has no sequence."""
    if (index.training_tokens, index.held_out_tokens) != (spec.training_tokens, spec.held_out_tokens):
        raise ManifestError(
            f"The run's manifest says {spec.training_tokens:,} training and {spec.held_out_tokens:,} held-out tokens, "
            f"and its index has {index.training_tokens:,} and {index.held_out_tokens:,}.",
            _UNDO,
        )
    if len(index.held_out) > MOST_HELD_OUT:
        raise ManifestError(
            f"The run's text has {len(index.held_out):,} held-out shards; {MOST_HELD_OUT} are allowed.", _UNDO
        )
    if index.is_packed != bool(spec.template) or (index.is_packed and index.row_tokens != sequence_length):
        found = f"rows of {index.row_tokens:,} tokens" if index.is_packed else "plain text"
        wanted = f"rows of {sequence_length:,} tokens" if spec.template else "plain text"
        raise ManifestError(f"The run's text is {found}, and its manifest says {wanted}.", _UNDO)
    for tokens, what in ((index.training_tokens, "training"), (index.held_out_tokens, "held-out")):
        if not sequences_in(min(tokens, index.shard_tokens), sequence_length, index.is_packed):
            raise CorpusError(
                f"The corpus is too short: its {what} part has no sequence of {sequence_length:,} tokens.", _UNDO
            )


def _cut(spec: BuiltinCorpus, store: ShardStore, sequence_length: int) -> ShardIndex:
    """Write the shards of a shipped text, if they are not there yet; return their index, the same on every machine."""
    parts = builtin.regions(builtin.text(spec.name), sequence_length, spec.validation_fraction)
    writer = ShardWriter(store, bytes_of(256))
    writer.add(parts.training.reshape(-1), is_training=True)
    writer.add(parts.held_out.reshape(-1), is_training=False)
    return writer.finish(sequence_length)
