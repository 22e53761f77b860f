"""Codec ``topk`` for pseudo-gradients: the 64 largest of each 4096 elements, each as a 12-bit index and a 2-bit value.

The codec needs error feedback (``sim.lockstep.feedback``), so that elements left out of a message are not lost.

Message, little-endian, three sections: two bf16 levels for each chunk (small, large), then all indices, 12 bits each,
then all values, 2 bits each. Indices ascend within a chunk. A value has a sign (bit 0) and a level (bit 1). The last
chunk may be short and keeps the same fraction of its elements, rounded up. The number of kept elements does not depend
on the values, so the size is fixed: 64 (12 + 2) / 4096 = .219 bits per element, and .008 for the levels.

The two levels are the means of the kept magnitudes up to and above their mean, to the nearest bf16. Source: SparseLoCo,
Sarfi et al., arXiv 2508.15706, which also sends four values, from a table per tensor; levels per chunk follow the
layers.

Legend: n elements, C chunk size, K kept of a chunk, g chunks at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec.base import (
    CHUNK,
    LARGEST_MAGNITUDE,
    Buffer,
    CodecTerms,
    Reader,
    blocks_of,
    check_length,
    check_lengths,
    check_magnitude,
    check_snapshot,
    chunks,
    magnitude,
    read_all,
    read_difference,
)
from p2ptrain.codec.packing import code_bytes, pack, pack_twelve, twelve_bytes, unpack, unpack_twelve

LARGEST_CHUNK = 4096
"""Largest chunk in elements, addressable with 12 bits."""

LEVEL_BYTES = 4


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """Codec with the largest elements of each chunk, coarsely quantized, and none of the others."""

    kept: int = 64
    """K: elements kept per chunk, a multiple of 4 so that chunks end on whole bytes. (64 of 4096: SparseLoCo.)"""
    chunk_size: int = LARGEST_CHUNK
    """C: elements of a chunk."""
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_size <= LARGEST_CHUNK:
            raise ValueError(f"chunk size must be between 1 and {LARGEST_CHUNK}, not {self.chunk_size}")
        if not 4 <= self.kept <= self.chunk_size or self.kept % 4:
            raise ValueError(f"kept must be a multiple of 4 and at most {self.chunk_size}, not {self.kept}")

    @property
    def name(self) -> str:
        return "topk"

    def encoded_size(self, terms: CodecTerms) -> int:
        entries = self._entries(terms.elements)
        return self._level_bytes(terms) + twelve_bytes(entries) + code_bytes(entries, 2)

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        levels, indices, values = bytearray(), bytearray(), bytearray()
        for begin, end in self._intervals(terms.elements):
            check_magnitude(magnitude(snapshot[begin:end]))
            rows = blocks_of(snapshot[begin:end], self.chunk_size)
            found, codes, two = largest_of(rows, self._kept_of(end - begin), min(end - begin, self.chunk_size))
            levels += two.view(torch.uint8).numpy().tobytes()
            indices += pack_twelve(found.reshape(-1)).numpy().tobytes()
            values += pack(codes.reshape(-1).to(torch.uint8), 2).numpy().tobytes()
        return bytes(levels + indices + values)

    def decode(self, message: Buffer, terms: CodecTerms) -> Tensor:
        view = check_length(message, self.encoded_size(terms))
        return read_all(self._reader(view, terms), terms.elements, self._chunk)

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        own, other = check_lengths(mine, theirs, self.encoded_size(terms))
        return read_difference(self._reader(own, terms), self._reader(other, terms), terms.elements, self._chunk)

    def _reader(self, message: memoryview, terms: CodecTerms) -> Reader:
        entries = self._entries(terms.elements)
        at_indices = self._level_bytes(terms)
        at_values = at_indices + twelve_bytes(entries)
        levels = _tensor(message[:at_indices]).view(torch.bfloat16).float().view(-1, 2)
        if not bool(((levels >= 0) & (levels <= LARGEST_MAGNITUDE)).all()):
            raise RemoteError(f"message carries levels that are not finite, negative or beyond {LARGEST_MAGNITUDE:.3g}")

        def section(begin: int, end: int, buffer: Tensor) -> None:
            """Decode whole chunks, or the short last one, into ``buffer`` [end - begin]."""
            kept = self._kept_of(end - begin)
            first = begin // self.chunk_size * self.kept
            rows = -(-(end - begin) // self.chunk_size)
            count = rows * kept
            packed = message[at_indices + twelve_bytes(first) : at_indices + twelve_bytes(first + count)]
            indices = unpack_twelve(_tensor(packed), count).view(rows, kept).long()
            width = min(end - begin, self.chunk_size)
            if not bool((indices[:, 1:] > indices[:, :-1]).all()) or not bool((indices[:, -1] < width).all()):
                raise RemoteError("message carries indices that do not ascend or lie outside of their chunk")
            packed = message[at_values + code_bytes(first, 2) : at_values + code_bytes(first + count, 2)]
            codes = unpack(_tensor(packed), 2, count).view(rows, kept).long()
            two = levels[begin // self.chunk_size :][:rows]
            buffer.zero_()
            buffer.view(rows, width).scatter_(1, indices, two.gather(1, codes >> 1) * (1 - 2 * (codes & 1)))

        def read(begin: int, end: int, buffer: Tensor) -> Tensor:
            for first, past in self._intervals(end - begin):
                section(begin + first, begin + past, buffer[first:past])
            return buffer[: end - begin]

        return read

    def _intervals(self, elements: int) -> list[tuple[int, int]]:
        """Return the intervals processed at a time: whole chunks, and the short last one by itself."""
        whole = elements // self.chunk_size * self.chunk_size
        return [*chunks(whole, self._chunk), *([(whole, elements)] if whole < elements else [])]

    @property
    def _chunk(self) -> int:
        return CHUNK // self.chunk_size * self.chunk_size

    def _kept_of(self, elements: int) -> int:
        """Return the number of entries of each chunk of an interval."""
        return self.kept if elements >= self.chunk_size else -(-self.kept * elements // self.chunk_size)

    def _entries(self, elements: int) -> int:
        whole, rest = divmod(elements, self.chunk_size)
        return whole * self.kept + (self._kept_of(rest) if rest else 0)

    def _level_bytes(self, terms: CodecTerms) -> int:
        return -(-terms.elements // self.chunk_size) * LEVEL_BYTES


def largest_of(
    rows: Tensor,  # [g, C] fp32, any device
    kept: int,
    width: int,  # number of elements of a row; the rest is padding
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the largest of each row: [g, kept] ascending indices, [g, kept] int64 codes, [g, 2] bf16 levels."""
    indices = rows[:, :width].abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
    values = rows.gather(1, indices)
    sizes = values.abs().double()
    is_large = sizes > sizes.mean(dim=1, keepdim=True)
    large = is_large.sum(dim=1)
    sum_large = torch.where(is_large, sizes, 0.0).sum(dim=1)
    small_level = (sizes.sum(dim=1) - sum_large).clamp_(min=0.0) / (kept - large).clamp(min=1)
    levels = torch.stack([small_level, sum_large / large.clamp(min=1)], dim=1)
    return indices, (values < 0).long() | (is_large.long() << 1), levels.to(torch.bfloat16)


def _tensor(piece: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(piece), dtype=torch.uint8)
