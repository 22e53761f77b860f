"""Double of CUDA's streams on the host: work is put off until somebody waits for it, so that a missing wait is seen.

Within ``LazyStreams`` each operation on tensors is queued on the current stream. It runs, after what it must wait for,
only when the host waits for a later event of its stream, or at the end. Until then its result holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda")


class LazyEvent:
    def __init__(self, stream: LazyStream) -> None:
        self.stream = stream
        self.place = len(stream.work)

    def query(self) -> bool:
        return self.stream.done >= self.place

    def synchronize(self) -> None:
        self.stream.run(self.place)


class LazyStream:
    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def record_event(self) -> LazyEvent:
        return LazyEvent(self)

    def run(self, place: int) -> None:
        while self.done < place:
            work = self.work[self.done]
            self.done += 1
            with _disable_current_modes():
                work()


class LazyStreams(TorchDispatchMode):
    """What ``device_copies`` uses of ``torch.cuda``, and the queues."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = LazyStream()

    def current_stream(self, device: torch.device) -> LazyStream:
        return self.compute

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if function.is_view or function is torch.ops.aten.empty.memory_format:
            return function(*args, **kwargs)
        if function._schema.is_mutable:
            self.compute.work.append(lambda: function(*args, **kwargs))
            return args[0]
        result = torch.full_like(function(*args, **kwargs), torch.nan)
        self.compute.work.append(lambda: result.copy_(function(*args, **kwargs)))
        return result


@pytest.fixture
def lazy_streams(monkeypatch: pytest.MonkeyPatch) -> LazyStreams:
    streams = LazyStreams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    return streams
