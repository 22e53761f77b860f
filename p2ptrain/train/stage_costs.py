"""Costs of a model's units, for ``stages.balanced_cut``: seconds by a trial, bytes from the shapes.

A trial builds at most three blocks of the model. Each rank makes one on its device, one rank after the other on the
CPU, and all cut by the results of all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from p2ptrain.train.activations import layer_values, loss_bytes
from p2ptrain.train.autofit import CPU_TRIAL_TOKENS, TRIALS, Placement, trial_s
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
    seconds: Sequence[Sequence[float]],  # ``unit_seconds`` of each device
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
    return UnitCosts(seconds, state, [0, *[kept] * blocks, loss_bytes(description, tokens)])


def trials(
    description: Decoder, sequence_length: int, placements: Sequence[Placement], device: torch.device
) -> list[list[float]]:
    """Return ``unit_seconds`` of each placement; those whose trials on the CPU are the same share one."""
    most = max(1, CPU_TRIAL_TOKENS // sequence_length) if device.type == "cpu" else sys.maxsize
    tried = [replace(each, micro_batch=min(each.micro_batch, most)) for each in placements]
    known = {each: unit_seconds(description, sequence_length, each, device) for each in dict.fromkeys(tried)}
    return [
        [seconds * each.micro_batch / trial.micro_batch for seconds in known[trial]]
        for each, trial in zip(placements, tried, strict=True)
    ]


def unit_seconds(description: Decoder, sequence_length: int, placement: Placement, device: torch.device) -> list[float]:
    """Return the seconds of a forward and backward pass of a micro-batch through each unit, the shortest of trials.

    Models of one and of three blocks tell a block from the output layer; looking embeddings up counts as nothing.
    """

    def measured(blocks: int) -> float:
        config = description.config.model_copy(update={"num_hidden_layers": blocks})
        model = flat_model(description.model_copy(update={"config": config}), 0, device)
        return min(trial_s(model, placement, sequence_length) for _ in range(TRIALS))

    one, three = measured(1), measured(3)
    block = min(max((three - one) / 2, three / 6), three / 3)  # whatever else the machine did meanwhile
    return [0.0, *[block] * description.config.num_hidden_layers, max(one - block, 0.0)]
