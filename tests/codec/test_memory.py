"""Codecs need little memory beside input and output, however long the fragment is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain import codec
from p2ptrain.base.codec_names import WEIGHT_CODECS
from p2ptrain.codec import CodecTerms
from p2ptrain.codec.base import CHUNK

ELEMENTS = 10 * CHUNK
MOST_BYTES = 8 * CHUNK
"""Largest size of any tensor beside the result: a chunk in double precision."""


class _Watch(TorchDispatchMode):
    """Mode that records the size of the memory behind every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return result


@contextmanager
def watched(*known: torch.Tensor) -> Iterator[list[int]]:
    """Yield a list that holds, at exit, the sizes of all large tensors made inside. Views of ``known`` do not count."""
    large: list[int] = []
    with _Watch() as watch:
        yield large
    pointers = {each.untyped_storage().data_ptr() for each in known}
    large += [size for pointer, size in watch.sizes.items() if size > MOST_BYTES and pointer not in pointers]


def test_the_watch_sees_memory() -> None:
    known = torch.zeros(ELEMENTS)
    with watched(known) as large:
        known[5:].view(-1)
        known.abs()
    assert large == [4 * ELEMENTS]


@pytest.mark.parametrize("name", codec.CODECS)
def test_memory_beside_input_and_output_is_bounded(name: str) -> None:
    each = codec.get(name)
    mine, theirs = (torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    shape = codec.first_shape(each, mine)
    steps: list[Callable[[], object]] = [lambda: codec.first_shape(each, mine)]
    if name in WEIGHT_CODECS:
        steps.append(lambda: codec.proposal_for(each, shape, mine))
    terms = codec.agree(each, ELEMENTS, codec.proposal_for(each, shape, mine), codec.proposal_for(each, shape, theirs))
    steps.append(lambda: each.encode(mine, terms))
    for step in steps:
        with watched(mine, theirs) as large:
            step()
        assert large == []
    messages = each.encode(mine, terms), each.encode(theirs, terms)
    with watched() as large:
        each.difference(*messages, terms)
    assert large == [4 * ELEMENTS]


def test_matrices_add_nothing_but_their_factors() -> None:
    each = codec.get("lowrank")
    terms = CodecTerms(ELEMENTS, matrices=((640, 2048),))
    snapshot = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))
    with watched(snapshot) as large:
        message = each.encode(snapshot, terms)
    assert large == []
    with watched() as large:
        each.difference(message, message, terms)
    assert large == [4 * ELEMENTS]
