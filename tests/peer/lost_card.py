"""A peer whose leader loses its card in the tenth inner step. Takes the arguments of ``python -m peer``."""

from __future__ import annotations

from typing import Any

import torch

from p2ptrain.cli import run_command
from p2ptrain.train.pipeline import PipelineTask
from peer.cli import peer

inner_step = PipelineTask.inner_step
steps: list[None] = []


def failing(task: PipelineTask, *arguments: Any) -> float:
    steps.append(None)
    if len(steps) == 10:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    return inner_step(task, *arguments)


if __name__ == "__main__":
    PipelineTask.inner_step = failing
    run_command(peer, name="lost_card")
