"""Detection of how a machine computes a run's model fastest: autocast type, sequences per micro-batch, recomputation.

None of it changes the algorithm: tokens per inner step are the manifest's, reached by gradient accumulation.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.train import accelerator
from p2ptrain.train.activations import pass_bytes
from p2ptrain.train.model import FlatModel, recompute_activations, summed_loss
from p2ptrain.train.sequence_parts import trial_batch

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder, TrainingSection

CARD_MEMORY_FRACTION = 0.8
"""Share of the card's free memory that training may use; the rest is for the owner's other programs. Guess: memory use
of volunteers' desktops would settle it."""

CPU_ACTIVATION_BYTES = 1 << 30
"""Memory for activations on the CPU of a computer that is also used for other things. Guess: memory use of volunteers'
computers would settle it."""

ONE_SEQUENCE = 1.2
"""Times the estimate that one sequence may take on chips with the host's memory: counts on the CPU differ from it by up
to 15 %, which a test checks."""

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

    On the CPU and on chips that share its memory, activations take at most ``cpu_bytes``, or one sequence. Activations
    are recomputed if one sequence does not fit otherwise.

    In 16 bits (bf16, or fp16 with loss scaling where bf16 is missing) a card computes faster but launches more kernels.
    Of two placements that fit, the faster one in a trial is used: on an H100, llama-135m is six times as fast in bf16
    and llama-15m a third faster in fp32 (measured: docs/results/CARD.md). A CPU with fast bf16 tries both, too.
    Raises DeviceError if not even one sequence fits.
    """
    device = model.theta.device

    def trial(how: Placement) -> float:
        return trial_s(model, how, training.sequence_length, is_packed)

    if device.type == "cpu":
        exact = cpu_placement(description, training, cpu_bytes)
        if model.theta.numel() < BF16_PARAMETERS or not accelerator.has_fast_bf16():
            return exact
        # The same micro-batch: with copies of the weights in bf16, a pass takes less memory than in fp32 (measured).
        return fastest([replace(exact, autocast=torch.bfloat16), exact], trial)
    with accelerator.current(device):
        accelerator.empty_cache(device)
        half = accelerator.half_type(device)
        ways = (half, None) if accelerator.autocasts(device, half) else (None,)
        length = training.sequence_length
        least = pass_bytes(description, length, recomputes=True)
        budget = _budget_bytes(model, max(cpu_bytes, int(ONE_SEQUENCE * least)))

        def micro_batch(way: torch.dtype | None, recomputes: bool) -> int:
            accelerator.empty_cache(device)

            def cost(sequences: int) -> int:
                how = Placement(way, sequences, recomputes)
                estimate = pass_bytes(description, length, sequences, recomputes)
                return _activation_bytes(model, how, length, estimate, is_packed)

            return search_micro_batch(training.sequences_per_step, budget, cost)

        try:
            fit = fitting(ways, lambda way: micro_batch(way, False))
        except DeviceError:
            fit = [replace(each, recomputes=True) for each in fitting(ways, lambda way: micro_batch(way, True))]
        found = fastest(fit, trial)
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


def fitting(ways: Iterable[torch.dtype | None], micro_batch: Callable[[torch.dtype | None], int]) -> list[Placement]:
    """Return a placement for each autocast type in which the model fits and the device has all operations.

    Raises DeviceError if there is none.
    """
    found, fault = [], ""
    for way in ways:
        try:
            found.append(Placement(way, micro_batch(way)))
        except DeviceError as error:
            fault = error.problem
        except NotImplementedError as error:
            fault = f"This device lacks an operation of the model ({str(error).partition(chr(10))[0]})."
    if not found:
        raise DeviceError(fault, _CLOSE_OTHERS)
    return found


def fastest(
    placements: Sequence[Placement],  # at least one
    trial: Callable[[Placement], float],  # seconds of one micro-batch; may run out of memory
) -> Placement:
    """Return the placement with the shortest time per sequence, the first of equals; a single one is not tried.

    Trials alternate, because another program may start or end on the card meanwhile. A placement that runs out of
    memory because the other took it continues with half its micro-batch.
    """
    if len(placements) == 1:
        return placements[0]
    ways, costs = list(placements), [math.inf] * len(placements)
    spent_s = 0.0
    for _ in range(TRIALS):
        for place, way in enumerate(ways):
            try:
                seconds = trial(way)
            except (RuntimeError, MemoryError) as error:
                if not accelerator.is_out_of_memory(error):
                    raise
                ways[place], costs[place] = replace(way, micro_batch=max(1, way.micro_batch // 2)), math.inf
                continue
            spent_s += seconds
            costs[place] = min(costs[place], seconds / way.micro_batch)
        if spent_s > TRIALS_S and math.inf not in costs:
            break
    return ways[costs.index(min(costs))]


def search_micro_batch(
    most: int,  # sequences per inner step
    budget_bytes: int,
    cost: Callable[[int], int],  # bytes that a trial of this many sequences took; may run out of memory
) -> int:
    """Return the largest power of two (or ``most``) that a trial showed to fit.

    Sizes double while the next one, extrapolated from the last, stays within the budget: running out of memory on a
    card that other programs use would disturb them. Raises DeviceError if one sequence does not fit.
    """
    fits = taken = 0  # the largest size so far, and its bytes
    size = 1
    while True:
        try:
            used = cost(size)
        except (RuntimeError, MemoryError) as error:
            if not accelerator.is_out_of_memory(error):
                raise
            break
        if used > budget_bytes:
            break
        each = (used - taken) / (size - fits)
        fits, taken = size, used
        size = min(2 * size, most)
        if fits == most or used + (size - fits) * each > budget_bytes:
            break
    if fits == 0:
        raise DeviceError(
            "The model does not fit this device: one sequence takes more memory than is free.",
            _CLOSE_OTHERS,
        )
    return fits


def cpu_placement(
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


def _activation_bytes(
    model: FlatModel,
    how: Placement,
    sequence_length: int,
    estimate: int,  # bytes
    is_packed: bool = False,
) -> int:
    """Return the peak bytes of a forward and backward pass beyond weights and gradients. Leaves no gradients.

    Gradients exist before the pass, as they do from an inner step's second micro-batch on: the peak adds to them. Where
    the backend counts no peak, the pass only shows that it fits, and the result is ``estimate``.
    """
    device = model.theta.device
    batch = trial_batch(how.micro_batch, sequence_length, is_packed)
    recompute_activations(model.module, how.recomputes)
    try:
        for parameter in model.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = accelerator.start_peak(device)
        torch.autograd.backward(summed_loss(model.module, batch, how.autocast))
        accelerator.synchronize(device)  # a device that computes later also runs out of memory later
        peak = accelerator.peak_bytes(device)
        return estimate if before is None or peak is None else max(0, peak - before)
    finally:
        model.module.zero_grad(set_to_none=True)
