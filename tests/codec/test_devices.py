"""Numeric kernels accept tensors on any device and give equal results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2ptrain.codec.lowrank import product
from p2ptrain.codec.modular import centred, residues
from p2ptrain.codec.packing import pack, pack_twelve, unpack, unpack_twelve
from p2ptrain.codec.rotation import rotated, signs_and_dither
from p2ptrain.codec.topk import largest_of

BLOCKS = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
STEPS = torch.full((4,), 2.0**-4)
SIGNS, DITHER = signs_and_dither(b"seed", 64)
CODES = (BLOCKS.abs() * 1000).to(torch.int32) & 15


def _modular(blocks: Tensor, steps: Tensor, signs: Tensor, dither: Tensor) -> list[Tensor]:
    mine, theirs = (residues(each, steps, 4, signs, dither) for each in (blocks, blocks * 1.1))
    codes, fill = centred(mine, theirs, 4)
    return [mine, theirs, codes, fill, rotated(codes)]


def _packed(codes: Tensor) -> list[Tensor]:
    flat = codes.reshape(-1)
    packed = {bits: pack((flat & (2**bits - 1)).to(torch.uint8), bits) for bits in (2, 3, 4)}
    unpacked = [unpack(each, bits, 256) for bits, each in packed.items()]
    twelve = pack_twelve(flat)
    return [*packed.values(), *unpacked, twelve, unpack_twelve(twelve, 256)]


KERNELS: dict[str, tuple[Callable[..., list[Tensor]], tuple[Tensor, ...]]] = {
    "modular": (_modular, (BLOCKS, STEPS, SIGNS, DITHER)),
    "packing": (_packed, (CODES,)),
    "topk": (lambda rows: list(largest_of(rows, 8, 60)), (BLOCKS,)),
    "lowrank": (lambda left, right: [product(left, right)], (CODES.float(), CODES.float())),
}


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_work_where_their_tensors_are(kernel: str, device: str) -> None:
    """Check the meta device: it computes nothing, but rejects a tensor created on another device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    function, arguments = KERNELS[kernel]
    expected = function(*arguments)
    for found, known in zip(function(*(each.to(device) for each in arguments)), expected, strict=True):
        assert found.device.type == device
        assert found.shape == known.shape
        assert found.dtype == known.dtype
        assert device == "meta" or torch.equal(found.cpu(), known)
