"""How wide the steps of the modular codecs are: a shape that changes slowly, and a level measured at every exchange.

Two peers must agree on a step width for each block BEFORE they know how far apart they are. From the last exchange
alone, a block's largest difference is foreseen to .9 octaves (standard deviation), too poorly for codes of four bits;
but most of that is common to all blocks of the pair. Our measurement: byte language model of .3M parameters, four
peers, 40 outer steps. So each side sends, before the exchange,

- its **shape**, one byte a block: the step width the block needs, relative to the whole fragment's difference. It
  follows the exchanges of the fragment, by half an octave each at the most;
- a **sketch** of its present snapshot: 64 sums of all elements under fixed random signs (Alon, Matias and Szegedy,
  STOC 1996). The distance of two sketches is the distance of the two snapshots within a standard error of 9 %, whoever
  the partner is and whatever happened since.

Both together are a **wish**. With the level measured, .3 octaves remain. All of it is integers and correctly rounded
sums, so both sides arrive at the same widths on any machine. A stranger's wish can make blocks wrap, or their noise
larger; what it can move is bounded by the clip radius, as with every codec.

Widths are 2^(k/4) to the nearest bf16, k an integer: "quarter octaves" below.

Legend: n elements of a fragment, B block size, blocks = ceil(n / B).
"""

from __future__ import annotations

import functools
import math
import struct
from bisect import bisect_left
from collections.abc import Callable
from hashlib import shake_256

import torch
from torch import Tensor

from p2ptrain.base.errors import RemoteError
from p2ptrain.codec.base import CHUNK, LARGEST_MAGNITUDE, blocks_of, check_magnitude, chunks, magnitude

SKETCH_SUMS = 64
"""Standard error of the distance: 1 / sqrt(2 * 64), an eighth of an octave. 256 bytes a fragment."""

SKETCH_BYTES = 4 * SKETCH_SUMS

WRAPPED = 255
"""Stands for the largest code of a block that wrapped."""

MARGIN = {4: 1.5, 8: 4.0}
"""By the bits of a code, how far beyond the largest difference foreseen it still reaches. Our measurement, on the model
above and 1024 elements a block: with 1.25, 1.5 and 2, four bits wrap in 6, .6 and 0 % of the blocks and leave an error
of .44, .40 and .54 of the difference. With eight bits it hardly matters: 4 wraps nowhere, and the error is .05."""

FIRST_RISE = 3
"""Quarter octaves that the first shape lies above its reference. Our measurement: .7 octaves were missing."""

RISE = 4
"""Quarter octaves by which a wrapped block's next width lies above what was used: an octave."""

FIRST_PACE = 4
"""Quarter octaves by which a block rises or falls at most in one exchange, while its widths are unknown: an octave."""

PACE = 2
"""The same once they are known: half an octave. MARGIN leaves .58 octaves at four bits, so after one exchange that
taught anything whatever, most blocks of the next one still fit, and it takes back what the other taught."""

SPREAD = 48
"""Quarter octaves: no block's shape falls farther below the widest of its fragment. A guess; it bounds how long a block
that had stood still needs until it is measured again."""

_WHOLE = 224
"""The shape byte of a block whose steps are as wide as the whole fragment's difference. It leaves 56 octaves below."""

_MANTISSAS = (1.0, 1.1875, 1.4140625, 1.6796875)
"""2^(0, 1/4, 1/2, 3/4) to the nearest bf16."""

_FINEST, _COARSEST = -400, 400
"""Quarter octaves, 2^-100 to 2^100: every product of width and code is a normal number of fp32."""


def largest_code(bits: int) -> int:
    """The most steps by which two snapshots may differ."""
    return int(2 ** (bits - 1) - 1)


def widths(shape: bytes, level: int) -> Tensor:
    """[blocks] fp32 the step width of each block; exact in bf16."""
    places = _integers(shape) + (level - _WHOLE - _FINEST)
    return torch.tensor(_table())[places.clamp_(0, _COARSEST - _FINEST)]


