"""Modular codecs ``modular8`` to ``modular2``: the error is relative to the peers' disagreement, not to the weight.

Both sides rotate a block by the same random rotation (``codec.rotation``), add the same random dither u, quantize with
the agreed step width D and send only the lowest b bits of each integer::

    m = round(H S x / D + u)      r = m mod 2^b  is sent      c = (r_theirs - r_mine) mod 2^b, centred
    difference = S H c * D / B

No reference is shared, and one message alone has no meaning.

**Rotation.** A coordinate of the rotated difference has the root mean square of the block's norm and sub-Gaussian
tails, whatever the difference is. So few codes reach far, and D follows from the norm alone (``codec.steps``).

**Dither.** Let d be a coordinate of the difference in steps, d = floor(d) + f, and let both sides use u_mine and
u_theirs, each uniform on a step. For equal dithers, m_theirs - m_mine is floor(d) with probability 1 - f and
floor(d) + 1 with probability f: its mean is d whatever the weights are, its variance f (1 - f), 1/6 on average. With
an offset v = u_theirs - u_mine, subtracted from the code, f is the fractional part of d + v instead. Since
f (1 - f) = 1/6 - sum over k of cos(2 pi k f) / (pi k)^2, its mean over a normal d is smallest at v = 0. With
independent or opposite dithers v varies over a step, and the variance is 1/6 even where the peers agree. Equal dithers
therefore have the smallest error, and decoding need not know them.

**Wraps.** A code beyond 2^(b-1) - 1 steps wraps: it is off by 2^b steps. A step wide enough for all codes of a block
wastes most of the bits; with the widths of ``codec.steps`` few do, and the rotation spreads their error too.
(2^(b-1) has no sign and counts as 0.) If the steps of a block were far too narrow, its codes are spread evenly; then
it **wrapped**, counts as zero on both sides, and both propose wider steps.

Message: the codes of all blocks, the last block padded with zeros; codes of less than 8 bits are packed, the earlier in
the lower bits. Any bytes of the right length are a message. The sums of S H c are integers below 2^24, so they are
exact on any machine, and so is D / B; their product is rounded once. Both sides' differences are therefore exact
negatives even on different hardware.

Source: Moniqua, Lu and De Sa, arXiv 2002.11787, for the modulus; Davies et al., arXiv 2002.09268, for the modulus after
a rotation. Step widths that follow the disagreement and are not meant to hold every code are our own.

The kernels at the end accept tensors on any device; the codec's methods need host memory.

Legend: n elements, B block size, k blocks at a time.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
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
from p2ptrain.codec.packing import pack, unpack
from p2ptrain.codec.rotation import rotated, signs_and_dither
from p2ptrain.codec.steps import FILL_UNIT, FULL, REACH, WRAPPED, widths

LARGEST_RATIO = 2.0**20
"""Limit of x / D, so that the sums of a block stay within 2^30. Beyond it fp32 does not resolve D / sqrt(B) at x."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two messages."""

    difference: Tensor  # [n] fp32 theirs - mine; zero in wrapped blocks
    fill: Tensor  # [blocks] uint8 mean |c| (``codec.steps``), or WRAPPED; equal on both sides; [0] without blocks

    @property
    def wrapped(self) -> float:
        """Fraction of blocks that wrapped and count as zero; 0 for a codec without blocks."""
        return float((self.fill == WRAPPED).sum()) / max(1, len(self.fill))


