"""Detection of how a machine computes a run's model fastest: autocast type, sequences per micro-batch, recomputation.

None of it changes the algorithm: tokens per inner step are the manifest's, reached by gradient accumulation.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.train import accelerator
from p2ptrain.train.memory import CARD_MEMORY_FRACTION, CPU_ACTIVATION_BYTES, pass_bytes
from p2ptrain.train.model import FlatModel, flat_model, recompute_activations, summed_loss
from p2ptrain.train.sequence_parts import trial_batch

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder, TrainingSection

BF16_PARAMETERS = 1_000_000
"""Parameters from which a CPU with fast bf16 tries it. Measured on one core with AVX512-BF16: a pass of llama-15m takes
135 ms in bf16 and 303 in fp32, one of the demo's model (357,024) 9 and 8. The trial decides above."""

CPU_TRIAL_TOKENS = 256
"""Most tokens of a trial on the CPU: one sequence of llama-15m. One of llama-135m takes most of a minute on a core."""

TRIALS = 3
"""Trials of each placement, alternating; the shortest counts. Guess: trials on real cards would settle it."""
TRIALS_S = 2.0
"""Seconds of measured passes after which no further round of trials starts: for a large model on a slow card one round
is enough. Guess: trials on slow cards would settle it."""
_TOO_LARGE = "The model does not fit this device: one sequence takes more memory than is free."
_CLOSE_OTHERS = "Close other programs that use the device, or choose another with --device."


@dataclass(frozen=True, slots=True)
class Placement:
    """Autocast type, micro-batch and recomputation for this machine."""

    autocast: torch.dtype | None  # None: fp32 throughout
    micro_batch: int  # sequences at once
    recomputes: bool = False  # whether layers compute their activations again in the backward pass
    muon: torch.dtype | None = None  # type of Muon's products; None: ``optimizer.products_type``

    @property
    def computes_in(self) -> str:
        return type_name(self.autocast or torch.float32)


def type_name(dtype: torch.dtype) -> str:
    return "fp32" if dtype is torch.float32 else str(dtype).removeprefix("torch.")


def place(
    model: FlatModel,
    description: Decoder,
    training: TrainingSection,
    cpu_bytes: int = CPU_ACTIVATION_BYTES,
    is_packed: bool = False,  # whether sequences are rows of dialogues, whose mask takes memory
) -> Placement:
    """Choose how to compute a model on its device by a few trial passes.

    Activations take what ``memory`` estimates for fp32; in 16 bits they take less. On the CPU and on chips that
    share its memory they take at most ``cpu_bytes``, or one sequence. They are recomputed if one sequence does not fit
    otherwise.

    In 16 bits (bf16, or fp16 with loss scaling where bf16 is missing) a card computes faster but launches more kernels.
    Of two placements that fit, the faster one in a trial is used: on an H100, llama-135m is six times as fast in bf16
    and llama-15m a third faster in fp32 (measured: docs/results/CARD.md). A CPU with fast bf16 tries both, too.
    Raises DeviceError if not even one sequence fits.
    """
    device = model.theta.device

    def trial(how: Placement) -> float:
        return trial_s(model, how, training.sequence_length, is_packed)

    if device.type == "cpu":
        exact = placement_within(description, training, cpu_bytes)
        if model.theta.numel() < BF16_PARAMETERS or not accelerator.has_fast_bf16():
            return exact
        # The same micro-batch: with copies of the weights in bf16, a pass takes less memory than in fp32 (measured).
        return fastest([replace(exact, autocast=torch.bfloat16), exact], trial)
    with accelerator.current(device):
        accelerator.empty_cache(device)
        half = accelerator.half_type(device)
        ways = (half, None) if accelerator.autocasts(device, half) else (None,)
        least = pass_bytes(description, training.sequence_length, recomputes=True)
        budget = _budget_bytes(model, max(cpu_bytes, least))
        if least > budget:
            raise DeviceError(_TOO_LARGE, _CLOSE_OTHERS)
        exact = placement_within(description, training, budget)
        found = fastest([replace(exact, autocast=way) for way in ways], trial)
        accelerator.empty_cache(device)
    return found


