"""Training and held-out text of simulated language models.

The shipped text is cut as in every run (``data.split``), and its held-out blocks alternate between "validation" and
"test". The cut depends on the text alone, not on a seed, so that text seen in tuning is never test text in another run.

Training data are "iid" (every peer walks through the whole training text in its own order) or "shards" (peer n of N
holds only the n-th part: other plays, with other speakers and another style).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from p2ptrain.base.errors import CorpusError
from p2ptrain.data import assign
from p2ptrain.data.corpus import Corpus
from p2ptrain.data.sources import read_pieces
from p2ptrain.data.split import Split, split_stream
from p2ptrain.data.stream import tokenize
from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.manifest.sources import BuiltinCorpus
from p2ptrain.train.batches import CorpusReader

Part = Literal["validation", "test"]
"""Part of the held-out text: validation for tuning and curves, test only for final numbers."""

DataKind = Literal["iid", "shards"]

HELD_OUT_FRACTION = 0.1
"""Fraction of the text, half for validation and half for test: 270 kB each of the shipped Shakespeare. Guess: the
spread of held-out losses by text size would settle it."""


@dataclass(frozen=True)
class Text:
    """A text of bytes and the positions of its sequences, equal for every peer, seed and run."""

    corpus: Corpus

    @classmethod
    def builtin(cls, sequence_length: int) -> Text:
        """Return the shipped Shakespeare. Raises CorpusError if sequences are too long for two held-out blocks."""
        tokenizer = ByteTokenizer()
        pieces = read_pieces(BuiltinCorpus(kind="builtin", name="shakespeare"), None)
        tokens = np.concatenate([text.ids for text in tokenize(pieces, tokenizer, None)])
        split = split_stream(len(tokens), sequence_length, HELD_OUT_FRACTION)
        if split.regions < 2:
            raise CorpusError(
                f"Sequences of {sequence_length} tokens leave no text for a validation and a test part.",
                "Use shorter sequences.",
            )
        return cls(Corpus(tokens, split, tokenizer))

    @cached_property
    def tokens(self) -> Tensor:
        return torch.from_numpy(np.array(self.corpus.tokens, dtype=np.uint8))

    def starts(self, part: Part) -> list[int]:
        """Return the first token of every sequence of a held-out part: even blocks are validation, odd ones test."""
        split = self.corpus.split
        wanted = 0 if part == "validation" else 1
        return [
            split.held_out_start(index)
            for index in range(split.held_out_sequences)
            if index // split.held_out_per_region % 2 == wanted
        ]


@dataclass(frozen=True, slots=True)
class TextShare:
    """The part of the training text that one peer reads, and its order."""

    reader: CorpusReader
    first: int
    """First training sequence of the share."""
    sequences: int
    """Number of sequences."""

    def starts(self, split: Split, step: int, per_step: int) -> list[int]:
        """Return the first tokens of the sequences of inner step ``step``, in the order of ``data.assign``."""
        places = (divmod(position, self.sequences) for position in range(step * per_step, (step + 1) * per_step))
        return [split.train_start(self.first + int(_walk(self, epoch)[place])) for epoch, place in places]


@lru_cache(maxsize=64)
def _walk(share: TextShare, epoch: int) -> np.ndarray:
    """Return one epoch's order, [sequences] int32: 10 ms once instead of 8 to 30 us a sequence (measured)."""
    return assign.whole_walk(share.reader.seed, share.reader.peer, epoch, share.sequences).astype(np.int32)


def shares(text: Text, readers: Sequence[CorpusReader], kind: DataKind) -> tuple[TextShare, ...]:
    """Assign the text to readers: all of it to each ("iid"), or the n-th part to reader n of N ("shards").

    Raises:
        CorpusError: there are more readers than sequences.
    """
    total, count = text.corpus.train_sequences, len(readers)
    if kind == "iid":
        return tuple(TextShare(reader, 0, total) for reader in readers)
    if count > total:
        raise CorpusError(
            f"{count} peers cannot share {total} training sequences.",
            "Use fewer peers, shorter sequences, or set learner.data = 'iid'.",
        )
    cuts = [number * total // count for number in range(count + 1)]
    return tuple(
        TextShare(reader, first, end - first) for reader, first, end in zip(readers, cuts[:-1], cuts[1:], strict=True)
    )
