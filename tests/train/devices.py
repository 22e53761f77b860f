"""Doubles of torch's modules for cards: ``machine_with`` pretends that this machine has some."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GB = 1_000_000_000


def machine_with(monkeypatch: pytest.MonkeyPatch, **cards: int) -> list[torch.device]:
    """Let torch find this many cards of each kind and no others; return the list of those made current."""
    made_current: list[torch.device] = []
    for kind in ("cuda", "xpu", "mps"):
        module, count = getattr(torch, kind), cards.get(kind, 0)
        monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
        if kind == "mps":
            continue
        monkeypatch.setattr(module, "set_device", made_current.append)
        monkeypatch.setattr(module, "device", lambda device: nullcontext())
        monkeypatch.setattr(module, "is_tf32_supported", lambda: False)
        monkeypatch.setattr(module, "get_device_name", lambda device, kind=kind: f"Some card of {kind}")
        properties = SimpleNamespace(total_memory=16 * GB)
        monkeypatch.setattr(module, "get_device_properties", lambda device, found=properties: found)
    return made_current


def with_memory(monkeypatch: pytest.MonkeyPatch, kind: str, **answers: Any) -> None:
    """Let the functions of torch's module that these names say return these values, or raise these exceptions."""
    for name, answer in answers.items():
        monkeypatch.setattr(getattr(torch, kind), name, _answering(answer), raising=False)


def _answering(answer: Any) -> Callable[..., Any]:
    def function(*arguments: object, **options: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return function