def _budget_bytes(model: FlatModel, most: int) -> int:
    """Return the memory that activations may take on a card: at most ``most`` if it is the host's, or unknown."""
    device = model.theta.device
    free = accelerator.free_bytes(device)
    if free is None:
        return most
    budget = int(CARD_MEMORY_FRACTION * free) - 3 * model.theta.nbytes  # to come: two moments, a gradient
    return min(budget, most) if accelerator.shares_host_memory(device) else budget


def fastest(
    placements: Sequence[Placement],  # at least one
    trial: Callable[[Placement], float],  # seconds of one micro-batch; may run out of memory
) -> Placement:
    """Return the placement with the shortest time per sequence, the first of equals.

    Trials alternate, because another program may start or end on the card meanwhile. A placement that runs out of
    memory because the other took it continues with half its micro-batch. Raises DeviceError if in none the device has
    all operations and room for one sequence.
    """
    costs, fault, spent_s = dict.fromkeys(placements, math.inf), _TOO_LARGE, 0.0
    for _ in range(TRIALS):
        for way in list(costs):
            try:
                seconds = trial(way)
            except NotImplementedError as error:
                fault = f"This device lacks an operation of the model ({str(error).partition(chr(10))[0]})."
                del costs[way]
            except (RuntimeError, MemoryError) as error:
                if not accelerator.is_out_of_memory(error):
                    raise
                del costs[way]
                if way.micro_batch > 1:
                    costs[replace(way, micro_batch=way.micro_batch // 2)] = math.inf
            else:
                spent_s += seconds
                costs[way] = min(costs[way], seconds / way.micro_batch)
        if not costs:
            raise DeviceError(fault, _CLOSE_OTHERS)
        if math.inf not in costs.values() and (len(costs) == 1 or spent_s > TRIALS_S):
            break
    return min(costs, key=costs.__getitem__)


def placement_within(
    description: Decoder, training: TrainingSection, budget_bytes: int = CPU_ACTIVATION_BYTES
) -> Placement:
    """Return the micro-batch of at least one sequence, in fp32, whose estimated activations fit ``budget_bytes``.

    Activations are recomputed only if one sequence does not fit otherwise. More sequences are faster: the demo model's
    step takes 41, 32 and 28 ms with 1, 2 and 4 at once (measured on one thread; larger models were not measured).
    """
    recomputes = pass_bytes(description, training.sequence_length) > budget_bytes
    most = training.sequences_per_step
    fits = bisect.bisect_right(
        range(1, most + 1),
        budget_bytes,
        key=lambda sequences: pass_bytes(description, training.sequence_length, sequences, recomputes),
    )
    parts = math.ceil(most / max(1, fits))
    return Placement(None, math.ceil(most / parts), recomputes)  # parts of equal size


def trial_s(model: FlatModel, how: Placement, sequence_length: int, is_packed: bool = False) -> float:
    """Return the seconds of a forward and backward pass after one warm-up pass. Leaves no gradients.

    On the CPU the pass has at most ``CPU_TRIAL_TOKENS``; the seconds are those of all tokens at the same speed.
    """
    device = model.theta.device
    sequences, tokens = how.micro_batch, sequence_length
    if device.type == "cpu":
        tokens = min(tokens, CPU_TRIAL_TOKENS)
        sequences = min(sequences, max(1, CPU_TRIAL_TOKENS // tokens))
    batch = trial_batch(sequences, tokens, is_packed)
    recompute_activations(model.module, how.recomputes)
    accelerator.empty_cache(device)  # free the other placement's cache: both together may not fit
    try:
        for _ in range(2):
            began = time.perf_counter()
            torch.autograd.backward(summed_loss(model.module, batch, how.autocast))
            accelerator.synchronize(device)
        seconds = time.perf_counter() - began
        return seconds * (how.micro_batch * sequence_length) / (sequences * tokens)
    finally:
        model.module.zero_grad(set_to_none=True)


def block_s(description: Decoder, sequence_length: int, placement: Placement, device: torch.device) -> float:
    """Return the shortest seconds of a micro-batch, forward and backward, through one block and the output layer."""
    config = description.config.model_copy(update={"num_hidden_layers": 1})
    model = flat_model(description.model_copy(update={"config": config}), 0, device)
    return min(trial_s(model, placement, sequence_length) for _ in range(TRIALS))
