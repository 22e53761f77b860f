"""Step widths of the modular codecs: a slowly changing shape, and a level measured at every exchange.

Two peers must agree on a step width for each block before they know their distance. The last exchange alone predicts a
block's largest difference to .9 octaves (standard deviation), which is not enough for four-bit codes, but most of the
error is common to all blocks of the pair. Our measurement: byte language model of .3M parameters, four peers, 40 outer
steps. Before the exchange each side therefore sends:

- its **shape**, one byte per block: the step width that the block needs, relative to the whole fragment's difference.
  It follows the exchanges of the fragment, by at most half an octave each;
- a **sketch** of its current snapshot: 64 sums of all elements with fixed random signs (Alon, Matias and Szegedy, STOC
  1996). The distance of two sketches equals the distance of the two snapshots with a standard error of 9 %, for any
  partner and any history.

Both together are a **proposal**. With the measured level the prediction error falls to .3 octaves. All computations use
integers and correctly rounded sums, so both sides get equal widths on any machine. An adversarial proposal can make
blocks wrap or increase their noise; its effect is bounded by the clip radius, as with every codec.

Widths are 2^(k/4) to the nearest bf16, with k an integer number of quarter octaves.

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
from p2ptrain.codec.base import CHUNK, LARGEST_MAGNITUDE, blocks_of, check_magnitude, chunks, largest_code, magnitude

SKETCH_SUMS = 64
"""Sums of a sketch, 256 bytes per fragment; the distance has a standard error of 1 / sqrt(2 * 64), 1/8 octave."""

SKETCH_BYTES = 4 * SKETCH_SUMS

WRAPPED = 255
"""Value instead of the largest code for a block that wrapped."""

MARGIN = {4: 1.5, 8: 4.0}
"""Range of the codes relative to the predicted largest difference, by the bits of a code.

Our measurement, on the model above with 1024 elements per block: with 1.25, 1.5 and 2, four bits wrap in 6, .6 and 0 %
of the blocks and leave an error of .44, .40 and .54 of the difference. With eight bits it hardly matters: 4 never
wraps, and the error is .05.
"""

FIRST_RISE = 3
"""Quarter octaves between the reference and the first shape. Our measurement: .7 octaves were missing."""

RISE = 4
"""Quarter octaves by which a wrapped block's next width exceeds the used one: an octave."""

FIRST_PACE = 4
"""Largest change of a block in one exchange while its widths are unknown, in quarter octaves: an octave."""

PACE = 2
"""Largest change of a block in one exchange once its widths are known, in quarter octaves: half an octave.

MARGIN leaves .58 octaves at four bits. After one exchange with any outcome, most blocks of the next one therefore still
fit, and it corrects the change.
"""

SPREAD = 48
"""Largest distance of a block's shape below the widest of its fragment, in quarter octaves.

Guess: measure how many exchanges a block that had not changed needs until it is measured again, which this bounds.
"""

_WHOLE = 224
"""Shape byte of a step width equal to the whole fragment's difference; 56 octaves remain below it."""

_MANTISSAS = (1.0, 1.1875, 1.4140625, 1.6796875)
"""Powers 2^(0, 1/4, 1/2, 3/4) to the nearest bf16."""

_FINEST, _COARSEST = -400, 400
"""Range of widths in quarter octaves, 2^-100 to 2^100; every product of width and code is a normal fp32 number."""


def widths(shape: bytes, level: int) -> Tensor:
    """Return the step width of each block, [blocks] fp32, exact in bf16."""
    places = _integers(shape) + (level - _WHOLE - _FINEST)
    return torch.tensor(_table())[places.clamp_(0, _COARSEST - _FINEST)]


