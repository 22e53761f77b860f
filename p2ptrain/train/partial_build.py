"""Memory for a part of a model's parameters while the whole model is built.

A run's initial weights are one stream of random numbers, of which a part needs all numbers before it. The parameters
that are not wanted share one memory, which each of them overwrites: the stream is the same, and no process holds more
than its part and the largest parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode


class AllocationRecord(TorchFunctionMode):
    """Records what ``torch.empty`` returns in this context, by which modules allocate parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.empty:
            self.made.append(made)
        return made

    def shared(self, numbers: Collection[int]) -> SharedMemory:
        """Return the context in which these allocations share one memory."""
        return SharedMemory(numbers, max((self.made[number].numel() for number in numbers), default=0))

    def numbers(self, module: Module, names: Collection[str]) -> frozenset[int]:
        """Return which allocations became these parameters of a module."""
        places = {made.untyped_storage()._cdata: number for number, made in enumerate(self.made)}
        found = (places.get(each.untyped_storage()._cdata) for name, each in module.named_parameters() if name in names)
        return frozenset(number for number in found if number is not None)


class SharedMemory(TorchFunctionMode):
    """Lets those calls of ``torch.empty`` in this context return views of one memory.

    Args:
        shared: numbers of the calls, from 0 (``AllocationRecord.numbers``).
        elements: of the largest of them, all fp32.
    """

    def __init__(self, shared: Collection[int], elements: int) -> None:
        super().__init__()
        self._shared = shared
        self._calls = 0
        self._memory = torch.empty(elements)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is not torch.empty:
            return function(*args, **kwargs)
        number, self._calls = self._calls, self._calls + 1
        if number not in self._shared:
            return function(*args, **kwargs)
        like = function(*args, **{**kwargs, "device": "meta"})
        return self._memory[: like.numel()].view(like.shape)
