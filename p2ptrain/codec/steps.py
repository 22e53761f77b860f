"""Step widths of the modular codecs: a slowly changing shape, and a level measured at every exchange.

Two peers must agree on a step width for each block before they know their distance. After the rotation of a block
(``codec.rotation``) the right width depends on the norm of its difference alone. The last exchange predicts it badly,
but most of the error is common to all blocks of the pair. Before the exchange each side therefore sends:

- its **shape**, one byte per block: the norm of the block's difference relative to the whole fragment's. It follows the
  exchanges of the fragment, by at most half an octave each;
- a **sketch** of its current snapshot: 64 sums of all elements with fixed random signs (Alon, Matias and Szegedy, STOC
  1996). The distance of two sketches equals the distance of the two snapshots with a standard error of 9 %, for any
  partner and any history.

Both together are a **proposal**; they predict a norm within .29 octaves (standard deviation; our measurement on a byte
model of .1M parameters, 8 peers). All computations use integers and correctly rounded sums, so both sides get equal
widths on any machine. An adversarial proposal can make blocks wrap or increase their noise; its effect is bounded by
the clip radius, as with every codec.

Norms and widths are 2^(k/4) to the nearest bf16, with k an integer number of quarter octaves.

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
"""Sums of a sketch, 256 bytes per fragment; the distance has a standard error of 1 / sqrt(2 * 64), 1/8 octave."""

SKETCH_BYTES = 4 * SKETCH_SUMS

REACH = {2: 3, 3: 1, 4: -3, 8: -16}
"""Step width relative to the block's norm in quarter octaves, by the bits of a code.

For normal differences whose norm is predicted within .25 octaves (standard deviation), a quarter octave less has the
least mean square error: .60, .20, .06, .0005 of the square (``tests/codec/test_steps.py``). But wraps shorten the
difference, and rounding averages out: these widths keep .82, 1, 1, 1 of it. Our measurement, on the model above in
mid-phase: an exchange lost 6.6, .4, .1, 0 % of what an exact one gains in loss, and left .65, .25, .07, .001 of the
squared distance. Multiplying by the factor of the least error (.63 with two bits, .88 with three) cost more, 27 and
3 %: rounding goes in all directions, the difference where the loss is sensitive.
"""

FILL_UNIT = 128
"""Fill of a block whose codes are spread evenly over all values. The fill is the mean magnitude of a block's codes."""

FULL = 112
"""Largest fill of a block that has not wrapped: beyond, its codes would leave more than .9 of the squared difference.

Random bytes have a fill of 128, with a standard error of at most 3 for 1024 codes.
"""

WRAPPED = 255
"""Value instead of the fill for a block that wrapped."""

FIRST_RISE = 2
"""Quarter octaves between the reference and the first shape. Our measurement, on the model above: .65 octaves were
missing; REACH allows for a quarter octave."""

RISE = 4
"""Quarter octaves by which a wrapped block's next norm exceeds the used one: an octave."""

FIRST_PACE = 4
"""Largest change of a block in one exchange while its widths are unknown, in quarter octaves: an octave."""

PACE = 2
"""Largest change of a block in one exchange once its widths are known, in quarter octaves: half an octave.

Widths that are half an octave too narrow or too wide leave .63 to .94, .16 to .47, .06 to .12 of the square with 2, 3
and 4 bits. After one exchange with any outcome the next one therefore still helps, and it corrects the change.
"""

SPREAD = 48
"""Largest distance of a block's shape below the widest of its fragment, in quarter octaves.

It bounds the exchanges until a block that had not changed is measured again. Guess: measure these exchanges.
"""

_WHOLE = 224
"""Shape byte of a block that has the whole fragment's difference; 56 octaves remain below it."""

_MANTISSAS = (1.0, 1.1875, 1.4140625, 1.6796875)
"""Powers 2^(0, 1/4, 1/2, 3/4) to the nearest bf16."""

_FINEST, _COARSEST = -400, 400
"""Range of widths in quarter octaves, 2^-100 to 2^100; every product of width and code is a normal fp32 number."""


