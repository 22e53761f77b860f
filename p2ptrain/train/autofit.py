"""Detection of what a machine can do: device, autocast type, sequences per micro-batch.

None of it changes the algorithm: tokens per inner step are the manifest's, reached by gradient accumulation.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.train.cross_entropy import CHUNK_LOGITS
from p2ptrain.train.model import FlatModel, summed_loss

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder, TrainingSection

logger = logging.getLogger(__name__)

CUDA_MEMORY_FRACTION = 0.8
"""Share of the card's free memory that training may use; the rest is for the owner's other programs. Guess: memory use
of volunteers' desktops would settle it."""

CPU_ACTIVATION_BYTES = 1 << 30
"""Memory for activations on the CPU of a computer that is also used for other things. Guess: memory use of volunteers'
computers would settle it."""

ACTIVATIONS_PER_LAYER = 17
"""Values kept for the backward pass per token, layer and unit of width. Korthikanti et al. (arXiv 2205.05198) count 34
bytes at 16 bits without attention scores, which the fused kernel does not keep."""

LOGIT_COPIES = 3
"""Copies of a chunk of logits: product, in the weights' type, gradient in the products' type."""

TRIALS = 3
"""Trials of each placement, alternating; the shortest counts. Guess: the spread of trials on real cards would settle
it."""
TRIALS_S = 2.0
"""Seconds of measured passes after which no further round of trials starts: for a large model on a slow card one round
is enough. Guess: the spread of trials on slow cards would settle it."""
_CLOSE_OTHERS = "Close other programs that use the device, or choose another with --device."


@dataclass(frozen=True, slots=True)
class Placement:
    """Autocast type and micro-batch for this machine."""

    autocast: torch.dtype | None  # None: fp32 throughout
    micro_batch: int  # sequences at once

    @property
    def computes_in(self) -> str:
        return "fp32" if self.autocast is None else str(self.autocast).removeprefix("torch.")


def choose_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:<i>`` after checking that it computes.

    A card becomes the current device of this thread: autocast queries that one, wherever the tensors are. Raises
    DeviceError if the device is missing or unusable. ``auto`` tries the other cards, then the CPU, instead.
    """
    if name == "auto":
        return _first_card() or torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    named = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if named is None:
        raise DeviceError(f"There is no device {name!r}.", "Use auto, cpu, cuda or cuda:<number>.")
    if not torch.cuda.is_available():
        raise DeviceError(f"Device {name} was requested, but {_why_no_cuda()}.", "Fix that, or use --device cpu.")
    index, count = int(named[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise DeviceError(
            f"Device {name} was requested, but this machine has {count} CUDA device(s).",
            f"Use one of {', '.join(f'cuda:{i}' for i in range(count))}.",
        )
    chosen = torch.device("cuda", index)
    if (fault := _fault(chosen)) is not None:
        raise DeviceError(
            f"Device {name} was requested, but nothing runs on it ({fault}).",
            "End other programs that use it (nvidia-smi lists them), install a torch that supports the card "
            "(https://pytorch.org/get-started), or use --device cpu.",
        )
    torch.cuda.set_device(chosen)
    return chosen


def card_name(device: torch.device) -> str | None:
    """Return the name by which nvidia-smi knows a device, ``GPU-`` and its UUID; None if it knows none."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def half_type(device: torch.device) -> torch.dtype:
    """Return the 16-bit type in which a device multiplies matrices fast: bf16, or fp16 on a CUDA card without it."""
    if device.type != "cuda":
        return torch.bfloat16
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def place(
    model: FlatModel, description: Decoder, training: TrainingSection, cpu_bytes: int = CPU_ACTIVATION_BYTES
) -> Placement:
    """Choose autocast type and micro-batch for a model on its device. On CUDA it runs a few trial passes.

    On the CPU, activations take at most ``cpu_bytes``.

    In 16 bits (bf16, or fp16 with loss scaling on a card without it) a card computes faster but launches more kernels.
    Of two placements that fit, the faster one in a trial is used: on an H100, llama-135m is six times as fast in bf16
    and llama-15m a third faster in fp32 (measured: docs/RESULTS.md). Raises DeviceError if not even one sequence fits.
    """
    device = model.theta.device
    if device.type != "cuda":
        return Placement(None, cpu_micro_batch(description, training, cpu_bytes))
    with torch.cuda.device(device):
        free, _ = torch.cuda.mem_get_info()
        # Two moments and a gradient are still to be allocated; memory that torch has reserved but does not use counts
        # as free.
        spare = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        budget = int(CUDA_MEMORY_FRACTION * (free + spare)) - 3 * model.theta.nbytes
        found = fastest(
            fitting((half_type(device), None), lambda way: _micro_batch(model, training, budget, way)),
            lambda how: _trial_s(model, how, training.sequence_length),
        )
        torch.cuda.empty_cache()
    return found


