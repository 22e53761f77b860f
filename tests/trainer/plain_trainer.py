"""A trainer of thirty lines: a plain torch model and optimizer that learn a line, and know no swarm."""

import torch

from p2ptrain.trainer.loop import TrainingLoop

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_on(place: int) -> torch.Tensor:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(place))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


with TrainingLoop(model, optimizer, units_per_step=8, evaluate=lambda: loss_on(-1).item()) as training:
    while True:
        loss = loss_on(training.steps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if training.step(loss):
            break
