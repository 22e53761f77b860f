"""The host vector: flat vectors in memory that a node and its trainer share.

The memory is an anonymous file that both map. It has no name, so it vanishes with the last process that has it, and a
trainer that dies leaves weights and moments to the next one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

BYTES = 4
"""Of an fp32 element."""


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
        os.ftruncate(fd, BYTES * elements * vectors)
        return cls.attach(fd, elements)

    @classmethod
    def attach(cls, fd: int, elements: int) -> Self:
        """Map the vectors that another process has created. Raises OSError."""
        return cls(elements, fd, mmap.mmap(fd, os.fstat(fd).st_size))

    def vector(self, number: int) -> Tensor:
        """Return one of the vectors, [P] fp32; not a copy."""
        offset = BYTES * self.elements * number
        return torch.frombuffer(self._memory, dtype=torch.float32, count=self.elements, offset=offset)