@dataclass(frozen=True, slots=True)
class ModularCodec(BlockLayout):
    """Codec with integers modulo 2^bits, in steps of the widths given by ``terms.shape`` and ``terms.level``."""

    allowed_bits: ClassVar[tuple[int, ...]] = tuple(REACH)
    largest_block: ClassVar[int] = FRAGMENT_ALIGNMENT

    def __post_init__(self) -> None:
        BlockLayout.__post_init__(self)
        if self.block_size < 8 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block size must be a power of two, at least 8, not {self.block_size}")

    @property
    def name(self) -> str:
        return f"modular{self.bits}"

    def encoded_size(self, terms: CodecTerms) -> int:
        return self.code_bytes(self.blocks(terms.elements) * self.block_size)

    def encode(self, snapshot: Tensor, terms: CodecTerms) -> bytes:
        check_snapshot(snapshot, terms)
        step = self._widths(terms)
        signs, dither = signs_and_dither(terms.seed, self.block_size)
        message = io.BytesIO()
        for begin, end in chunks(terms.elements, self.chunk):
            check_magnitude(magnitude(snapshot[begin:end]))
            blocks = blocks_of(snapshot[begin:end], self.block_size)
            these = step[begin // self.block_size :][: len(blocks)]
            codes = residues(blocks, these, self.bits, signs, dither).view(-1)
            message.write((pack(codes, self.bits) if self.bits < 8 else codes).numpy().data)
        return message.getvalue()

    def difference(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Tensor:
        return self.compare(mine, theirs, terms).difference

    def compare(self, mine: Buffer, theirs: Buffer, terms: CodecTerms) -> Comparison:
        """Compute the difference and the mean code of each block. Raises RemoteError like ``difference``."""
        own, other = check_lengths(mine, theirs, self.encoded_size(terms))
        step = self._widths(terms)
        signs, _ = signs_and_dither(terms.seed, self.block_size)
        staging_mine, staging_theirs = (Staging(self.code_bytes(self.chunk)) for _ in range(2))
        result = torch.empty(terms.elements, dtype=torch.float32)
        fill = torch.empty(len(step), dtype=torch.uint8)

        def read(message: memoryview, staging: Staging, these: slice) -> Tensor:
            first, past = these.start * self.block_size, these.stop * self.block_size
            packed = staging.load(message[self.code_bytes(first) : self.code_bytes(past)])
            codes = unpack(packed, self.bits, len(packed) * 8 // self.bits) if self.bits < 8 else packed
            return codes[: past - first].view(-1, self.block_size)

        for begin, end in chunks(terms.elements, self.chunk):
            these = slice(begin // self.block_size, self.blocks(end))
            codes, fill[these] = centred(read(own, staging_mine, these), read(other, staging_theirs, these), self.bits)
            scale = torch.where(fill[these] == WRAPPED, 0.0, step[these] / self.block_size)
            blocks = rotated(codes).mul_(signs).mul_(scale[:, None])
            result[begin:end] = blocks.view(-1)[: end - begin]
        return Comparison(result, fill)

    def _widths(self, terms: CodecTerms) -> Tensor:
        if len(terms.shape) != self.blocks(terms.elements):
            raise ValueError(f"{len(terms.shape)} step widths are agreed for {self.blocks(terms.elements)} blocks")
        return widths(terms.shape, terms.level, self.bits)


def residues(
    blocks: Tensor,  # [k, B] fp32
    step: Tensor,  # [k] fp32
    bits: int,
    signs: Tensor,  # [B]
    dither: Tensor,  # [B] in steps
) -> Tensor:
    """Encode blocks: m mod 2^bits, [k, B] uint8."""
    ratios = torch.mul(blocks, step.reciprocal()[:, None]).clamp_(-LARGEST_RATIO, LARGEST_RATIO).mul_(signs)
    integers = rotated(ratios).add_(dither).round_().to(torch.int32)
    return integers.bitwise_and_(2**bits - 1).to(torch.uint8)


def centred(
    residues_mine: Tensor,  # [k, B] uint8
    residues_theirs: Tensor,  # [k, B] uint8
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Compute theirs - mine in steps, [k, B] fp32, and the fill of each block, [k] uint8, or WRAPPED.

    A difference of 2^(bits-1) steps, whose sign is unknown, becomes 0, but counts for the fill.
    """
    half, blocks = 2 ** (bits - 1), residues_mine.shape[1]
    codes = (residues_theirs - residues_mine).add_(half).bitwise_and_(2**bits - 1).float().sub_(half)
    total = codes.abs().sum(dim=1).to(torch.int32)  # exact, since below 2^24
    even = 2 ** (bits - 2) * blocks  # expected total of codes that are spread evenly
    fill = (2 * FILL_UNIT * total + even) // (2 * even)
    return torch.threshold_(codes, -half + 0.5, 0.0), torch.where(fill > FULL, WRAPPED, fill).to(torch.uint8)
