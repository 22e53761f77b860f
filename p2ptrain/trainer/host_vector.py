"""The host vector: flat vectors in memory that a node and its trainer share.

The memory is an anonymous file that both map. It has no name, so it vanishes with the last process that has it, and a
trainer that dies leaves weights and moments to the next one: whole, or torn if it died while it moved them, which its
ranks' counts of moves tell.

::

    [vector 0 | vector 1 | ... | counts, one per rank]
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

BYTES = 4
"""Bytes of an fp32 element, and of a count."""
MOST_RANKS = 64
"""Ranks that one trainer may have."""


@dataclass(frozen=True, slots=True)
class HostVector:
    """fp32 vectors of P elements each, all zero at first."""

    elements: int
    """P."""
    fd: int
    """Descriptor of the file, to pass to the other process."""
    _memory: mmap.mmap

    @classmethod
    def create(cls, elements: int, vectors: int) -> Self:
        """Allocate the vectors; pages take memory once they are written. Raises OSError."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("p2ptrain-host-vector")
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, BYTES * (elements * vectors + MOST_RANKS))
            return cls.attach(fd, elements)
        except (OSError, OverflowError):
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, elements: int) -> Self:
        """Map the vectors that another process has created. Raises OSError."""
        return cls(elements, fd, mmap.mmap(fd, os.fstat(fd).st_size))

    def vector(self, number: int) -> Tensor:
        """Return one of the vectors, [P] fp32; not a copy."""
        offset = BYTES * self.elements * number
        return torch.frombuffer(self._memory, dtype=torch.float32, count=self.elements, offset=offset)

    @property
    def moves(self) -> Tensor:
        """Moves that each rank has begun and ended, added, [MOST_RANKS] int32; not a copy."""
        return torch.frombuffer(self._memory, dtype=torch.int32, offset=len(self._memory) - BYTES * MOST_RANKS)

    @contextmanager
    def moving(self, rank: int = 0) -> Iterator[None]:
        """Count a move of all vectors, which this rank does its share of in the block; it never ends if that fails."""
        self.moves[rank] += 1
        yield
        self.moves[rank] += 1

    def is_torn(self, ranks: int) -> bool:
        """Return whether a rank has ended within a move, or before a move that another one has made."""
        moves = self.moves[:ranks]
        return bool((moves % 2).any() or (moves != moves[0]).any())

    def close(self) -> None:
        """Close the descriptor; the vectors stay as long as something refers to them."""
        os.close(self.fd)
