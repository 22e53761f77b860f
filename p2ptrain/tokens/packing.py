"""Packing of dialogues into rows of T tokens, and the code of a token in such a row.

Dialogues are placed whole, the longest first, each into the fullest row that has room (best-fit decreasing, as in
arXiv 2404.10830 and TRL's ``bfd``), so that few are cut; what remains of a row is padding. No dialogue attends to
another: each begins at position 0, and a row begins with a dialogue. The first token of a dialogue is never predicted.

The stream holds one number a token, ``id * 4 + flags``, so that ids and flags are written, resumed and deleted as one.

Dimension letters: B rows, T tokens of each.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

COUNTS, BEGINS = 1, 2
"""Flags: the token is predicted, and the token is the first of a dialogue or of padding."""
FLAG_BITS = 2

WINDOW_DIALOGUES = 1_000
"""Dialogues that are packed together, which bounds the memory: ``datasets.map`` gives TRL as many at once."""

IGNORED = -100
"""Label of a token that is not predicted; torch's default ``ignore_index``."""


class EncodedDialogue(NamedTuple):
    """Tokens of one dialogue, and which of them are of answers."""

    ids: np.ndarray
    counts: np.ndarray
    """Whether each token is predicted, bool."""


def packed_rows(
    dialogues: Iterable[EncodedDialogue],  # at most T tokens each
    row_tokens: int,  # T
    padding: int,  # id
) -> Iterator[np.ndarray]:
    """Yield the codes of rows, uint32 [T], in the order of the first dialogue in each."""
    window: list[EncodedDialogue] = []
    for dialogue in dialogues:
        window.append(dialogue)
        if len(window) == WINDOW_DIALOGUES:
            yield from _rows_of(window, row_tokens, padding)
            window = []
    yield from _rows_of(window, row_tokens, padding)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Place items of some lengths, each at most ``capacity``, into bins; return the items of each bin.

    The longest first, each into the bin with the least room that suffices. Equal inputs give equal bins.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of a bin, and the bin; sorted
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        place = bisect.bisect_left(room, (lengths[item], 0))
        if place < len(room):
            left, chosen = room.pop(place)
        else:
            left, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        bisect.insort(room, (left - lengths[item], chosen))
    return bins


def decoded_rows(
    codes: np.ndarray,  # [B, T]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, labels and positions, int64 [B, T] each; label t is what follows token t, or ``IGNORED``."""
    codes = codes.astype(np.int64)
    ids = codes >> FLAG_BITS
    labels = np.full_like(ids, IGNORED)
    labels[:, :-1] = np.where(codes[:, 1:] & COUNTS, ids[:, 1:], IGNORED)
    places = np.broadcast_to(np.arange(codes.shape[1]), codes.shape)
    begins = np.maximum.accumulate(np.where(codes & BEGINS, places, 0), axis=1)
    return ids, labels, places - begins


def _rows_of(window: list[EncodedDialogue], row_tokens: int, padding: int) -> Iterator[np.ndarray]:
    bins = best_fit([len(each.ids) for each in window], row_tokens)
    for items in sorted(sorted(items) for items in bins):
        row = np.full(row_tokens, padding << FLAG_BITS, dtype=np.uint32)
        at = 0
        for dialogue in (window[item] for item in items):
            ids, counts = dialogue.ids.astype(np.uint32), dialogue.counts.astype(np.uint32)
            part = row[at : at + len(ids)]
            part[:] = ids << FLAG_BITS | counts * COUNTS
            part[0] = ids[0] << FLAG_BITS | BEGINS
            at += len(ids)
        row[at : at + 1] |= BEGINS
        yield row
