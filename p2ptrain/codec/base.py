"""The interfaces of all codecs, and helpers that they share.

Legend: n elements of one snapshot (one fragment).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec.packing import code_bytes

Buffer = bytes | bytearray | memoryview
"""Bytes from a link or from ``encode``."""

Matrices = tuple[tuple[int, int], ...]
"""(rows, columns) of the consecutive matrices in a fragment; empty if unknown."""

LARGEST_MAGNITUDE = 2.0**125
"""Largest magnitude in a message; the difference of two such elements is finite in fp32."""

CHUNK = 1 << 17
"""Elements processed at a time: 512 KiB of fp32, so that the buffers stay in cache and memory is bounded.

Our measurement on one EPYC core: 2^17 to 2^19 are equal, 2^15 is slower.
"""


DEFAULT_BLOCK_SIZE = 1024
"""Elements per scale: 8.016 bits per element. From 256 up it hardly affects speed (``bench/codecs.py``)."""


@dataclass(frozen=True, slots=True)
class CodecTerms:
    """The terms that both sides of an exchange agree on before they encode; equal on both sides."""

    elements: int
    """n: number of elements of the fragment."""
    shape: bytes = b""
    """Agreed norms of blocks relative to ``level``, one byte each (``codec.steps``). Only modular codecs read it."""
    level: int = 0
    """Measured distance of the two snapshots in quarter octaves. Only modular codecs read it."""
    seed: bytes = b""
    """Seed of this exchange's rotation and dither (``codec.rotation``). Only modular codecs read it."""
    matrices: Matrices = ()
    """Matrices of the fragment (``codec.shapes.matrices``). Only the low-rank codec reads it.

    Never sent, since model and fragment determine it.
    """
    rank: int = 0
    """Agreed rank, at most the codec's; 0: the codec's. Only an adaptive low-rank codec reads it."""

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise ValueError(f"a message carries at least one element, not {self.elements}")
        if self.matrices and sum(rows * columns for rows, columns in self.matrices) != self.elements:
            raise ValueError(f"the matrices do not have {self.elements} elements in all")


class Codec(Protocol):
    """Interface of a codec: two snapshots -> two messages -> one difference. Stateless and thread-safe."""

    @property
    def name(self) -> str:
        """The codec's name in a manifest."""

    def encoded_size(self, terms: CodecTerms) -> int:
        """Return the exact length of every message under these terms, in bytes."""

    def encode(
        self,
        snapshot: Tensor,  # [n] fp32, host memory
        terms: CodecTerms,
    ) -> bytes:
        """Encode a snapshot. Equal snapshots give equal bytes on one machine and version of torch.

        Raises:
            ValueError: the snapshot is not finite, exceeds the codec's range (``LARGEST_MAGNITUDE``; 65504 for fp16),
                or does not match the terms; a bug of the caller.
        """

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        """Compute ``theirs - mine``, [n] fp32, finite, and the exact negative of the partner's result.

        Args:
            mine: our own message, from ``encode``.
            theirs: the partner's message, untrusted.
            terms: the agreed terms.

        Raises:
            RemoteError: ``theirs`` is not a message under these terms, or has values that no encoder sends.
        """


class Decodable(Codec, Protocol):
    """Interface of a codec whose messages can be read alone, for averages over many peers and error feedback."""

    @property
    def needs_feedback(self) -> bool:
        """Whether messages leave out elements, which error feedback must then carry over."""

    def decode(self, message: Buffer, terms: CodecTerms) -> Tensor:
        """Decode a message: [n] fp32, finite, and equal to the bit on every machine.

        ``difference(mine, theirs)`` equals ``decode(theirs) - decode(mine)`` to the bit.

        Raises:
            RemoteError: the bytes are not a message under these terms, or have values that no encoder sends.
        """


def is_decodable(codec: Codec) -> TypeGuard[Decodable]:
    """Return whether a codec's messages can be read alone."""
    return hasattr(codec, "decode")


def check_snapshot(
    snapshot: Tensor,  # [n] fp32
    terms: CodecTerms,
) -> None:
    """Raise ValueError unless the tensor is fp32, flat, of the agreed size and in host memory."""
    if snapshot.shape != (terms.elements,) or snapshot.dtype != torch.float32 or snapshot.device.type != "cpu":
        found = f"{snapshot.dtype} {list(snapshot.shape)} on {snapshot.device}"
        raise ValueError(f"a snapshot must be fp32 [{terms.elements}] on the host, not {found}")


class MagnitudeError(ValueError):
    """A snapshot is not finite, or too large for its codec."""


