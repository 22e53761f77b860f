"""Modular codecs ``modular8`` and ``modular4``: the error is relative to the peers' disagreement, not to the weight.

Both sides quantize a block with the agreed step width D and send only the lowest b bits of each integer::

    m = round(x / D)        r = m mod 2^b  is sent        c = (r_theirs - r_mine) mod 2^b, centred
    difference = D c        exact within D wherever |m_theirs - m_mine| < 2^(b-1)

No reference is shared, and one message alone has no meaning. A difference of more than 2^(b-1) - 1 steps **wraps**. To
detect this, each block carries a hash of the bits cut off, q = floor(m / 2^b). The hash is linear, so the difference of
both hashes must be the hash of q_theirs - q_mine, which the two codes imply if nothing wrapped. Both sides decide from
the same two messages: a wrapped block counts as zero on both, and both propose wider steps next time (``codec.steps``).
One or two elements that wrapped once are always detected, more with probability 1 - 2^-15.

Message, little-endian: an int16 hash for each block of B elements, then the codes; four-bit codes in pairs per byte,
the earlier in the lower half. The last block may be short and is padded with zeros. Any bytes of the right length are a
message. D is exact in bf16, so D c is exact in fp32 and antisymmetric to the bit.

Source: Moniqua, Lu and De Sa, arXiv 2002.11787, for the modulus, there with one constant bound for all elements. Step
widths that follow the disagreement and the linear hash are our own.

The kernels at the end accept tensors on any device; the codec's methods need host memory.

Legend: n elements, B block size, k blocks at a time.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor

from p2ptrain.codec.base import (
    BlockLayout,
    Buffer,
    CodecTerms,
    Staging,
    blocks_of,
    check_lengths,
    check_magnitude,
    check_snapshot,
    chunks,
    magnitude,
)
from p2ptrain.codec.packing import pack_nibbles, unpack_nibbles
from p2ptrain.codec.steps import WRAPPED, widths

HASH_BYTES = 2

LARGEST_BLOCK = 4096
"""Largest block in elements. One wrap discards a whole block, and hash sums must stay within 32 bits."""

LARGEST_INTEGER = 2.0**30
"""Limit of m, reached only if D is far below the fp32 resolution at x."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two messages."""

    difference: Tensor  # [n] fp32 theirs - mine; zero in wrapped blocks
    largest: Tensor  # [blocks] uint8 largest |c| per block, or WRAPPED; equal on both sides; [0] without blocks

    @property
    def wrapped(self) -> float:
        """Fraction of blocks that wrapped and count as zero; 0 for a codec without blocks."""
        return float((self.largest == WRAPPED).sum()) / max(1, len(self.largest))


