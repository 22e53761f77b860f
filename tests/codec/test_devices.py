"""Numeric kernels accept tensors on any device and give equal results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2ptrain.codec.lowrank import product
from p2ptrain.codec.modular import centred, cut, hash_weights
from p2ptrain.codec.packing import pack_nibbles, pack_twelve, pack_two, unpack_nibbles, unpack_twelve, unpack_two
from p2ptrain.codec.topk import largest_of

BLOCKS = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
STEPS = torch.full((4,), 2.0**-4)
WEIGHTS = hash_weights(64)
CODES = (BLOCKS.abs() * 1000).to(torch.int32) & 15


def _modular(blocks: Tensor, steps: Tensor, weights: Tensor) -> list[Tensor]:
    mine, mine_hash = cut(blocks, steps, 4, weights)
    theirs, their_hash = cut(blocks * 1.1, steps, 4, weights)
    codes, largest = centred(mine.short(), theirs.short(), their_hash - mine_hash, 4, weights.short())
    return [mine, mine_hash, codes, largest]


def _packed(codes: Tensor) -> list[Tensor]:
    flat = codes.reshape(-1)
    nibbles, twelve, two = pack_nibbles(flat.to(torch.uint8)), pack_twelve(flat), pack_two(flat & 3)
    return [nibbles, twelve, two, unpack_nibbles(nibbles), unpack_twelve(twelve, 256), unpack_two(two, 256)]


KERNELS: dict[str, tuple[Callable[..., list[Tensor]], tuple[Tensor, ...]]] = {
    "modular": (_modular, (BLOCKS, STEPS, WEIGHTS)),
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