def check_magnitude(largest: float, limit: float = LARGEST_MAGNITUDE) -> None:
    """Raise MagnitudeError if the largest magnitude of a snapshot exceeds the limit or is NaN."""
    if not largest <= limit:
        raise MagnitudeError(f"snapshot is not finite or beyond {limit:.3g}")


def check_length(message: Buffer, size: int) -> memoryview:
    """Return an untrusted message as a view of bytes. Raises RemoteError unless it is ``size`` bytes long."""
    view = memoryview(message).cast("B")
    if len(view) != size:
        raise RemoteError(f"message has {len(view)} bytes instead of {size}")
    return view


def check_lengths(mine: Buffer, theirs: Buffer, size: int) -> tuple[memoryview, memoryview]:
    """Return both messages as views of bytes.

    Raises ValueError if ``mine`` is not ``size`` bytes long, RemoteError if ``theirs`` is not.
    """
    own = memoryview(mine).cast("B")
    if len(own) != size:
        raise ValueError(f"our own message has {len(own)} bytes instead of {size}")
    return own, check_length(theirs, size)


def chunks(elements: int, chunk: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Yield half-open intervals of ``chunk`` elements that cover ``[0, elements)``; the last may be shorter."""
    for begin in range(0, elements, chunk):
        yield begin, min(elements, begin + chunk)


def blocks_of(
    values: Tensor,  # [k]
    block_size: int,
) -> Tensor:
    """Return the values as [blocks, block_size]; copies only if the last block must be padded with zeros."""
    missing = -len(values) % block_size
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, block_size)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Codes of a few bits in blocks of elements: the part that the codecs of weights share."""

    allowed_bits: ClassVar[tuple[int, ...]] = (4, 8)
    largest_block: ClassVar[int] = CHUNK

    bits: int
    """Bits per code."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """B: elements that share a scale or a step width; even if two codes share a byte."""

    def __post_init__(self) -> None:
        if self.bits not in self.allowed_bits:
            raise ValueError(f"a code has {' or '.join(map(str, self.allowed_bits))} bits, not {self.bits}")
        if not 1 <= self.block_size <= self.largest_block:
            raise ValueError(f"block size must be between 1 and {self.largest_block}, not {self.block_size}")
        if self.bits == 4 and self.block_size % 2:
            raise ValueError(f"block size must be even for four bits, not {self.block_size}")

    @property
    def chunk(self) -> int:
        """Elements processed at a time: whole blocks."""
        return CHUNK // self.block_size * self.block_size

    def blocks(self, elements: int) -> int:
        return -(-elements // self.block_size)

    def code_bytes(self, elements: int) -> int:
        return code_bytes(elements, self.bits)


def largest_code(bits: int) -> int:
    """Return the largest code of that many bits with a sign, the smallest one left out."""
    return int(2 ** (bits - 1) - 1)


class Staging:
    """A small buffer for reading a message piece by piece.

    A tensor cannot safely view a read-only or unaligned buffer. Copying pieces costs one pass in cache, and no memory
    that grows with the message.
    """

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.uint8)
        self._view = self._tensor.numpy().data

    def load(self, piece: memoryview) -> Tensor:
        """Copy the piece to the front and return the whole buffer, uint8 [size]; bytes after the piece are stale."""
        self._view[: len(piece)] = piece
        return self._tensor


Reader = Callable[[int, int, Tensor], Tensor]
"""Function ``read(begin, end, buffer)`` that decodes the elements [begin, end) of one message.

It writes them to the front of ``buffer`` (fp32, at least one chunk long) and returns that part. Intervals are those of
``chunks``.
"""


def read_all(read: Reader, elements: int, chunk: int) -> Tensor:
    """Decode a whole message, [n] fp32."""
    result = torch.empty(elements, dtype=torch.float32)
    buffer = torch.empty(chunk)
    for begin, end in chunks(elements, chunk):
        result[begin:end].copy_(read(begin, end, buffer))
    return result


def read_difference(mine: Reader, theirs: Reader, elements: int, chunk: int) -> Tensor:
    """Compute ``theirs - mine``, [n] fp32, each element rounded once."""
    result = torch.empty(elements, dtype=torch.float32)
    buffer_mine, buffer_theirs = torch.empty(chunk), torch.empty(chunk)
    for begin, end in chunks(elements, chunk):
        torch.sub(theirs(begin, end, buffer_theirs), mine(begin, end, buffer_mine), out=result[begin:end])
    return result


def magnitude(values: Tensor) -> float:
    """Return the largest magnitude; NaN if an element is NaN."""
    lowest, highest = torch.aminmax(values)
    return math.nan if lowest != lowest else max(-float(lowest), float(highest))
