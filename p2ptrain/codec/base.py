"""The doors every codec stands behind, and the few things all codecs share.

Legend: n elements of one snapshot (one fragment).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError

Buffer = bytes | bytearray | memoryview
"""Bytes as they come from a link or from ``encode``."""

Matrices = tuple[tuple[int, int], ...]
"""(rows, columns) of the matrices that lie in a fragment one after the other; empty means that nothing is known."""

LARGEST_MAGNITUDE = 2.0**125
"""No element of a message is larger. The difference of two is then finite in fp32, whatever a stranger sends."""

CHUNK = 1 << 17
"""Elements worked on at a time: 512 KiB of fp32, so that the buffers stay in cache. Our measurement on one EPYC core:
2^17 to 2^19 alike, 2^15 slower. It also bounds the memory beside input and output."""


@dataclass(frozen=True, slots=True)
class CodecTerms:
    """What both sides of one exchange agreed on before they encode; both hold equal terms."""

    elements: int
    """n: elements of the fragment."""
    shape: bytes = b""
    """The agreed step widths relative to ``level``, one byte a block (``codec.steps``). Only modular codecs read it."""
    level: int = 0
    """The measured distance of the two snapshots in quarter octaves. Only modular codecs read it."""
    matrices: Matrices = ()
    """What lies in the fragment (``codec.shapes.matrices``). Only the low-rank codec reads it. Never sent: model and
    fragment determine it."""

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise ValueError(f"a message carries at least one element, not {self.elements}")
        if self.matrices and sum(rows * columns for rows, columns in self.matrices) != self.elements:
            raise ValueError(f"the matrices do not have {self.elements} elements in all")


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
        """The message. Equal snapshots give equal bytes, on one machine and version of torch.

        Raises:
            ValueError: the snapshot is not finite, beyond what the codec can carry (``LARGEST_MAGNITUDE``; 65504 for
                fp16), or not what the terms say. Our bug.
        """

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        """[n] fp32 ``theirs - mine``, finite, and antisymmetric: the partner's call yields the negative, to the bit.

        Args:
            mine: what ``encode`` returned for our own snapshot.
            theirs: what the partner sent; may be anything.

        Raises:
            RemoteError: ``theirs`` is no message under these terms, or carries what no encoder would send.
        """


class Decodable(Codec, Protocol):
    """A codec whose messages can be read alone, so that many of them can be averaged and error fed back."""

    def decode(self, message: Buffer, terms: CodecTerms) -> Tensor:
        """[n] fp32 what the message says: finite, and the same to the bit on every machine.

        ``difference(mine, theirs)`` is ``decode(theirs) - decode(mine)``, to the bit.

        Raises:
            RemoteError: the message is none under these terms, or carries what no encoder would send.
        """


def check_snapshot(
    snapshot: Tensor,  # [n] fp32
    terms: CodecTerms,
) -> None:
    """Raise ValueError unless the tensor is the host's, fp32, flat and of the agreed size."""
    if snapshot.shape != (terms.elements,) or snapshot.dtype != torch.float32 or snapshot.device.type != "cpu":
        found = f"{snapshot.dtype} {list(snapshot.shape)} on {snapshot.device}"
        raise ValueError(f"a snapshot must be fp32 [{terms.elements}] on the host, not {found}")


class MagnitudeError(ValueError):
    """What is to be sent is not finite, or too large for its codec."""


def check_magnitude(largest: float, limit: float = LARGEST_MAGNITUDE) -> None:
    """Raise MagnitudeError unless the largest magnitude of a snapshot is within the limit. NaN is not."""
    if not largest <= limit:
        raise MagnitudeError(f"snapshot is not finite or beyond {limit:.3g}")


def check_length(message: Buffer, size: int) -> memoryview:
    """A message that may be anything, as a view of bytes. Raises RemoteError unless it is ``size`` bytes long."""
    view = memoryview(message).cast("B")
    if len(view) != size:
        raise RemoteError(f"message has {len(view)} bytes instead of {size}")
    return view


def check_lengths(mine: Buffer, theirs: Buffer, size: int) -> tuple[memoryview, memoryview]:
    """Both messages as views of bytes; raises when one is not ``size`` bytes long."""
    own = memoryview(mine).cast("B")
    if len(own) != size:
        raise ValueError(f"our own message has {len(own)} bytes instead of {size}")
    return own, check_length(theirs, size)


def chunks(elements: int, chunk: int = CHUNK) -> Iterator[tuple[int, int]]:
    """The half-open intervals of ``chunk`` elements that cover ``[0, elements)``; the last may be shorter."""
    for begin in range(0, elements, chunk):
        yield begin, min(elements, begin + chunk)


def blocks_of(
    values: Tensor,  # [k]
    block_size: int,
) -> Tensor:
    """[blocks, block_size] the values, the last block filled up with zeros; copies only when it is short."""
    missing = -len(values) % block_size
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, block_size)


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


Reader = Callable[[int, int, Tensor], Tensor]
"""``read(begin, end, buffer)`` puts the elements [begin, end) of one message into the front of ``buffer`` (fp32, at
least a chunk long) and returns that part of it. Intervals are those of ``chunks``."""


def read_all(read: Reader, elements: int, chunk: int) -> Tensor:
    """[n] fp32 a whole message."""
    result = torch.empty(elements, dtype=torch.float32)
    buffer = torch.empty(chunk)
    for begin, end in chunks(elements, chunk):
        result[begin:end].copy_(read(begin, end, buffer))
    return result


def read_difference(mine: Reader, theirs: Reader, elements: int, chunk: int) -> Tensor:
    """[n] fp32 ``theirs - mine``, each element rounded once."""
    result = torch.empty(elements, dtype=torch.float32)
    buffer_mine, buffer_theirs = torch.empty(chunk), torch.empty(chunk)
    for begin, end in chunks(elements, chunk):
        torch.sub(theirs(begin, end, buffer_theirs), mine(begin, end, buffer_mine), out=result[begin:end])
    return result


def magnitude(values: Tensor) -> float:
    """The largest magnitude; NaN when an element is."""
    lowest, highest = torch.aminmax(values)
    return math.nan if lowest != lowest else max(-float(lowest), float(highest))
