"""Checks of what a run's directory holds beside its manifest, before the run is signed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.base.errors import CorpusError, ManifestError
from p2ptrain.base.text import printable
from p2ptrain.data.chat_template import CHATML
from p2ptrain.data.figures import read_summary
from p2ptrain.data.file_store import MADE_AGAIN, kept
from p2ptrain.data.tokenizer import Tokenizer, tokenizer_of
from p2ptrain.data.unfinished import SHARDS_FOLDER
from p2ptrain.manifest.fitting import repetition
from p2ptrain.manifest.sources import ShardsCorpus
from p2ptrain.tokens import builtin
from p2ptrain.tokens.index import ShardIndex
from p2ptrain.tokens.opened import open_corpus
from p2ptrain.tokens.packing import FLAG_BITS
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import bytes_of

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest


def check_run(manifest: Manifest, run: Path, tell: Callable[[float], None] = lambda share: None) -> list[str]:
    """Check tokenizer, chat template, index and shards of the run in a directory, whose manifest may have been edited.

    Args:
        tell: gets the share of the shards that were read.

    Returns:
        Warnings for the author, without their last full stops; the first sentence of each stands alone.

    Raises:
        CorpusError: a file is missing or was edited, or the text is too short for the sequences.
        ManifestError: the manifest says other numbers than the index, or the tokenizer has more ids than the model.
    """
    corpus = manifest.corpus
    tokenizer = tokenizer_of(manifest, _file(manifest, run))
    check_vocabulary(manifest, tokenizer)
    if isinstance(corpus, ShardsCorpus):
        if corpus.template not in ("", CHATML):
            kept(run, corpus.template, "chat template")
        store = ShardStore(run / SHARDS_FOLDER)
        index = open_corpus(manifest, store, kept(run, corpus.root, "index of shards")).index
        codes = tokenizer.vocabulary_size * (1 << FLAG_BITS if index.is_packed else 1)
        if index.id_bytes < bytes_of(codes):
            raise ManifestError(
                "The shards were made with another tokenizer than the manifest names.",
                f"Undo that edit, or {MADE_AGAIN}.",
            )
        _check_shards(index, store, tell)
        training = corpus.training_tokens
    else:
        text = builtin.text(corpus.name)
        training = builtin.regions(text, manifest.training.sequence_length, corpus.validation_fraction).training.size
    repeated = repetition(manifest, training)
    summary = read_summary(run)
    return [*(summary.warnings if summary is not None else ()), *([] if repeated is None else [repeated])]


def check_vocabulary(manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Raise ManifestError if the tokenizer has more ids than the model."""
    vocabulary, found = manifest.model.config.vocab_size, tokenizer.vocabulary_size
    if found > vocabulary:
        remedy = f"Set model.config.vocab_size to {found} before the run is signed."
        if manifest.model.init is not None:  # its weights have no more
            remedy = (
                "Begin from the model with its own tokenizer, or from one that was enlarged by "
                f"resize_token_embeddings({found}) of transformers."
            )
        raise ManifestError(
            f"The tokenizer has {found:,} ids, but the model has only {vocabulary:,}.",
            f"{remedy} If the run is not yours, ask its author.",
        )


def _file(manifest: Manifest, run: Path) -> Path | None:
    spec = manifest.tokenizer
    return kept(run, spec.sha256, "tokenizer") if spec.kind == "file" else None


def _check_shards(index: ShardIndex, store: ShardStore, tell: Callable[[float], None]) -> None:
    """Raise CorpusError unless all shards are there and whole."""
    wrong = []
    for number, digest in enumerate(dict.fromkeys(index.digests)):
        tell(number / len(index.digests))
        if not store.is_whole(digest):
            wrong.append(store.path(digest))
    if wrong:
        raise CorpusError(
            f"{len(wrong):,} of the run's {len(index.digests):,} shards are missing or were edited, the first one is "
            f"{printable(wrong[0])}.",
            f"Restore {printable(store.directory)} from a copy, or {MADE_AGAIN}.",
        )
