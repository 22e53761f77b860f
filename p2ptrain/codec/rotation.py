"""Randomized Hadamard rotation of blocks, which spreads any vector evenly over its coordinates.

A block x of B elements, a power of two, becomes ``H S x``: S is a diagonal of random signs, H the Hadamard matrix of
1 and -1, H[a, b] = (-1)^popcount(a & b). H is symmetric and H H = B I, so the length grows by sqrt(B), each coordinate
has the root mean square ||x||, and ``S H y / B`` undoes the rotation. A coordinate is a sum of the elements with random
signs: over the signs, it exceeds t ||x|| with probability at most 2 exp(-t^2 / 2), whatever x is (Hoeffding, 1963).

``rotated`` is exact, in any order of summation, for integers whose sums stay below 2^24. It relies on matrix products
in full fp32, torch's default on the host.

Source: randomized Hadamard transform, Ailon and Chazelle, STOC 2006; before quantization, Suresh et al., ICML 2017.

Legend: B block size, k blocks.
"""

from __future__ import annotations

import functools
from hashlib import shake_256

import torch
from torch import Tensor

_LEVELS = 2**16
"""Values of a dither: their spacing biases no code by more than 2^-17 steps."""


def rotated(
    blocks: Tensor,  # [k, B] fp32, any device
) -> Tensor:
    """Compute H x of each block, [k, B].

    H is the Kronecker product of two smaller ones. Their two matrix products take a quarter of the time of log2(B)
    passes over memory (our measurement: B = 1024, one EPYC core).
    """
    size = blocks.shape[1]
    columns = 1 << (size.bit_length() // 2)
    left, right = (_hadamard(each).to(blocks.device) for each in (size // columns, columns))
    return (left @ blocks.view(-1, size // columns, columns) @ right).view(-1, size)


@functools.lru_cache(maxsize=16)
def signs_and_dither(
    seed: bytes,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the diagonal of S and the dither in steps, each [B] fp32, the latter uniform in [-1/2, 1/2); kept for
    the decoding.

    Part of the protocol, so it uses no generator of a library.
    """
    raw = torch.frombuffer(bytearray(shake_256(seed).digest(4 * block_size)), dtype=torch.int16)
    signs, dither = raw[:block_size], raw[block_size:]
    return torch.where(signs < 0, -1.0, 1.0), dither.float() / _LEVELS


@functools.cache
def _hadamard(size: int) -> Tensor:
    """Return H, [size, size] fp32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix
