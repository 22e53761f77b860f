"""Costs of a model's units, for ``stages.balanced_cut``: seconds by a trial, bytes from the shapes.

Each rank measures how long its device takes for one block and the output layer, one rank after the other, and all cut
by the results of all. Units take time as the numbers of weights that a token is multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from p2ptrain.train.activations import layer_values, loss_bytes
from p2ptrain.train.autofit import TRIALS, Placement, trial_s
from p2ptrain.train.model import flat_model
from p2ptrain.train.stages import UnitCosts

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder

STATE_BYTES = 16
"""Bytes a parameter takes on its device: weight, gradient and two moments, fp32."""
GUEST_BYTES = 8
"""Bytes of a parameter of a tied embedding's copy: weight and gradient."""


def unit_costs(
    description: Decoder,
    sequence_length: int,
    placement: Placement,
    seconds: Sequence[float],  # ``trial_seconds`` of each device
) -> UnitCosts:
    """Return the costs of the embeddings, each block, and the final norm with the output layer.

    The estimate of bytes is for several stages, and for activations in fp32.
    """
    config = description.config
    table = config.vocab_size * config.hidden_size
    output = STATE_BYTES * description.norm_parameters()
    output += (GUEST_BYTES if config.tie_word_embeddings else STATE_BYTES) * table
    blocks = config.num_hidden_layers
    state = [
        STATE_BYTES * (table + description.position_parameters()),
        *[STATE_BYTES * description.block_parameters()] * blocks,
        output,
    ]
    tokens = placement.micro_batch * sequence_length
    kept = 4 * tokens * (config.hidden_size if placement.recomputes else layer_values(description, sequence_length))
    work = [0, *[description.block_parameters()] * blocks, table]
    times = [[each * own / (work[1] + table) for own in work] for each in seconds]
    return UnitCosts(times, state, [0, *[kept] * blocks, loss_bytes(description, tokens)])


def trial_seconds(description: Decoder, sequence_length: int, placement: Placement, device: torch.device) -> float:
    """Return the seconds of a micro-batch, forward and backward, through a model of one block; the shortest counts."""
    config = description.config.model_copy(update={"num_hidden_layers": 1})
    model = flat_model(description.model_copy(update={"config": config}), 0, device)
    return min(trial_s(model, placement, sequence_length) for _ in range(TRIALS))
