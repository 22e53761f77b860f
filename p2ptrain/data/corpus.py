"""A corpus as training sees it: numbered sequences of tokens, and a held-out part that is the same for everyone.

Dimension letters: B sequences of a batch, T = ``sequence_length``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from p2ptrain.base.errors import CorpusError
from p2ptrain.data.sources import check_digest, read_pieces
from p2ptrain.data.split import Split, split_stream
from p2ptrain.data.stream import open_stream, stream_path, token_type, tokenize
from p2ptrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from p2ptrain.manifest import Manifest

STREAM_VERSION = 1
"""Raised whenever the same corpus and tokenizer would give another stream, so that no old cache is taken for a new."""

Tell = Callable[[int, int | None], None]
"""Is told how many tokens of a stream there are so far, and after how many it ends at the latest; None: unknown."""

HASHED_BYTES = 1 << 30
"""A file that is named where its tokens are there already is read for its digest up to this size: about a second. A
larger one is taken at its name's word. A guess."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids and where the sequences lie in them. Opening one costs nothing that grows with the corpus, beyond a
    second where its file is named again."""

    tokens: np.ndarray  # [tokens], any unsigned type, memory-mapped
    split: Split
    tokenizer: Tokenizer

    @property
    def sequence_length(self) -> int:
        return self.split.sequence_length

    @property
    def train_sequences(self) -> int:
        """How many training sequences there are; ``batch`` takes indices below this."""
        return self.split.train_sequences

    @property
    def held_out_tokens(self) -> int:
        """How many held-out tokens there are to predict."""
        return self.split.held_out_sequences * self.sequence_length

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Training sequences: int64 [B, T+1] on the host. Inputs are ``[:, :-1]``, targets ``[:, 1:]``."""
        return self._gather([self.split.train_start(index) for index in indices])

    def validation_batches(self, most_tokens: int, batch_sequences: int) -> Iterator[Tensor]:
        """Held-out sequences, int64 [B, T+1] with B up to ``batch_sequences``: the same ones on every machine.

        At most ``most_tokens`` predicted tokens (but one sequence at least), evenly spaced over the held-out part.
        """
        total = self.split.held_out_sequences
        count = max(1, min(total, most_tokens // self.sequence_length))
        starts = [self.split.held_out_start(place * total // count) for place in range(count)]
        for first in range(0, count, batch_sequences):
            yield self._gather(starts[first : first + batch_sequences])

    def _gather(self, starts: Sequence[int]) -> Tensor:
        span = self.sequence_length + 1
        rows = [self.tokens[start : start + span] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def open_corpus(
    manifest: Manifest,
    cache: Path,  # directory of token streams, made when it is not there
    data: Path | None = None,  # the owner's corpus file, where the run names one by digest
    tokenizer_file: Path | None = None,  # the owner's tokenizer.json, where the run names one by digest
    tell: Tell = lambda tokens, most: None,  # called again and again while the stream is built
) -> Corpus:
    """Open the run's corpus, building its token stream where this machine has none yet.

    A stream in the cache needs no ``data``: its name already holds the digest of the file it was made from. A file that
    is named all the same has to be that one.

    Raises:
        CorpusError: unreadable, empty, too short, wrong digest, not named, not reachable.
        HomeError: the cache cannot be written or its disk is full.
    """
    _check_named(manifest, data, tokenizer_file, has_stream(manifest, cache))
    tokenizer = load_tokenizer(manifest.tokenizer, tokenizer_file)
    most = _most_tokens(manifest)
    tokens = open_stream(
        cache,
        stream_key(manifest.corpus, manifest.tokenizer),
        tokenizer.vocabulary_size,
        lambda: _told(tokenize(read_pieces(manifest.corpus, data), tokenizer, most), tell, most),
    )
    split = split_stream(len(tokens), manifest.training.sequence_length, manifest.corpus.validation_fraction)
    return Corpus(tokens, split, tokenizer)


def _check_named(manifest: Manifest, data: Path | None, tokenizer_file: Path | None, is_built: bool) -> None:
    """Whoever names a file means it to be read: raises CorpusError unless it is the run's own."""
    spec = manifest.corpus
    if data is not None and spec.kind != "file":
        comes = "ships with p2ptrain" if spec.kind == "builtin" else "is downloaded"
        raise CorpusError(
            f"--data names {data}, and this run's text is another: it {comes}",
            "Leave --data away; a run trains on the corpus that its manifest names.",
        )
    if tokenizer_file is not None and manifest.tokenizer.kind != "file":
        comes = "is one token a byte" if manifest.tokenizer.kind == "bytes" else "is downloaded"
        raise CorpusError(
            f"--tokenizer names {tokenizer_file}, and this run's tokenizer is another: it {comes}",
            "Leave --tokenizer away; a run has the tokenizer that its manifest names.",
        )
    if data is not None and spec.kind == "file" and is_built and _size(data) <= HASHED_BYTES:
        check_digest(data, spec.sha256, "corpus")  # where there is no stream yet, whoever makes it does


def _size(data: Path) -> int:
    try:
        return data.stat().st_size
    except OSError:  # the digest says what is wrong
        return 0


def _told(chunks: Iterator[np.ndarray], tell: Tell, most: int | None) -> Iterator[np.ndarray]:
    """The same chunks, and to ``tell`` how far they are."""
    count = 0
    for ids in chunks:
        count += len(ids)
        tell(count, most)
        yield ids


def _most_tokens(manifest: Manifest) -> int | None:
    """The built-in texts are short and read whole."""
    return None if manifest.corpus.kind == "builtin" else manifest.corpus.max_tokens


def has_stream(manifest: Manifest, cache: Path) -> bool:
    """Whether the run's tokens are in the cache; they are not where we may not look."""
    try:
        return stream_path(cache, stream_key(manifest.corpus, manifest.tokenizer)).exists()
    except OSError:
        return False


def most_stream_bytes(manifest: Manifest) -> int:
    """What the run's tokens take in the cache, at most. The built-in texts are a few megabytes, and count as none."""
    is_bytes = manifest.tokenizer.kind == "bytes"
    ids = ByteTokenizer.vocabulary_size if is_bytes else manifest.model.config.vocab_size  # no tokenizer may have more
    return token_type(ids).itemsize * (_most_tokens(manifest) or 0)


def stream_key(corpus: BaseModel, tokenizer: BaseModel) -> str:
    """A name for what corpus and tokenizer make together: 32 hexadecimal digits."""
    description = {
        "version": STREAM_VERSION,
        "corpus": corpus.model_dump(mode="json", exclude={"validation_fraction"}),
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
