"""Packing of 2-, 3-, 4- and 12-bit codes into bytes, little-endian: the earlier code in the lower bits.

The functions accept tensors on any device, and use contiguous passes, since strided ones are several times slower. They
view bytes as wider integers, which needs a little-endian machine, as all codecs do.

Legend: k codes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_PASSES = {2: (16, 32), 3: (16, 32, 64), 4: (16,)}
"""By the bits of a code: how wide a field is after each pass that joins neighbours. As many codes as fill whole bytes
lie in an integer of the last width."""
_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def pack(
    codes: Tensor,  # [k] uint8 below 2^bits
    bits: int,  # 2, 3 or 4
) -> Tensor:
    """Pack codes of a few bits, [ceil(k bits / 8)] uint8.

    Each pass joins neighbours, so that their bits end up in the lowest bytes.
    """
    size = _PASSES[bits][-1]
    joined = _padded(codes, size // 8).view(_INTEGERS[size])
    for width in _PASSES[bits]:
        joined = (joined | (joined >> (8 - bits) * width // 16)).bitwise_and_(_fields(size, width, bits * width // 8))
    one_byte = bits * size == 64
    packed = joined.to(torch.uint8) if one_byte else joined.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)
    return packed[: code_bytes(len(codes), bits)]


def unpack(
    packed: Tensor,  # [ceil(k bits / 8)] uint8
    bits: int,  # 2, 3 or 4
    count: int,  # k
) -> Tensor:
    """Unpack codes of a few bits, [k] uint8."""
    size = _PASSES[bits][-1]
    if bits * size == 64:  # one byte
        codes = packed.to(_INTEGERS[size])
    else:
        codes = torch.nn.functional.pad(_padded(packed, bits).view(-1, bits), (0, 8 - bits)).view(_INTEGERS[size])
    for width in reversed(_PASSES[bits]):
        fields = _fields(size, width // 2, bits * width // 16)
        codes = (codes | (codes << (8 - bits) * width // 16)).bitwise_and_(fields)
    return codes.view(torch.uint8).view(-1)[:count]


def code_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _padded(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


@functools.cache
def _fields(size: int, width: int, low: int) -> int:
    """Return a mask of the ``low`` lowest bits of each ``width`` bits of an integer of ``size`` bits."""
    return sum((2**low - 1) << begin for begin in range(0, size, width))


def pack_twelve(
    codes: Tensor,  # [k] integers 0 ... 4095
) -> Tensor:
    """Pack pairs of 12-bit codes into three bytes, [ceil(3 k / 2)] uint8."""
    pairs = torch.nn.functional.pad(codes.to(torch.int32), (0, len(codes) % 2)).view(-1, 2)
    joined = pairs[:, 0] | (pairs[:, 1] << 12)
    packed = torch.stack([joined, joined >> 8, joined >> 16], dim=1).to(torch.uint8)
    return packed.view(-1)[: twelve_bytes(len(codes))]


def unpack_twelve(
    packed: Tensor,  # [ceil(3 k / 2)] uint8
    count: int,  # k
) -> Tensor:
    """Unpack 12-bit codes, [k] int32, 0 ... 4095."""
    triples = torch.nn.functional.pad(packed.to(torch.int32), (0, -len(packed) % 3)).view(-1, 3)
    joined = triples[:, 0] | (triples[:, 1] << 8) | (triples[:, 2] << 16)
    return torch.stack([joined & 0xFFF, joined >> 12], dim=1).view(-1)[:count]


def twelve_bytes(count: int) -> int:
    return -(-3 * count // 2)
