"""The simulate command with a small scenario file, as a user runs it."""

from __future__ import annotations

import pytest

from p2ptrain import cli
from sim.command import simulate

SCENARIO = """
[run]
outer_steps = 6

[learner]
kind = "quadratic"
parameters = 512

[outer]
recipe = "swarm"
inner_steps = 5
learning_rate = 0.7
momentum = 0.5
nesterov = true
topology = "random"
partners = 1
weights = "equal"
exchanges_per_step = 1
fragments = 1
fragments_per_exchange = 1

[codec]
name = "int8"
block_size = 1024
gradients = "int8"
rank = 16

[[peers]]
name = "home"
count = 4
step_s = 1.0
step_jitter = 0.1
"""


def run(*words: object) -> int:
    """Run the program through its error boundary, and return the exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.run_command(simulate, [str(word) for word in words])
    return int(ended.value.code or 0)
