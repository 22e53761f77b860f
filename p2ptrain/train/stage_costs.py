"""Costs of a model's units, for ``stages.balanced_cut``: seconds by a trial, bytes from the shapes.

A trial builds three blocks of the model, not all. Each rank makes one on its device, one rank after the other on the
CPU, and all cut by the results of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from p2ptrain.train import accelerator
from p2ptrain.train.activations import layer_values, loss_bytes
from p2ptrain.train.autofit import CPU_TRIAL_TOKENS, TRIALS, Placement
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.model import recompute_activations
from p2ptrain.train.staged import StageModule
from p2ptrain.train.stages import StageRange, UnitCosts, stage_model

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
    known: dict[Placement, list[float]] = {}
    for each in placements:
        tried = replace(each, micro_batch=_trial_size(each, sequence_length, device)[0])
        if tried not in known:
            known[tried] = unit_seconds(description, sequence_length, tried, device)
    found = []
    for each in placements:
        tried = replace(each, micro_batch=_trial_size(each, sequence_length, device)[0])
        found.append([seconds * each.micro_batch / tried.micro_batch for seconds in known[tried]])
    return found


def _trial_size(placement: Placement, sequence_length: int, device: torch.device) -> tuple[int, int]:
    """Return sequences and tokens of each that a trial computes."""
    if device.type != "cpu":
        return placement.micro_batch, sequence_length
    tokens = min(sequence_length, CPU_TRIAL_TOKENS)
    return min(placement.micro_batch, max(1, CPU_TRIAL_TOKENS // tokens)), tokens


def unit_seconds(description: Decoder, sequence_length: int, placement: Placement, device: torch.device) -> list[float]:
    """Return the seconds of a forward and backward pass of a micro-batch through each unit, the shortest of trials.

    On the CPU a trial has at most ``CPU_TRIAL_TOKENS``; the seconds are those of all tokens at the same speed.
    """
    short = description.model_copy(update={"config": description.config.model_copy(update={"num_hidden_layers": 3})})
    sequences, tokens = _trial_size(placement, sequence_length, device)
    factor = placement.micro_batch * sequence_length / (sequences * tokens)

    def measured(index: int, blocks: int) -> float:
        compute = _pass(short, StageRange(index, 3, range(blocks)), placement, sequences, tokens, device)
        return factor * _shortest_s(compute, device)

    one, three = measured(1, 1), measured(1, 3)
    block = max((three - one) / 2, three / 6)  # copies from and to the host are not part of a block
    return [measured(0, 0), *[block] * description.config.num_hidden_layers, measured(2, 0)]


def _pass(
    description: Decoder, stage: StageRange, placement: Placement, sequences: int, tokens: int, device: torch.device
) -> Callable[[], None]:
    """Return a forward and backward pass of one stage."""
    model = stage_model(description, 0, device, stage)
    recompute_activations(model.flat.module, placement.recomputes)
    forward_pass = StageModule(model, placement.autocast)
    hidden_shape = sequences, tokens, description.config.hidden_size
    given, returned = torch.zeros(hidden_shape), torch.zeros(hidden_shape)
    ids, targets = (torch.zeros(sequences, tokens, dtype=torch.int64, device=device) for _ in range(2))

    def compute() -> None:
        received = ids if stage.is_first else given.to(device).requires_grad_()
        hidden = forward_pass(received)
        if stage.is_last:
            total = summed_cross_entropy(hidden.flatten(0, 1), model.output, targets.flatten(), placement.autocast)
            total.backward()
        else:
            hidden.backward(returned.to(hidden))

    return compute


def _shortest_s(compute: Callable[[], None], device: torch.device) -> float:
    compute()
    seconds = []
    for _ in range(TRIALS):
        accelerator.synchronize(device)
        began = time.perf_counter()
        compute()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
