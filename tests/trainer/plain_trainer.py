"""A trainer of thirty lines with a plain torch model: it learns a line, and knows no swarm.

Its plan may let it die: {"dies_at": step, "how": "kill", "raise", "freeze" or "exit"}.
"""

import os
import signal
import sys

import torch

from p2ptrain.outer.flat import FlatLayout
from p2ptrain.trainer.attached import Attachment

node = Attachment.of_environment()
plan = node.plan()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
layout = FlatLayout.of(model)
memory, is_new = node.host_vector(layout, 1)
for name, view in layout.views(memory.vector(0)).items():
    parameter = model.get_parameter(name)
    if is_new:
        view.copy_(parameter.detach())
    parameter.data = view
steps = 0


def step() -> dict[str, object]:
    global steps
    if steps == plan.get("dies_at"):
        if plan["how"] == "raise":
            node.fail("device", RuntimeError("CUDA error: an illegal memory access\nwas encountered"))
            sys.exit(1)
        os.kill(os.getpid(), signal.SIGKILL if plan["how"] == "kill" else signal.SIGSTOP)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(steps))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
    return {"loss": loss.item(), "steps": steps}


def restore(done: int) -> dict[str, object]:
    global steps
    steps = done
    return {}


node.serve({"ready": True}, {"step": step, "restore": restore})