def widths(shape: bytes, level: int, bits: int) -> Tensor:
    """Return the step width of each block, [blocks] fp32, exact in bf16."""
    places = _integers(shape) + (level + REACH[bits] - _WHOLE - _FINEST)
    return _step_widths()[places.clamp_(0, _COARSEST - _FINEST)]


@functools.cache
def _step_widths() -> Tensor:
    return torch.tensor(_table())


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
    own, other = (torch.frombuffer(bytearray(each[-SKETCH_BYTES:]), dtype=torch.float32) for each in (mine, theirs))
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
) -> bytes:
    """Return the shape before the first measurement, for a difference distributed over the blocks like ``reference``.

    Raises:
        ValueError: the reference is not finite or exceeds ``LARGEST_MAGNITUDE``.
    """
    squares = []
    for begin, end in chunks(len(reference), CHUNK // block_size * block_size):
        check_magnitude(magnitude(reference[begin:end]))
        squares.append(blocks_of(reference[begin:end], block_size).double().square().sum(dim=1))
    each = torch.cat(squares)
    relative = each / each.sum().clamp_(min=2.0**-400)
    quarters = 2 * torch.log2(relative.clamp_(min=2.0**-200))
    return _bytes(_lifted((quarters.round().long() + (_WHOLE + FIRST_RISE)).clamp_(max=_WHOLE)))


def next_shape(
    shape: bytes,
    used: bytes,
    fill: Tensor,  # [blocks] uint8 mean |code| per block, or WRAPPED
    bits: int,
    pace: int = FIRST_PACE,
) -> bytes:
    """Return the next shape: the measured norms, and larger ones than used for wrapped blocks.

    No norm exceeds the whole fragment's.

    Args:
        shape: our shape before the exchange.
        used: the agreed shape of the exchange.
        fill: result of the comparison.
        bits: bits of a code.
        pace: largest change of a block in quarter octaves, whatever the other side proposed.
    """
    before, agreed_on = _integers(shape), _integers(used)
    measured = agreed_on + _excess(bits)[fill.clamp(max=FULL).long()]
    after = torch.where(fill == WRAPPED, torch.maximum(before, agreed_on + RISE), measured)
    return _bytes(_lifted(after.clamp(before - pace, before + pace).clamp(max=_WHOLE)))


@functools.cache
def _excess(bits: int) -> Tensor:
    """Return the quarter octaves from the used norm to the measured one, by the fill, [FULL + 1].

    It inverts ``mean_code``; a block without codes counts as one with half a unit.
    """
    quarters = range(-40, 9)
    unit = 2 ** (bits - 2) / FILL_UNIT
    expected = [mean_code(bits, 2 ** ((each - REACH[bits]) / 4)) / unit for each in quarters]
    return torch.tensor(
        [min(quarters, key=lambda each: abs(expected[each + 40] - max(fill, 0.5))) for fill in range(FULL + 1)]
    )


def mean_code(bits: int, norm: float) -> float:
    """Return the expected magnitude of a code for a normal difference with that standard deviation in steps.

    With dither, a difference d becomes the code k with probability max(0, 1 - |d - k|), a second difference of
    |d - k|, whose mean has a closed form.
    """

    def distance(code: int) -> float:
        ratio = code / norm / math.sqrt(2)
        return norm * math.sqrt(2 / math.pi) * math.exp(-ratio * ratio) + code * math.erf(ratio)

    cycle = 1 << bits
    furthest = math.ceil(8 * norm) + 1
    distances = [distance(k) for k in range(furthest + 2)]
    chances = [(distances[abs(k - 1)] - 2 * distances[k] + distances[k + 1]) / 2 for k in range(furthest + 1)]
    return 2 * sum(chance * min(k % cycle, -k % cycle) for k, chance in enumerate(chances))


def _lifted(shape: Tensor) -> Tensor:
    return torch.maximum(shape, shape.max() - SPREAD)


def _integers(shape: bytes) -> Tensor:
    return torch.frombuffer(bytearray(shape), dtype=torch.uint8).long()


def _bytes(shape: Tensor) -> bytes:
    return shape.clamp(0, 255).to(torch.uint8).numpy().tobytes()
