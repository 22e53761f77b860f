"""Packing of 2-, 4- and 12-bit codes into bytes, little-endian: the earlier code in the lower bits.

The functions accept tensors on any device, and use contiguous passes, since strided ones are several times slower. They
view bytes as wider integers, which needs a little-endian machine, as all codecs do.

Legend: k codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(
    codes: Tensor,  # [k] uint8 or int8, k even; the lower four bits count
) -> Tensor:
    """Pack pairs of four-bit codes, [k / 2] uint8."""
    pairs = codes.view(torch.int16) & 0x0F0F
    return pairs.bitwise_or_(pairs >> 4).to(torch.uint8)


def unpack_nibbles(
    packed: Tensor,  # [k / 2] uint8
) -> Tensor:
    """Unpack four-bit codes, [k] uint8, 0 ... 15."""
    pairs = packed.to(torch.int16)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


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


def pack_two(
    codes: Tensor,  # [k] integers 0 ... 3
) -> Tensor:
    """Pack four two-bit codes per byte, [ceil(k / 4)] uint8."""
    fours = torch.nn.functional.pad(codes.to(torch.uint8), (0, -len(codes) % 4)).view(-1, 4)
    return fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)


def unpack_two(
    packed: Tensor,  # [ceil(k / 4)] uint8
    count: int,  # k
) -> Tensor:
    """Unpack two-bit codes, [k] uint8, 0 ... 3."""
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)[:count]


def twelve_bytes(count: int) -> int:
    return -(-3 * count // 2)


def two_bytes(count: int) -> int:
    return -(-count // 4)
