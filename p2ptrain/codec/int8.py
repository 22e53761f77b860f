"""Blockwise absmax int8: a quarter of the bytes, error at most half a step of the block it is in.

Message, little-endian: one bf16 scale for each block of B elements, then n signed bytes; the last block may be short.
An element is ``code * scale``, codes -127 ... 127, to nearest.

Why the scales are bf16: ``code * scale`` has 8 + 8 significant bits, so it is EXACT in fp32, and the difference of two
such products is one exact number rounded once. It is therefore antisymmetric to the bit on any hardware, whether or
not a compiler fuses multiply and subtract. Scales are rounded UP, so that no code saturates; that costs at most 1/128
of a step.

Blockwise absmax quantization: Dettmers et al., arXiv 2110.02861. The error is relative to the largest weight of the
block, not to the peers' disagreement: two peers that send equal snapshots differ by nothing, but a disagreement far
below a step is seen through the noise of rounding.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.codec.door import (
    CHUNK,
    LARGEST_MAGNITUDE,
    Buffer,
    CodecTerms,
    Staging,
    check_lengths,
    check_snapshot,
    chunks,
)
from p2ptrain.errors import RemoteError

DEFAULT_BLOCK_SIZE = 1024
"""Elements a scale: 8.016 bits an element. Speed hardly depends on it from 256 up (``bench/codecs.py``)."""

LARGEST_CODE = 127.0
SCALE_BYTES = 2

SMALLEST_SCALE = 2.0**-126
"""The smallest normal number. A block that would need less is sent as zeros: its elements are below 2e-36."""

LARGEST_SCALE = LARGEST_MAGNITUDE / 64
"""No encoder exceeds it (LARGEST_MAGNITUDE / 127, rounded up), and 128 times it is still far from overflow."""


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """Sends each element as a byte and each block's scale as a bf16."""

    block_size: int = DEFAULT_BLOCK_SIZE
    """B: elements that share a scale."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= CHUNK:
            raise ValueError(f"block size must be between 1 and {CHUNK}, not {self.block_size}")

    @property
    def name(self) -> str:
        return "int8"

    def encoded_size(self, terms: CodecTerms) -> int:
        return self._scale_bytes(terms) + terms.elements

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        chunk = self._chunk
        work = torch.empty(chunk).view(-1, self.block_size)
        codes = torch.empty(chunk, dtype=torch.int8)
        raw = codes.view(torch.uint8).numpy().data
        scales = torch.empty(self._scale_bytes(terms) // SCALE_BYTES, dtype=torch.bfloat16)
        message = io.BytesIO()
        message.seek(self._scale_bytes(terms))
        for begin, end in chunks(terms.elements, chunk):
            blocks = self._blocks(snapshot[begin:end])
            part = work[: len(blocks)]
            largest = torch.amax(torch.abs(blocks, out=part), dim=1)
            if not bool(largest.max() <= LARGEST_MAGNITUDE):  # NaN, which amax inherits, fails as well
                raise ValueError(f"snapshot is not finite or beyond {LARGEST_MAGNITUDE:.3g}")
            scale = _scale(largest)
            scales[begin // self.block_size :][: len(scale)] = scale
            inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
            torch.mul(blocks, inverse[:, None], out=part).round_()
            codes[: part.numel()].copy_(part.view(-1))
            message.write(raw[: end - begin])
        message.seek(0)
        message.write(scales.view(torch.uint8).numpy().data)
        return message.getvalue()

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        mine, theirs = check_lengths(mine, theirs, self.encoded_size(terms))
        head = self._scale_bytes(terms)
        scales_mine, scales_theirs = _read_scales(mine[:head]), _read_scales(theirs[:head])
        if not bool(((scales_theirs >= 0) & (scales_theirs <= LARGEST_SCALE)).all()):
            raise RemoteError(f"message carries scales that are not finite, negative or beyond {LARGEST_SCALE:.3g}")

        chunk = self._chunk
        staging = Staging(chunk)
        value_mine, value_theirs = torch.empty(chunk), torch.empty(chunk)
        result = torch.empty(terms.elements, dtype=torch.float32)

        def decode(message: memoryview, scales: Tensor, begin: int, end: int, values: Tensor) -> Tensor:
            """[end - begin] the elements of one chunk, in the front of ``values`` [chunk]."""
            first_block, past_block = begin // self.block_size, -(-end // self.block_size)
            whole = (past_block - first_block) * self.block_size  # stale codes of a short last block are cut off below
            codes = staging.load(message[head + begin : head + end]).view(torch.int8)[:whole]
            scale = scales[first_block:past_block, None]
            torch.mul(codes.view(-1, self.block_size), scale, out=values[:whole].view(-1, self.block_size))
            return values[: end - begin]

        for begin, end in chunks(terms.elements, chunk):
            torch.sub(
                decode(theirs, scales_theirs, begin, end, value_theirs),
                decode(mine, scales_mine, begin, end, value_mine),
                out=result[begin:end],
            )
        return result

    @property
    def _chunk(self) -> int:
        """Elements worked on at a time: whole blocks."""
        return CHUNK // self.block_size * self.block_size

    def _scale_bytes(self, terms: CodecTerms) -> int:
        """Bytes of all scales, which is where the codes begin."""
        return -(-terms.elements // self.block_size) * SCALE_BYTES

    def _blocks(self, values: Tensor) -> Tensor:
        """[blocks, B] the values, the last block filled up with zeros; copies only when it is short."""
        missing = -len(values) % self.block_size
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return padded.view(-1, self.block_size)


def _scale(
    largest: Tensor,  # [blocks] fp32: each block's largest magnitude
) -> Tensor:
    """[blocks] fp32 scales that are exact in bf16: ``largest / 127`` rounded up, or 0 where that is subnormal."""
    bits = (largest / LARGEST_CODE).view(torch.int32)
    rounded_up = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)  # a carry moves into the exponent, as it should
    return torch.where(rounded_up >= SMALLEST_SCALE, rounded_up, 0.0)


def _read_scales(head: memoryview) -> Tensor:
    """[blocks] fp32."""
    return Staging(len(head)).load(head).view(torch.bfloat16).float()
