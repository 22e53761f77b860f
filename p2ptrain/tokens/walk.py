"""Which sequences a peer reads at which inner step: a pure function of (seed, peer id, step).

In each epoch a peer takes the shards in an order of its own, a window of some at a time, and reads the sequences of a
window in random order. So it needs few shards at once, knows which ones come next, resumes at the next token, and
reads every sequence once before it reads any twice. The first windows are short, so that it can begin soon::

    epoch 0    [a part of 1 shard] [1 shard] [2 shards] [4 shards] [8 shards] [8 shards] ... [the rest of the first]
    epoch 1    [8 shards] [8 shards] ...

The very first shard is one of ``FIRST_SHARDS``, which all peers share: when many begin at once, other peers have it.
The last shard may be shorter than the others, and comes last of the whole ones in each epoch.
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

FIRST_SHARDS = 8
"""Shards of which each peer reads one first. A bootstrap of 20 Mbit/s sends them in 13 s. Of 100 peers that begin at
once, the median begins after 10 s and the last after 45 s; with shards of their own, after 66 s and 141 s
(docs/results/CARRY.md)."""
FIRST_PARTS = 4
"""A peer reads one of so many parts of its first shard before it reads others: long enough for a CPU to get its own
shards from a busy bootstrap, short enough that peers which stay for an hour read nearly as much different text."""


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

    @property
    def is_rest(self) -> bool:
        """Whether this is what the first window has left of its shard."""
        return self.slots.start == 0 and self.begins > 0


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
                key, length, begins = self._order(window)
                slots, sequences = np.divmod(permutation(length, key)[begins : begins + count], self.per_shard)
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

    def _place(self, position: int) -> Place:
        window = self._window(position)
        key, length, begins = self._order(window)
        within = begins + position - window.epoch * self.total - window.begins
        slot, sequence = divmod(permuted(within, length, key), self.per_shard)
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
        start, begins = window.slots.stop, window.begins + self._sequences(window)
        if start >= self.shards and window.epoch == 0 and self._rest:
            return Window(0, window.number + 1, begins, range(1))
        if start >= self.shards or window.is_rest:
            return Window(window.epoch + 1, 0, 0, range(min(WINDOW, self.shards)))
        size = 1 if self._is_of_first(window) else min(2 * len(window.slots), WINDOW)
        following = Window(window.epoch, window.number + 1, begins, range(start, min(start + size, self.shards)))
        return following if self._sequences(following) else self._after(following)

    def _sequences(self, window: Window) -> int:
        if self._is_of_first(window):
            return self._rest if window.is_rest else self._first_part
        missing = self.per_shard - self.in_last if window.slots.stop == self.shards else 0
        return len(window.slots) * self.per_shard - missing

    @property
    def _first_part(self) -> int:
        """Sequences of the first window."""
        return self.total if self.shards == 1 else -(-self.per_shard // FIRST_PARTS)

    @property
    def _rest(self) -> int:
        """Sequences that the first window has left of its shard."""
        return 0 if self.shards == 1 else self.per_shard - self._first_part

    def _is_of_first(self, window: Window) -> bool:
        return window.epoch == 0 and window.slots.start == 0

    def _order(self, window: Window) -> tuple[bytes, int, int]:
        """Return the key and length of the permutation that a window follows, and where it begins in it.

        The first window and its rest are two pieces of one permutation.
        """
        number, begins, length = window.number, 0, self._sequences(window)
        if self._is_of_first(window):
            number, begins, length = 0, self._first_part if window.is_rest else 0, self._first_part + self._rest
        return _key(f"window {self.seed} {window.epoch} {number} {self.peer}"), length, begins

    def _shard(self, epoch: int, slot: int) -> int:
        last = self.shards - 1
        if slot == last:
            return slot
        own = _key(f"shards {self.seed} {epoch} {self.peer}")
        shard = permuted(slot, last, own)
        if epoch:
            return shard
        first = self._shared_shard(last)
        if slot == 0:
            return first
        return permuted(0, last, own) if shard == first else shard

    def _shared_shard(self, below: int) -> int:
        """Return the shard that this peer reads first, one of those that all peers share."""
        choice = int.from_bytes(_key(f"first {self.seed} {self.peer}")[:8], "little") % min(FIRST_SHARDS, below)
        return permuted(choice, below, _key(f"first {self.seed}"))


def _key(words: str) -> bytes:
    return hashlib.blake2b(f"p2ptrain tokens {words}".encode(), digest_size=32).digest()
