"""Which parts of a text are held out, without knowing how long it will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from p2ptrain.tokens.writing import ShardWriter


class Unit(NamedTuple):
    """Ids that are held out, or not, as a whole."""

    ids: np.ndarray
    source: int = 0
    """Number of the source, of whose documents only consecutive units follow each other without a mark."""
    begins: bool = True
    """Whether a document begins with it."""
    ends: bool = True
    """Whether a document ends with it."""


class Parts:
    """Division of units into training and held-out ones, evenly over the text, and equal for equal units.

    A unit is held out if no more than a fraction of all ids so far is then. When the held-out ones no longer fit into
    ``most`` ids, every second of them is trained on instead, and the fraction is halved.

    Args:
        writer: of the training ids; the held-out ones follow at the end.
        fraction: of the ids that is held out.
        most: held-out ids at most, which every peer needs before its first step.
        prefix: ids before each document.
        separator: id after each document; None: there is none.
    """

    def __init__(
        self,
        writer: ShardWriter,
        fraction: float,
        most: int,
        prefix: Sequence[int] = (),
        separator: int | None = None,
    ) -> None:
        self._writer = writer
        self._fraction, self._most = fraction, most
        self._prefix = np.asarray(prefix, dtype=np.uint32)
        self._separator = np.asarray([] if separator is None else [separator], dtype=np.uint32)
        self._held: list[np.ndarray] = []
        self._held_ids = 0
        self.training = self.all = 0
        """Ids of training, and of all units."""
        self._open: int | None = None
        """Source whose document the last training unit did not end."""

    def add(self, unit: Unit) -> None:
        """Take a unit. Raises HomeError."""
        self.all += len(unit.ids)
        if self._held_ids + len(unit.ids) <= self._fraction * self.all and len(unit.ids) < self._most // 3:
            self._hold(self._whole(unit))
        else:
            self._train(unit)

    @property
    def shards(self) -> int:
        """Whole training shards that were written."""
        return len(self._writer.shards)

    def finish(self) -> None:
        """Write what is held out. Raises HomeError."""
        self._close()
        for ids in self._held:
            self._writer.add(ids, is_training=False)
        self._held = []

    def state(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return numbers and arrays from which ``resume`` goes on."""
        numbers = {
            "fraction": self._fraction,
            "training": self.training,
            "all": self.all,
            "open": self._open,
            "lengths": [len(each) for each in self._held],
            "shards": self._writer.shards,
        }
        return numbers, [*self._held, self._writer.rest()]

    def resume(self, numbers: dict[str, Any], ids: np.ndarray) -> None:
        """Go on from a ``state``, whose arrays are joined."""
        self._fraction, self._open = numbers["fraction"], numbers["open"]
        self.training, self.all = numbers["training"], numbers["all"]
        ends = np.cumsum(numbers["lengths"], dtype=np.int64).tolist()
        *self._held, rest = np.split(ids, ends) if ends else [ids]
        self._held_ids = sum(numbers["lengths"])
        self._writer.resume(numbers["shards"], rest)

    def _hold(self, ids: np.ndarray) -> None:
        while self._held_ids + len(ids) > self._most:
            for each in self._held[1::2]:
                self._close()
                self._write(each)
            self._held = self._held[::2]
            self._held_ids = sum(map(len, self._held))
            self._fraction /= 2
        self._held.append(ids)
        self._held_ids += len(ids)

    def _train(self, unit: Unit) -> None:
        if unit.begins or unit.source != self._open:
            self._close()
            self._write(self._prefix)
        self._write(unit.ids)
        self._open = unit.source
        if unit.ends:
            self._close()

    def _close(self) -> None:
        """End the document of the last training unit."""
        if self._open is not None:
            self._write(self._separator)
        self._open = None

    def _whole(self, unit: Unit) -> np.ndarray:
        """Return the ids of a unit as a document of its own; that of the training part ends before it."""
        if unit.source == self._open:
            self._close()
        return np.concatenate([self._prefix, unit.ids, self._separator])

    def _write(self, ids: np.ndarray) -> None:
        if len(ids):
            self.training += len(ids)
            self._writer.add(ids, is_training=True)