@functools.cache
def _table() -> list[float]:
    """All widths, ascending."""
    return [math.ldexp(_MANTISSAS[k % 4], k // 4) for k in range(_FINEST, _COARSEST + 1)]


def agreed(mine: bytes, theirs: bytes) -> tuple[bytes, int]:
    """The shape and the level of one exchange: the mean of both shapes, and the distance of both sketches.

    Raises:
        RemoteError: their wish is not as long as mine, or its sketch is not finite.
    """
    if len(mine) != len(theirs):
        raise RemoteError(f"it asks for step widths in {len(theirs)} bytes instead of {len(mine)}")
    sums = struct.Struct(f"<{SKETCH_SUMS}f")
    pairs = zip(sums.unpack(mine[-SKETCH_BYTES:]), sums.unpack(theirs[-SKETCH_BYTES:]), strict=True)
    squares = [(a - b) * (a - b) for a, b in pairs]
    if not all(map(math.isfinite, squares)):
        raise RemoteError("the sketch of its weights is not finite")
    level = min(_FINEST + bisect_left(_table(), math.sqrt(math.fsum(squares))), _COARSEST)
    return _bytes((_integers(mine[:-SKETCH_BYTES]) + _integers(theirs[:-SKETCH_BYTES])) // 2), level


def apart(mine: bytes, theirs: bytes) -> Tensor:
    """[64] fp64 the sketch of what lies between the snapshots of two wishes, theirs - mine."""
    own, other = (torch.frombuffer(bytearray(wish[-SKETCH_BYTES:]), dtype=torch.float32) for wish in (mine, theirs))
    return other.double() - own.double()


def sketch(
    snapshot: Tensor,  # [n] fp32
) -> bytes:
    """64 fp32 sums of all elements, each element in one of them and under a fixed sign. One pass, little memory.

    Raises:
        ValueError: the snapshot is not finite or beyond ``LARGEST_MAGNITUDE``.
    """
    return sums(snapshot, check_magnitude).clamp_(-LARGEST_MAGNITUDE, LARGEST_MAGNITUDE).float().numpy().tobytes()


def sums(
    values: Tensor,  # [n] fp32
    check: Callable[[float], None] = lambda largest: None,  # told the largest magnitude of each chunk
) -> Tensor:
    """[64] fp64 the sums of a sketch, of any numbers."""
    found = torch.zeros(SKETCH_SUMS, dtype=torch.float64)
    for number, (begin, end) in enumerate(chunks(len(values))):
        check(magnitude(values[begin:end]))
        rows = blocks_of(values[begin:end], SKETCH_SUMS)
        part = (rows * _signs()[: len(rows)]).sum(dim=0)
        found += -part if number % 2 else part
    return found


@functools.cache
def _signs() -> Tensor:
    """[CHUNK / 64, 64] fp32 of -1 and 1. Part of the protocol; every second chunk takes it the other way round."""
    raw = torch.frombuffer(bytearray(shake_256(b"p2ptrain sketch").digest(CHUNK // 8)), dtype=torch.uint8)
    bits = torch.stack([(raw >> place) & 1 for place in range(8)], dim=1)
    return (2.0 * bits - 1.0).view(-1, SKETCH_SUMS)


def first_shape(
    reference: Tensor,  # [n] fp32
    block_size: int,
    bits: int,
) -> bytes:
    """The shape before anything was measured: as if a difference were spread over the blocks as ``reference`` is.

    Raises:
        ValueError: the reference is not finite or beyond ``LARGEST_MAGNITUDE``.
    """
    highest, squares = [], 0.0
    for begin, end in chunks(len(reference), CHUNK // block_size * block_size):
        blocks = blocks_of(reference[begin:end], block_size)
        highest.append(blocks.abs().amax(dim=1).double())
        squares += float(blocks.double().square().sum())
    largest = torch.cat(highest)
    check_magnitude(float(largest.max()))
    needed = largest * (MARGIN[bits] / largest_code(bits) / max(math.sqrt(squares), 2.0**-200))
    octaves = torch.log2(needed.clamp_(min=2.0**-100))
    return _bytes(_lifted((4 * octaves).ceil().long() + (_WHOLE + FIRST_RISE)))


def next_shape(
    shape: bytes,
    used: bytes,
    largest: Tensor,  # [blocks] uint8: the largest |code| of each block, or WRAPPED
    bits: int,
    pace: int = FIRST_PACE,
) -> bytes:
    """My shape after an exchange under the shape ``used``: what was measured, and more than used where it wrapped.

    Args:
        pace: quarter octaves by which a block rises or falls at most, whatever the other side wished for. None becomes
            wider than the whole fragment's difference, which is more than any block's.
    """
    before, agreed_on = _integers(shape), _integers(used)
    measured = agreed_on + _needed(bits)[largest.clamp(max=largest_code(bits)).long()]
    after = torch.where(largest == WRAPPED, torch.maximum(before, agreed_on + RISE), measured)
    return _bytes(_lifted(after.clamp(before - pace, before + pace).clamp(max=_WHOLE)))


@functools.cache
def _needed(bits: int) -> Tensor:
    """[codes] quarter octaves from the width used to the width needed, by the largest code measured.

    A code c stands for a difference of up to about (c + 1/2) steps.
    """
    highest = largest_code(bits)
    return torch.tensor([math.ceil(4 * math.log2(MARGIN[bits] * (c + 0.5) / highest)) for c in range(highest + 1)])


def _lifted(shape: Tensor) -> Tensor:
    return torch.maximum(shape, shape.max() - SPREAD)


def _integers(shape: bytes) -> Tensor:
    """[blocks] int64."""
    return torch.frombuffer(bytearray(shape), dtype=torch.uint8).long()


def _bytes(shape: Tensor) -> bytes:
    return shape.clamp(0, 255).to(torch.uint8).numpy().tobytes()