def fitting(ways: Iterable[torch.dtype | None], micro_batch: Callable[[torch.dtype | None], int]) -> list[Placement]:
    """Return a placement for each autocast type with which the model fits. Raises DeviceError if there is none."""
    found, fault = [], ""
    for way in ways:
        try:
            found.append(Placement(way, micro_batch(way)))
        except DeviceError as error:
            fault = error.problem
    if not found:
        raise DeviceError(fault, _CLOSE_OTHERS)
    return found


def fastest(
    placements: Sequence[Placement],  # at least one
    trial: Callable[[Placement], float],  # seconds of one micro-batch; may raise OutOfMemoryError
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
            except torch.OutOfMemoryError:
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
    cost: Callable[[int], int],  # bytes that a trial of this many sequences took; may raise OutOfMemoryError
) -> int:
    """Return the largest power of two (or ``most``) that a trial showed to fit.

    Sizes double while the next one, extrapolated from the last, stays within the budget: running out of memory on a
    card that other programs use would disturb them. Raises DeviceError if one sequence does not fit.
    """
    fits = 0
    size = 1
    while True:
        try:
            used = cost(size)
        except torch.OutOfMemoryError:
            break
        if used > budget_bytes:
            break
        fits = size
        size = min(2 * size, most)
        if fits == most or used * size / fits > budget_bytes:
            break
    if fits == 0:
        raise DeviceError(
            "The model does not fit this device: one sequence takes more memory than is free.",
            _CLOSE_OTHERS,
        )
    return fits


def cpu_micro_batch(description: Decoder, training: TrainingSection, budget_bytes: int = CPU_ACTIVATION_BYTES) -> int:
    """Return the number of sequences whose estimated activations fit ``budget_bytes``, at least one.

    More are faster: the demo model's step takes 41, 32 and 28 ms with 1, 2 and 4 sequences at once (measured on one
    thread; larger models were not measured).
    """
    return max(1, min(training.sequences_per_step, budget_bytes // cpu_sequence_bytes(description, training)))


def cpu_sequence_bytes(description: Decoder, training: TrainingSection) -> int:
    """Estimate the bytes that the activations of one sequence take on the CPU in fp32."""
    config = description.config
    tokens = training.sequence_length
    kept = ACTIVATIONS_PER_LAYER * config.hidden_size * config.num_hidden_layers * tokens
    return 4 * (kept + LOGIT_COPIES * min(config.vocab_size * tokens, CHUNK_LOGITS))


def _micro_batch(model: FlatModel, training: TrainingSection, budget_bytes: int, autocast: torch.dtype | None) -> int:
    torch.cuda.empty_cache()
    return search_micro_batch(
        training.sequences_per_step,
        budget_bytes,
        lambda sequences: _activation_bytes(model, sequences, training.sequence_length, autocast),
    )


def _trial_s(model: FlatModel, how: Placement, sequence_length: int) -> float:
    """Return the seconds of a forward and backward pass after one warm-up pass. Leaves no gradients."""
    device = model.theta.device
    batch = torch.zeros(how.micro_batch, sequence_length + 1, dtype=torch.int64)
    torch.cuda.empty_cache()  # free the other placement's cache: both together may not fit
    try:
        for _ in range(2):
            began = time.perf_counter()
            torch.autograd.backward(summed_loss(model.module, batch, how.autocast))
            torch.cuda.synchronize(device)
        return time.perf_counter() - began
    finally:
        model.module.zero_grad(set_to_none=True)


def _activation_bytes(model: FlatModel, sequences: int, sequence_length: int, autocast: torch.dtype | None) -> int:
    """Return the peak bytes of a forward and backward pass beyond weights and gradients. Leaves no gradients.

    Gradients exist before the pass, as they do from an inner step's second micro-batch on: the peak adds to them.
    """
    device = model.theta.device
    batch = torch.zeros(sequences, sequence_length + 1, dtype=torch.int64)
    try:
        for parameter in model.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        torch.autograd.backward(summed_loss(model.module, batch, autocast))
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    finally:
        model.module.zero_grad(set_to_none=True)


def _first_card() -> torch.device | None:
    """Make the first card that computes the current device and return it; log the cards that fail."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.device("cuda", index)
        if (fault := _fault(card)) is None:
            torch.cuda.set_device(card)
            return card
        logger.warning("%s is not used: %s", card, fault)
    return None


def _fault(card: torch.device) -> str | None:
    """Return why nothing runs on this card, such as exclusive use by another program or a torch without its kernels."""
    try:
        _compute(card)
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _compute(device: torch.device) -> None:
    torch.ones(1, device=device).add_(1).item()


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA (https://pytorch.org/get-started prints the install command)"
    return "torch finds no CUDA device (is the driver installed? nvidia-smi should list the card)"
