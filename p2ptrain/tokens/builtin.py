"""Text that ships with the package, as ids of the byte tokenizer."""

from __future__ import annotations

import hashlib
import lzma
from importlib import resources
from typing import NamedTuple

import numpy as np

from p2ptrain.base.errors import CorpusError

DIGESTS = {"shakespeare": "2351fe17efb0c9982030b513ac35819deca6548a8a2ebb9d47c2aacb56f92e44"}
"""SHA-256 of the unpacked text of every corpus in ``data/corpora/``."""

MOST_REGIONS = 64
"""Maximum number of regions; more only shorten the held-out blocks. Guess: the variance of the held-out loss would
settle it."""

BLOCK_SEQUENCES = 8
"""Minimum number of sequences per held-out block, if the text is long enough. Guess: the variance of the held-out loss
would settle it."""


class Regions(NamedTuple):
    """Equal regions of a text, the last part of each held out.

    A text is rarely uniform (the shipped one is 42 works in alphabetical order; its last twentieth is one comedy), so
    evenly spaced blocks measure the whole text, while the tail would measure its last chapter.
    """

    training: np.ndarray
    """[regions, tokens]"""
    held_out: np.ndarray
    """[regions, tokens]"""


def text(name: str) -> np.ndarray:
    """Return a shipped text, [tokens] uint8. Raises CorpusError."""
    if name not in DIGESTS:
        raise CorpusError(
            f"There is no built-in corpus {name!r}.",
            f"Update p2ptrain if the run was made with a newer version; this one ships {', '.join(DIGESTS)}.",
        )
    packed = resources.files("p2ptrain.data").joinpath("corpora", f"{name}.txt.xz").read_bytes()
    try:
        found = lzma.decompress(packed)
    except lzma.LZMAError:
        found = b""
    if hashlib.sha256(found).hexdigest() != DIGESTS[name]:
        raise CorpusError(f"The built-in corpus {name} is damaged.", "Install p2ptrain again.")
    return np.frombuffer(found, dtype=np.uint8)


def regions(
    tokens: np.ndarray,  # [tokens]
    sequence_length: int,
    validation_fraction: float,
) -> Regions:
    """Cut a text into at most ``MOST_REGIONS`` regions. Raises CorpusError if it is too short."""
    span = sequence_length + 1
    wanted = int(len(tokens) * validation_fraction)
    count = min(MOST_REGIONS, max(1, wanted // (BLOCK_SEQUENCES * span)))
    each = len(tokens) // count
    held_out = max(span, int(each * validation_fraction))
    if each - held_out < span:
        raise CorpusError(
            f"The corpus is too short: {len(tokens):,} tokens do not hold one training and one held-out sequence of "
            f"{sequence_length:,} tokens each.",
            f"Use a corpus of at least {2 * span:,} tokens, or a smaller training.sequence_length.",
        )
    rows = tokens[: count * each].reshape(count, each)
    return Regions(rows[:, :-held_out], rows[:, -held_out:])
