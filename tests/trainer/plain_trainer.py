"""A trainer of its own making: a plain torch model and optimizer that learn a line, and answer a node's questions."""

import math
from typing import Any

import torch

from p2ptrain.outer.flat import FlatLayout
from p2ptrain.trainer.attached import Attachment

UNITS = 8
"""Inputs of a step."""
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
attachment = Attachment.of_environment()
attachment.plan()
layout = FlatLayout.of(model)
host, is_new = attachment.host_vector(layout, 4)
theta, first, second, displacement = map(host.vector, range(4))
counters = [0, 0, 0, 0]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for name, parameter in model.named_parameters():
    if is_new:
        layout.views(theta)[name].copy_(parameter.detach())
    parameter.data = layout.views(theta)[name]
    moments = {"exp_avg": layout.views(first)[name], "exp_avg_sq": layout.views(second)[name]}
    optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def loss_on(place: int) -> torch.Tensor:
    inputs = torch.randn(UNITS, 4, generator=torch.Generator().manual_seed(place))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def state() -> dict[str, Any]:
    return {"figures": {"parameter_count": 5}, "counters": counters, "loss_scale": []}


def step(progress: float, remaining_s: float | None) -> dict[str, Any]:
    loss = loss_on(counters[0])
    loss.backward()
    with host.moving():
        optimizer.step()
    optimizer.zero_grad()
    counters[0] += 1
    counters[1] += 1
    return {"loss": loss.item(), "tokens": UNITS, **state()}


def restore(counters: list[int], loss_scale: list[float]) -> dict[str, Any]:
    globals()["counters"][:] = counters
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(counters[1])
    return state()


def store(moments: bool) -> dict[str, Any]:
    displacement.copy_(theta)
    return state()


def add(start: int, stop: int) -> dict[str, Any]:
    theta[start:stop] += displacement[start:stop]
    return {}


ANSWERS = {
    "step": step,
    "restore": restore,
    "store": store,
    "add": add,
    "load": dict,
    "tried": lambda: {"loss": loss_on(-1).item()},
    "held_out": lambda most_tokens, patience_s: {"value": loss_on(-1).item(), "tokens": 0, "of": 0},
    "sample": lambda new_tokens: {"text": ""},
}
attachment.serve({"guessing": math.inf, "shares": True, **state()}, ANSWERS)