@functools.cache
def _table() -> list[float]:
    return [math.ldexp(_MANTISSAS[k % 4], k // 4) for k in range(_FINEST, _COARSEST + 1)]


def agreed(mine: bytes, theirs: bytes) -> tuple[bytes, int]:
    """Return shape and level of one exchange: the mean of both shapes, and the distance of both sketches.

    Raises:
        RemoteError: their proposal has another length than mine, or its sketch is not finite.
    """
    if len(mine) != len(theirs):
        raise RemoteError(f"its proposal has {len(theirs)} bytes instead of {len(mine)}")
    sums = struct.Struct(f"<{SKETCH_SUMS}f")
    pairs = zip(sums.unpack(mine[-SKETCH_BYTES:]), sums.unpack(theirs[-SKETCH_BYTES:]), strict=True)
    squares = [(a - b) * (a - b) for a, b in pairs]
    if not all(map(math.isfinite, squares)):
        raise RemoteError("the sketch of its weights is not finite")
    level = min(_FINEST + bisect_left(_table(), math.sqrt(math.fsum(squares))), _COARSEST)
    return _bytes((_integers(mine[:-SKETCH_BYTES]) + _integers(theirs[:-SKETCH_BYTES])) // 2), level


def apart(mine: bytes, theirs: bytes) -> Tensor:
    """Return the sketch of theirs - mine from two proposals, [64] fp64."""
    own, other = (torch.frombuffer(bytearray(wish[-SKETCH_BYTES:]), dtype=torch.float32) for wish in (mine, theirs))
    return other.double() - own.double()


def sketch(
    snapshot: Tensor,  # [n] fp32
) -> bytes:
    """Compute a sketch: 64 fp32 sums, each element in one of them with a fixed sign. One pass, little memory.

    Raises:
        ValueError: the snapshot is not finite or exceeds ``LARGEST_MAGNITUDE``.
    """
    return sums(snapshot, check_magnitude).clamp_(-LARGEST_MAGNITUDE, LARGEST_MAGNITUDE).float().numpy().tobytes()


def sums(
    values: Tensor,  # [n] fp32
    check: Callable[[float], None] = lambda largest: None,  # called with the largest magnitude of each chunk
) -> Tensor:
    """Compute the sums of a sketch without rounding to fp32, [64] fp64."""
    found = torch.zeros(SKETCH_SUMS, dtype=torch.float64)
    for number, (begin, end) in enumerate(chunks(len(values))):
        check(magnitude(values[begin:end]))
        rows = blocks_of(values[begin:end], SKETCH_SUMS)
        part = (rows * _signs()[: len(rows)]).sum(dim=0)
        found += -part if number % 2 else part
    return found


@functools.cache
def _signs() -> Tensor:
    """Return the signs, [CHUNK / 64, 64] fp32 of -1 and 1. Part of the protocol; every second chunk negates them."""
    raw = torch.frombuffer(bytearray(shake_256(b"p2ptrain sketch").digest(CHUNK // 8)), dtype=torch.uint8)
    bits = torch.stack([(raw >> place) & 1 for place in range(8)], dim=1)
    return (2.0 * bits - 1.0).view(-1, SKETCH_SUMS)


def first_shape(
    reference: Tensor,  # [n] fp32
    block_size: int,
    bits: int,
) -> bytes:
    """Return the shape before the first measurement, for a difference distributed over the blocks like ``reference``.

    Raises:
        ValueError: the reference is not finite or exceeds ``LARGEST_MAGNITUDE``.
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
    largest: Tensor,  # [blocks] uint8 largest |code| per block, or WRAPPED
    bits: int,
    pace: int = FIRST_PACE,
) -> bytes:
    """Return the next shape: the measured widths, and wider ones than used for wrapped blocks.

    No width exceeds the whole fragment's difference, which is larger than any block's.

    Args:
        shape: our shape before the exchange.
        used: the agreed shape of the exchange.
        largest: result of the comparison.
        bits: bits of a code.
        pace: largest change of a block in quarter octaves, whatever the other side proposed.
    """
    before, agreed_on = _integers(shape), _integers(used)
    measured = agreed_on + _needed(bits)[largest.clamp(max=largest_code(bits)).long()]
    after = torch.where(largest == WRAPPED, torch.maximum(before, agreed_on + RISE), measured)
    return _bytes(_lifted(after.clamp(before - pace, before + pace).clamp(max=_WHOLE)))


@functools.cache
def _needed(bits: int) -> Tensor:
    """Return the quarter octaves from the used to the needed width, by the largest measured code, [codes].

    A code c represents a difference of up to about (c + 1/2) steps.
    """
    highest = largest_code(bits)
    return torch.tensor([math.ceil(4 * math.log2(MARGIN[bits] * (c + 0.5) / highest)) for c in range(highest + 1)])


def _lifted(shape: Tensor) -> Tensor:
    return torch.maximum(shape, shape.max() - SPREAD)


def _integers(shape: bytes) -> Tensor:
    return torch.frombuffer(bytearray(shape), dtype=torch.uint8).long()


def _bytes(shape: Tensor) -> bytes:
    return shape.clamp(0, 255).to(torch.uint8).numpy().tobytes()