@dataclass(frozen=True, slots=True)
class ModularCodec(BlockLayout):
    """Codec with integers modulo 2^bits, in steps of the widths given by ``terms.shape`` and ``terms.level``."""

    largest_block: ClassVar[int] = LARGEST_BLOCK

    @property
    def name(self) -> str:
        return f"modular{self.bits}"

    def encoded_size(self, terms: CodecTerms) -> int:
        return self._hash_bytes(terms) + self.code_bytes(terms.elements)

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        step = self._widths(terms)
        weights = hash_weights(self.block_size)
        hashes = torch.empty(len(step), dtype=torch.int16)
        message = io.BytesIO()
        message.seek(self._hash_bytes(terms))
        for begin, end in chunks(terms.elements, self.chunk):
            check_magnitude(magnitude(snapshot[begin:end]))
            blocks = blocks_of(snapshot[begin:end], self.block_size)
            these = slice(begin // self.block_size, begin // self.block_size + len(blocks))
            residues, hashes[these] = cut(blocks, step[these], self.bits, weights)
            packed = pack_nibbles(residues.view(-1)) if self.bits == 4 else residues.view(-1)
            message.write(packed.numpy().data[: self.code_bytes(end - begin)])
        message.seek(0)
        message.write(hashes.view(torch.uint8).numpy().data)
        return message.getvalue()

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        return self.compare(mine, theirs, terms).difference

    def compare(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Comparison:
        """Compute the difference and the largest code of each block. Raises RemoteError like ``difference``."""
        own, other = check_lengths(mine, theirs, self.encoded_size(terms))
        step = self._widths(terms)
        weights = hash_weights(self.block_size)
        head = self._hash_bytes(terms)
        hashes_mine, hashes_theirs = (Staging(head).load(m[:head]).view(torch.int16) for m in (own, other))
        staging_mine, staging_theirs = (Staging(self.code_bytes(self.chunk)) for _ in range(2))
        result = torch.empty(terms.elements, dtype=torch.float32)
        largest = torch.empty(len(step), dtype=torch.uint8)

        def residues(message: memoryview, staging: Staging, begin: int, end: int, whole: int) -> Tensor:
            """Return the codes of one chunk, [k, B], padded with zeros; int8 if their differences fit, else int16."""
            piece = message[head + self.code_bytes(begin) : head + self.code_bytes(end)]
            packed = staging.load(piece)[: self.code_bytes(whole)]
            codes = unpack_nibbles(packed).view(torch.int8) if self.bits == 4 else packed.to(torch.int16)
            codes[end - begin :] = 0
            return codes.view(-1, self.block_size)

        for begin, end in chunks(terms.elements, self.chunk):
            these = slice(begin // self.block_size, self.blocks(end))
            whole = (these.stop - these.start) * self.block_size
            codes, largest[these] = centred(
                residues(own, staging_mine, begin, end, whole),
                residues(other, staging_theirs, begin, end, whole),
                hashes_theirs[these] - hashes_mine[these],
                self.bits,
                weights.short(),
            )
            scale = torch.where(largest[these] == WRAPPED, 0.0, step[these])[:, None]
            if whole == end - begin:
                torch.mul(codes, scale, out=result[begin:end].view(-1, self.block_size))
            else:
                result[begin:end] = (codes * scale).view(-1)[: end - begin]
        return Comparison(result, largest)

    def _widths(self, terms: CodecTerms) -> Tensor:
        if len(terms.shape) != self.blocks(terms.elements):
            raise ValueError(f"{len(terms.shape)} step widths are agreed for {self.blocks(terms.elements)} blocks")
        return widths(terms.shape, terms.level)

    def _hash_bytes(self, terms: CodecTerms) -> int:
        return self.blocks(terms.elements) * HASH_BYTES


def cut(
    blocks: Tensor,  # [k, B] fp32
    step: Tensor,  # [k] fp32
    bits: int,
    weights: Tensor,  # [B] int32
) -> tuple[Tensor, Tensor]:
    """Encode blocks: [k, B] uint8 residues of m, and [k] int16 hashes of the bits cut off."""
    integers = torch.div(blocks, step[:, None]).round_().clamp_(-LARGEST_INTEGER, LARGEST_INTEGER).to(torch.int32)
    residues = (integers & (2**bits - 1)).to(torch.uint8)
    # Modulo 2^16 after each product keeps sums within 32 bits; two's complement gives the result of one final modulo.
    cut_off = integers.bitwise_right_shift_(bits).bitwise_and_(0xFFFF).mul_(weights).bitwise_and_(0xFFFF)
    return residues, cut_off.sum(dim=1, dtype=torch.int32).to(torch.int16)


def centred(
    residues_mine: Tensor,  # [k, B] int16, or int8 with four bits
    residues_theirs: Tensor,  # [k, B] of the same type; overwritten
    hashes: Tensor,  # [k] int16 theirs - mine, modulo 2^16
    bits: int,
    weights: Tensor,  # [B] int16
) -> tuple[Tensor, Tensor]:
    """Compute theirs - mine in steps, [k, B], and the largest magnitude of each block, [k] uint8, or WRAPPED.

    A code of 2^(b-1) steps has an ambiguous sign, so its block counts as wrapped, too.
    """
    half = 2 ** (bits - 1)
    apart = residues_theirs.sub_(residues_mine)
    codes = (apart + half).bitwise_and_(2**bits - 1).sub_(half)
    carries = torch.sub(codes, apart, out=apart).bitwise_right_shift_(bits)  # q_theirs - q_mine if nothing wrapped
    implied = carries.to(torch.int16).mul_(weights).sum(dim=1, dtype=torch.int32)
    largest = torch.abs(codes, out=apart).amax(dim=1)
    wrapped = ((hashes - implied) & 0xFFFF != 0) | (largest == half)
    return codes, torch.where(wrapped, WRAPPED, largest.to(torch.uint8))


@functools.cache
def hash_weights(block_size: int) -> Tensor:
    """Return the weights of the hash, [B] int32: distinct odd numbers below 2^14, shuffled. Part of the protocol.

    Odd weights keep one wrapped element from vanishing modulo 2^16; distinct weights below 2^15 do so for two.
    """
    shuffled = sorted(range(2**13), key=lambda number: blake2b(number.to_bytes(2, "little"), digest_size=8).digest())
    return 2 * torch.tensor(shuffled[:block_size], dtype=torch.int32) + 1
