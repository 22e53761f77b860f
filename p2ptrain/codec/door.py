"""The door every codec stands behind, and the few things all codecs share.

Legend: n elements of one snapshot (one fragment).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.errors import RemoteError

Buffer = bytes | bytearray | memoryview
"""Bytes as they come from a link or from ``encode``."""

LARGEST_MAGNITUDE = 2.0**125
"""No element of a message is larger. The difference of two is then finite in fp32, whatever a stranger sends."""

CHUNK = 1 << 17
"""Elements worked on at a time: 512 KiB of fp32, so that the buffers stay in cache. Our measurement on one EPYC core:
2^17 to 2^19 alike, 2^15 slower. It also bounds the memory beside input and output."""


@dataclass(frozen=True, slots=True)
class CodecTerms:
    """What both sides of one exchange agreed on before they encode; both hold equal terms.

    Today that is the size alone. A codec whose messages cannot be read alone (modular codes: both sides need one
    common step width and number of bits) finds its parameters here.
    """

    elements: int
    """n: elements of the fragment."""

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise ValueError(f"a message carries at least one element, not {self.elements}")


class Codec(Protocol):
    """Two snapshots -> two messages -> one difference. Stateless; any thread may call it."""

    @property
    def name(self) -> str:
        """The name a manifest knows it by."""

    def encoded_size(self, terms: CodecTerms) -> int:
        """The exact length of every message under these terms, in bytes."""

    def encode(
        self,
        snapshot: Tensor,  # [n] fp32, host memory
        terms: CodecTerms,
    ) -> bytes:
        """The message. Equal snapshots give equal bytes.

        Raises:
            ValueError: the snapshot is not finite, beyond ``LARGEST_MAGNITUDE``, or not what the terms say. Our bug.
        """

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        """[n] fp32 ``theirs - mine``, finite, and antisymmetric: the partner's call yields the negative, to the bit.

        Args:
            mine: what ``encode`` returned for our own snapshot.
            theirs: what the partner sent; may be anything.

        Raises:
            RemoteError: ``theirs`` is no message under these terms, or carries what no encoder would send.
        """


def check_snapshot(
    snapshot: Tensor,  # [n] fp32
    terms: CodecTerms,
) -> None:
    """Raise ValueError unless the tensor is the host's, fp32, flat and of the agreed size."""
    if snapshot.shape != (terms.elements,) or snapshot.dtype != torch.float32 or snapshot.device.type != "cpu":
        found = f"{snapshot.dtype} {list(snapshot.shape)} on {snapshot.device}"
        raise ValueError(f"a snapshot must be fp32 [{terms.elements}] on the host, not {found}")


def check_lengths(mine: Buffer, theirs: Buffer, size: int) -> tuple[memoryview, memoryview]:
    """Both messages as views of bytes; raises when one is not ``size`` bytes long."""
    mine_bytes, theirs_bytes = memoryview(mine).cast("B"), memoryview(theirs).cast("B")
    if len(mine_bytes) != size:
        raise ValueError(f"our own message has {len(mine_bytes)} bytes instead of {size}")
    if len(theirs_bytes) != size:
        raise RemoteError(f"message has {len(theirs_bytes)} bytes instead of {size}")
    return mine_bytes, theirs_bytes


def chunks(elements: int, chunk: int = CHUNK) -> Iterator[tuple[int, int]]:
    """The half-open intervals of ``chunk`` elements that cover ``[0, elements)``; the last may be shorter."""
    for begin in range(0, elements, chunk):
        yield begin, min(elements, begin + chunk)


class Staging:
    """A small buffer through which a message passes piece by piece.

    A tensor cannot view a read-only or unaligned buffer safely; copying piecewise costs one pass in cache, and no
    memory that grows with the message.
    """

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.uint8)
        self._view = self._tensor.numpy().data

    def load(self, piece: memoryview) -> Tensor:
        """Copy the piece to the front; returns the WHOLE buffer, uint8 [size]. What follows the piece is stale."""
        self._view[: len(piece)] = piece
        return self._tensor
