"""Blockwise absmax codecs ``int8`` and ``int4``: a quarter or an eighth of the bytes, error at most half a step.

Message, little-endian: one bf16 scale for each block of B elements, then the codes; the last block may be short. int8:
one signed byte per element. int4: two codes per byte, two's complement, the earlier in the lower half; an odd last code
is paired with zero. An element is ``code * scale``, codes -127 ... 127 or -7 ... 7, to nearest.

Scales are bf16, because ``code * scale`` then has 8 + 8 significant bits and is exact in fp32. The difference of two
such products is one exact number rounded once, so it is antisymmetric to the bit on any hardware, with or without fused
multiply-subtract. Scales are rounded up, so that no code saturates; that costs at most 1/128 of a step.

The error is relative to the largest weight of the block, not to the peers' disagreement. Equal snapshots have a
difference of zero, but a disagreement far below a step is lost in rounding noise. With four bits this limits the
consensus of weights.

Source: blockwise absmax quantization, Dettmers et al., arXiv 2110.02861.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec.base import (
    LARGEST_MAGNITUDE,
    BlockLayout,
    Buffer,
    CodecTerms,
    Reader,
    Staging,
    blocks_of,
    check_length,
    check_lengths,
    check_magnitude,
    check_snapshot,
    chunks,
    largest_code,
    read_all,
    read_difference,
)
from p2ptrain.codec.packing import pack, unpack

SCALE_BYTES = 2

SMALLEST_SCALE = 2.0**-126
"""The smallest normal number. A block with a smaller scale, elements below 2e-36, is sent as zeros."""


@dataclass(frozen=True, slots=True)
class BlockwiseCodec(BlockLayout):
    """Codec with a 4- or 8-bit code per element and a bf16 scale per block."""

    needs_feedback: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def encoded_size(self, terms: CodecTerms) -> int:
        return self._scale_bytes(terms) + self.code_bytes(terms.elements)

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        chunk = self.chunk
        work = torch.empty(chunk).view(-1, self.block_size)
        codes = torch.empty(chunk, dtype=torch.int8)
        scales = torch.empty(self._scale_bytes(terms) // SCALE_BYTES, dtype=torch.bfloat16)
        message = io.BytesIO()
        message.seek(self._scale_bytes(terms))
        for begin, end in chunks(terms.elements, chunk):
            blocks = blocks_of(snapshot[begin:end], self.block_size)
            part = work[: len(blocks)]
            largest = torch.amax(torch.abs(blocks, out=part), dim=1)
            check_magnitude(float(largest.max()))  # amax propagates NaN
            scale = _scale(largest, largest_code(self.bits))
            scales[begin // self.block_size :][: len(scale)] = scale
            inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
            torch.mul(blocks, inverse[:, None], out=part).round_()
            whole = codes[: part.numel()].copy_(part.view(-1))
            packed = pack(whole.view(torch.uint8).bitwise_and_(15), 4) if self.bits == 4 else whole.view(torch.uint8)
            message.write(packed.numpy().data[: self.code_bytes(end - begin)])
        message.seek(0)
        message.write(scales.view(torch.uint8).numpy().data)
        return message.getvalue()

    def decode(self, message: Buffer, terms: CodecTerms) -> Tensor:
        view = check_length(message, self.encoded_size(terms))
        return read_all(self._reader(view, terms, trusted=False), terms.elements, self.chunk)

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        own, other = check_lengths(mine, theirs, self.encoded_size(terms))
        read_mine, read_theirs = self._reader(own, terms, trusted=True), self._reader(other, terms, trusted=False)
        return read_difference(read_mine, read_theirs, terms.elements, self.chunk)

    def _reader(self, message: memoryview, terms: CodecTerms, trusted: bool) -> Reader:
        """Return a reader of a message. Raises RemoteError for invalid scales, unless the message is trusted."""
        head = self._scale_bytes(terms)
        scales = Staging(head).load(message[:head]).view(torch.bfloat16).float()
        limit = _largest_scale(largest_code(self.bits))
        if not trusted and not bool(((scales >= 0) & (scales <= limit)).all()):
            raise RemoteError(f"message carries scales that are not finite, negative or beyond {limit:.3g}")
        staging = Staging(self.code_bytes(self.chunk))

        def read(begin: int, end: int, buffer: Tensor) -> Tensor:
            first_block, past_block = begin // self.block_size, -(-end // self.block_size)
            whole = (past_block - first_block) * self.block_size  # stale codes of a short last block are cut off below
            piece = message[head + self.code_bytes(begin) : head + self.code_bytes(end)]
            packed = staging.load(piece)[: self.code_bytes(whole)]
            codes = ((unpack(packed, 4, whole).view(torch.int8) ^ 8) - 8) if self.bits == 4 else packed.view(torch.int8)
            scale = scales[first_block:past_block, None]
            torch.mul(codes.view(-1, self.block_size), scale, out=buffer[:whole].view(-1, self.block_size))
            return buffer[: end - begin]

        return read

    def _scale_bytes(self, terms: CodecTerms) -> int:
        return self.blocks(terms.elements) * SCALE_BYTES


def _scale(
    largest: Tensor,  # [blocks] fp32: each block's largest magnitude
    largest_code: int,
) -> Tensor:
    """Compute scales that are exact in bf16, [blocks] fp32: ``largest / largest_code`` rounded up, 0 if subnormal."""
    bits = (largest / largest_code).view(torch.int32)
    rounded_up = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)  # a carry correctly moves into the exponent
    return torch.where(rounded_up >= SMALLEST_SCALE, rounded_up, 0.0)


def _largest_scale(largest_code: int) -> float:
    """Return a bound on valid scales: at least any encoder's (LARGEST_MAGNITUDE / largest_code), far from overflow."""
    return LARGEST_MAGNITUDE / (largest_code // 2 + 1)
