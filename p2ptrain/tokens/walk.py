"""Which sequences a peer reads at which inner step: a pure function of (seed, peer id, step).

In each epoch a peer takes the shards in an order of its own, a window of some at a time, and reads the sequences of a
window in random order. So it needs few shards at once, knows which ones come next, resumes at the next token, and
reads every sequence once before it reads any twice. The first windows are short, so that it can begin soon::

    epoch 0    [1 shard] [2 shards] [4 shards] [8 shards] [8 shards] ...
    epoch 1    [8 shards] [8 shards] ...

The last shard may be shorter than the others, and comes last in each epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2ptrain.tokens.permutation import permutation, permuted

WINDOW = 8
"""Shards that are mixed: 16 million ids of 2 bytes, hundreds of inner steps. Guess: the loss of a sorted text for other
numbers."""


class Place(NamedTuple):
    """One training sequence."""

    shard: int
    """Number among the training shards."""
    sequence: int
    """Number in the shard."""


class Window(NamedTuple):
    """Shards whose sequences are mixed."""

    epoch: int
    number: int
    begins: int
    """Sequences of the epoch before it."""
    slots: range
    """Places of its shards in the epoch's order."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One peer's way through the training shards.

    Args:
        seed: the run's seed.
        peer: the peer's id.
        shards: number of training shards.
        per_shard: sequences of each, except the last one.
        in_last: sequences of the last one.
    """

    seed: int
    peer: str
    shards: int
    per_shard: int
    in_last: int

    def __post_init__(self) -> None:
        if self.shards < 1 or self.total < 1 or not 0 <= self.in_last <= self.per_shard:
            raise ValueError(f"{self.shards} shards of {self.per_shard} sequences, the last of {self.in_last}")

    @property
    def total(self) -> int:
        """Training sequences."""
        return (self.shards - 1) * self.per_shard + self.in_last

    def sequences(self, step: int, per_step: int) -> list[Place]:
        """Return the sequences of an inner step, from 0; ``per_step`` of them."""
        if step < 0 or per_step < 1:
            raise ValueError(f"no sequences at step={step} with per_step={per_step}")
        return [self._place(position) for position in range(step * per_step, (step + 1) * per_step)]

    def epoch(self, number: int) -> np.ndarray:  # [total, 2] int64
        """Return the places of an epoch's sequences, in order: faster than ``sequences`` for a small text."""
        window, found = Window(number, 0, 0, range(min(WINDOW if number else 1, self.shards))), []
        while window.epoch == number:
            if count := self._sequences(window):
                slots, sequences = np.divmod(permutation(count, self._key(window)), self.per_shard)
                shards = np.array([self._shard(number, slot) for slot in window.slots])
                found.append(np.stack([shards[slots], sequences], axis=1))
            window = self._after(window)
        return np.concatenate(found)

    def windows(self, step: int, per_step: int) -> Iterator[list[int]]:
        """Yield the shards of the window that an inner step begins in, and of those after it, without end.

        A step at a window's end needs the next one, too.
        """
        return (shards for _, shards in self.spans(step * per_step))

    def spans(self, position: int) -> Iterator[tuple[range, list[int]]]:
        """Yield the positions and shards of the window that has a sequence of this peer's order, and of later ones.

        Inner steps read the positions one after another, from 0 in the first epoch.
        """
        window = self._window(position)
        while True:
            begin = window.epoch * self.total + window.begins
            shards = [self._shard(window.epoch, slot) for slot in window.slots]
            yield range(begin, begin + self._sequences(window)), shards
            window = self._after(window)

    def is_within(self, step: int, per_step: int, held: frozenset[int] | set[int]) -> bool:
        """Return whether all shards that an inner step reads are among the ``held`` ones."""
        return all(place.shard in held for place in self.sequences(step, per_step))

    def _place(self, position: int) -> Place:
        window = self._window(position)
        within = position - window.epoch * self.total - window.begins
        slot, sequence = divmod(permuted(within, self._sequences(window), self._key(window)), self.per_shard)
        return Place(self._shard(window.epoch, window.slots[slot]), sequence)

    def _window(self, position: int) -> Window:
        epoch, left = divmod(position, self.total)
        window = Window(epoch, 0, 0, range(min(1 if epoch == 0 else WINDOW, self.shards)))
        while left >= window.begins + self._sequences(window):
            if epoch or len(window.slots) >= WINDOW:  # all alike but the last one
                skipped = (left - window.begins) // (WINDOW * self.per_shard)
                skipped = min(skipped, (self.shards - 1 - window.slots.start) // WINDOW)
                if skipped > 0:
                    start = window.slots.start + skipped * WINDOW
                    begins = window.begins + skipped * WINDOW * self.per_shard
                    slots = range(start, min(start + WINDOW, self.shards))
                    window = Window(epoch, window.number + skipped, begins, slots)
                    continue
            window = self._after(window)
        return window

    def _after(self, window: Window) -> Window:
        start = window.slots.stop
        if start >= self.shards:
            return Window(window.epoch + 1, 0, 0, range(min(WINDOW, self.shards)))
        size = min(2 * len(window.slots), WINDOW)
        begins = window.begins + self._sequences(window)
        following = Window(window.epoch, window.number + 1, begins, range(start, min(start + size, self.shards)))
        return following if self._sequences(following) else self._after(following)

    def _sequences(self, window: Window) -> int:
        missing = self.per_shard - self.in_last if window.slots.stop == self.shards else 0
        return len(window.slots) * self.per_shard - missing

    def _key(self, window: Window) -> bytes:
        return _key(f"window {self.seed} {window.epoch} {window.number} {self.peer}")

    def _shard(self, epoch: int, slot: int) -> int:
        if slot == self.shards - 1:
            return slot
        return permuted(slot, self.shards - 1, _key(f"shards {self.seed} {epoch} {self.peer}"))


def _key(words: str) -> bytes:
    return hashlib.blake2b(f"p2ptrain tokens {words}".encode(), digest_size=32).digest()
