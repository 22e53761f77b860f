"""All parameters of a module as views of one flat vector.

The outer optimizer, the codecs and the checkpoints see a model as one vector [P]; the inner optimizer and the module
see the same memory as named parameters. Nothing is ever gathered or scattered.

Each parameter begins on a 64-byte boundary, like a separately allocated tensor: vectorized kernels and BLAS choose
their paths by alignment, so a flattened module computes bitwise what the original one computes. The gaps hold zeros and
stay zero under every rule of this package (their pseudo-gradient is zero).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PARAMETER_ALIGNMENT = 16
"""fp32 elements, 64 bytes: the alignment of torch's CPU allocator."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Positions of the parameters in the flat vector: a function of names and shapes, so equal on all peers of a
    run."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Elements from the start of the flat vector, multiples of ``PARAMETER_ALIGNMENT``."""
    total: int
    """P: elements of the flat vector, padding included."""

    @classmethod
    def of(cls, module: nn.Module) -> FlatLayout:
        """Lay out ``module.named_parameters()`` in order. Tied parameters count once, under their first name."""
        parameters = dict(module.named_parameters())
        return cls.of_shapes(list(parameters), [parameter.shape for parameter in parameters.values()])

    @classmethod
    def of_shapes(cls, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> FlatLayout:
        """Lay out parameters of these names and shapes in order. Raises ValueError if they are none."""
        if not 0 < len(names) == len(shapes) or min(map(min, filter(None, shapes)), default=1) < 1:
            raise ValueError(f"{len(names)} names and {len(shapes)} shapes are no parameters")
        lengths = [-(-math.prod(shape) // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT for shape in shapes]
        *offsets, total = itertools.accumulate(lengths, initial=0)
        return cls(tuple(names), tuple(tuple(shape) for shape in shapes), tuple(offsets), total)

    @property
    def parameter_count(self) -> int:
        """Number of elements that belong to parameters: P minus the padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def unit_lengths(self) -> tuple[int, ...]:
        """Elements, padding included, of the units of a language model: embedding, each block, and norm with head.

        A block is an item of a list of modules: a number in the names of its parameters. A norm without a head, whose
        weights are then the embedding's, belongs to the last block. The lengths sum to P.
        """
        blocks = [next((part for part in name.split(".") if part.isdecimal()), "") for name in self.names]
        last_matrix = max((place for place, shape in enumerate(self.shapes) if len(shape) > 1), default=0)
        begins = [place for place in range(1, last_matrix + 1) if blocks[place] != blocks[place - 1]]
        starts = [0, *(self.offsets[place] for place in begins), self.total]
        return tuple(end - start for start, end in itertools.pairwise(starts))

    def views(
        self,
        flat: Tensor,  # [P] any dtype and device
    ) -> dict[str, Tensor]:
        """Return each parameter's name with a view of its piece of ``flat`` in the parameter's shape; no copy.

        For weights, this is the module's state without the second names of tied parameters, which
        ``load_state_dict(..., strict=False)`` or the tying restores. For a moment or a gradient, these are its pieces.
        Raises ValueError if ``flat`` does not have P elements.
        """
        if flat.shape != (self.total,):
            raise ValueError(f"the layout describes [{self.total}], not {list(flat.shape)}")
        return {
            name: flat[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }


def flatten_module(module: nn.Module) -> Tensor:
    """Move the module's parameters into one flat fp32 vector [P] on their device, and return it.

    Values, names and ties stay; ``parameter.data`` of every parameter becomes a view of the result, so that writing to
    either changes both. Buffers are unchanged. Call it after ``module.to(device)`` (which would re-allocate the
    parameters) and before the optimizer is built; ``FlatLayout.of(module)`` describes the result. Raises ValueError if
    there are no parameters, or they are not all fp32 on one device.
    """
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ValueError("the module has no parameters")
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters.values()}
    if len(kinds) != 1 or next(iter(kinds))[0] != torch.float32:
        raise ValueError(f"all parameters must be fp32 on one device, found {sorted(map(str, kinds))}")
    layout = FlatLayout.of(module)
    flat = torch.zeros(layout.total, dtype=torch.float32, device=next(iter(kinds))[1])
    for name, view in layout.views(flat).items():
        view.copy_(parameters[name].detach())
        parameters[name].data = view
    return flat
