"""Memory of training, estimated from the run's shapes before anything large is allocated.

Activations are counted as values that the modules of transformers and ``cross_entropy`` hold at once, in fp32; scores
of attention are not among them, because the fused kernel keeps none. Tests compare activations and the outer state with
counted bytes.

Letters: T tokens at once, D width, I width inside the feed-forward blocks, V vocabulary, L layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from p2ptrain.base import cgroups
from p2ptrain.base.errors import DeviceError
from p2ptrain.manifest import SETTINGS_FILE, Decoder, Manifest, parameter_count
from p2ptrain.manifest.decoder import GatedDecoder
from p2ptrain.manifest.model import Gemma3, GPTNeoX, OLMo2, Qwen3
from p2ptrain.outer.fragments import layer_slices
from p2ptrain.recipes import RECIPES, Recipe
from p2ptrain.train.accelerator import shares_host_memory
from p2ptrain.train.cross_entropy import CHUNK_LOGITS

CARD_MEMORY_FRACTION = 0.8
"""Share of the card's free memory that training may use; the rest is for the owner's other programs. Guess: memory use
of volunteers' desktops would settle it."""

CPU_ACTIVATION_BYTES = 1 << 30
"""Memory for activations on the CPU of a computer that is also used for other things. Guess: memory use of volunteers'
computers would settle it."""

HOST_BYTES = 12
"""Minimum host memory in bytes per parameter, in fp32: slow weights, momentum, and the new slow weights of an outer
step while partners may still download the old ones."""

FRAGMENT_BYTES = 12
"""Additional bytes per parameter of one fragment: pseudo-gradient, update and new momentum."""

SHOWN_BYTES = 4
"""Additional bytes per parameter if partners get the fast weights: a copy."""

PHASE_BYTES = 28
"""Bytes per parameter, instead of all these, if the recipe waits for partners or mixes pseudo-gradients: these and the
states before and after the outer step are kept for all fragments."""

STATE_BYTES = 16
"""Bytes per parameter on its device, which may share the host's memory: fast weights, gradient and AdamW's two moments,
in fp32."""

BASE_BYTES = 500_000_000
"""Host memory in bytes of Python and torch without a model: 0.6 GB for the demo's peer (our measurement)."""

HEAP = 1.4
"""Resident memory over live bytes of tensors: 1.2 to 1.45 (our measurement, three presets). glibc keeps freed blocks; a
lower M_MMAP_THRESHOLD returns them, at 38 % more time for llama-15m."""

RECOMPUTED_HEAP = 3.0
"""``HEAP`` if activations are recomputed: 2.9 and 3 (our measurement, llama-15m and llama-135m)."""

COMPILER_BYTES = 800_000_000
"""Host memory in bytes of the compiler's process and of g++ without weights: for llama-15m (our measurement)."""

COMPILED_COPIES = 3
"""Weights and two gradients, with which that process tries what it made."""

_ACTIVATION_VALUES = {"gelu_new": 3, "relu": -1}
"""Values of width I that a nonlinearity keeps beyond its input: gelu_new is made of many operations, and relu keeps its
result alone."""


# --- checks -----------------------------------------------------------------------------------------------------------


def activation_bytes(
    manifest: Manifest,
    device: torch.device,
    allowed_bytes: float = math.inf,  # by the owner
    installed_bytes: int | None = None,  # None: what this process may use
) -> int:
    """Return the host memory for activations, of no use with a card.

    More than CPU_ACTIVATION_BYTES only if one sequence needs it to keep its activations, and there is as much. Raises
    DeviceError if the model needs more than is there or allowed, with one sequence at once and activations recomputed.
    """
    there = installed_memory() if installed_bytes is None else installed_bytes
    state = _state_bytes(manifest, device)
    needed = state + (_least_activation_bytes(manifest) if shares_host_memory(device) else 0)
    _check(manifest, needed, there)
    if BASE_BYTES + needed > allowed_bytes:
        raise DeviceError(
            f"The run's model needs at least {(BASE_BYTES + needed) / 1e9:.1f} GB of memory with Python and torch, but "
            f"memory_gb in {SETTINGS_FILE} allows {allowed_bytes / 1e9:g} GB.",
            "Raise memory_gb, or join a run with a smaller model.",
        )
    kept = pass_bytes(manifest.model, manifest.training.sequence_length)
    return int(min(max(CPU_ACTIVATION_BYTES, kept), (min(allowed_bytes, there) - BASE_BYTES - state) / HEAP))


def check_ranks(manifest: Manifest, devices: Sequence[torch.device], stages: int, installed_bytes: int) -> None:
    """Raise DeviceError if the ranks of this computer need more of the host's memory; ranks check cards themselves.

    The host holds the outer state once, and for each rank without a card a stage's inner state, with the activations
    of as many sequences as stages follow. Before that each rank draws the initial weights of the whole model.
    """
    whole, kept = parameter_count(manifest.model), pass_bytes(manifest.model, manifest.training.sequence_length)
    replicas = sum(each.type in ("cpu", "mps") for each in devices) / stages
    inner = STATE_BYTES * whole + HEAP * kept * (stages + 1) / 2
    drawn = 4 * whole * len(devices)
    needed = len(devices) * BASE_BYTES + max(drawn, _outer_bytes(manifest) + replicas * inner)
    _check(manifest, needed, installed_bytes)


def compiler_fault(manifest: Manifest, device: torch.device, micro_batch: int, allowed_bytes: float) -> str:
    """Return why the compiler of the training step does not fit into host memory beside this peer; "" if it does."""
    needed = float(COMPILER_BYTES)
    if shares_host_memory(device):
        training = manifest.training
        needed += 4 * COMPILED_COPIES * parameter_count(manifest.model)
        needed += HEAP * pass_bytes(manifest.model, training.sequence_length, micro_batch)
    ours = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available, min(installed_memory(), allowed_bytes) - ours)
    if needed <= free:
        return ""
    return f"the compiler needs {needed / 1e9:.1f} GB of memory, and {max(0.0, free) / 1e9:.1f} GB are free"


def _check(manifest: Manifest, needed: float, there: int) -> None:
    if needed > there:
        raise DeviceError(
            f"The run's model has {parameter_count(manifest.model):,} parameters and needs at least "
            f"{needed / 1e9:.1f} GB of memory, but this machine has {there / 1e9:.1f} GB.",
            "Join from a machine with more memory, or join a run with a smaller model.",
        )


def installed_memory(root: Path = cgroups.ROOT) -> int:
    """Return this machine's memory in bytes, or the smaller limit of a container or slice."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cgroups.limits(root).memory_bytes))


# --- weights, moments and the outer state -----------------------------------------------------------------------------


def host_bytes(recipe: Recipe, fragments: float) -> float:
    """Return the most bytes per parameter that the outer state of a peer takes, on the host for any device.

    Args:
        fragments: all weights over those of the longest fragment.
    """
    if recipe.blocks or recipe.mix("pseudo_gradient") is not None:
        return PHASE_BYTES
    shown = SHOWN_BYTES if recipe.mix("fast") is not None else 0
    return HOST_BYTES + FRAGMENT_BYTES / fragments + shown


def _state_bytes(manifest: Manifest, device: torch.device) -> int:
    """Return the host memory of weights, momentum and moments in bytes."""
    inner = STATE_BYTES * parameter_count(manifest.model) if shares_host_memory(device) else 0
    return math.ceil(_outer_bytes(manifest) + inner)


def _outer_bytes(manifest: Manifest) -> float:
    """Return the host memory of the outer state in bytes."""
    outer = manifest.outer
    fragments: float = outer.fragments
    if outer.cut == "layers":
        pieces = layer_slices(manifest.model.unit_parameters(), outer.fragments)
        fragments = parameter_count(manifest.model) / max(piece.stop - piece.start for piece in pieces)
    return parameter_count(manifest.model) * host_bytes(RECIPES[outer.recipe], fragments)


# --- activations ------------------------------------------------------------------------------------------------------


def _least_activation_bytes(manifest: Manifest) -> int:
    """Return the resident memory of one sequence's activations, recomputed if that takes less."""
    kept, recomputed = (
        pass_bytes(manifest.model, manifest.training.sequence_length, recomputes=each) for each in (False, True)
    )
    return int(min(HEAP * kept, RECOMPUTED_HEAP * recomputed))


def pass_bytes(description: Decoder, sequence_length: int, sequences: int = 1, recomputes: bool = False) -> int:
    """Estimate the most bytes of a forward and backward pass in fp32 beyond weights and gradients, which exist before.

    ::

        layers   L times what a layer keeps; D if it recomputes the rest
        loss     layers + last norm, hidden states, their gradient + logits of a chunk + V D, the weight's gradient
        scaling  layers + last norm, two gradients of hidden states + 2 V D, before and after
        last     layers + what the last layer's backward pass takes + V D, if it waits for that of tied embeddings
    """
    config = description.config
    width, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    tokens = sequences * sequence_length
    kept = layer_values(description, sequence_length)
    layers = config.num_hidden_layers * (width if recomputes else kept)
    loss = tokens * layers + loss_bytes(description, tokens) // 4
    scaling = tokens * (layers + 4 * width) + 2 * words * width
    last = tokens * (layers + (kept if recomputes else width) + 2 * inner)
    if config.tie_word_embeddings:
        last += words * width
    return 4 * max(loss, scaling, last)


def loss_bytes(description: Decoder, tokens: int) -> int:
    """Estimate the bytes of the last norm and the loss, forward and backward."""
    width, words = description.config.hidden_size, description.config.vocab_size
    return 4 * (5 * tokens * width + min(tokens * words, max(CHUNK_LOGITS, words)) + words * width)


def layer_values(description: Decoder, sequence_length: int) -> int:
    """Return the values per token that a layer keeps for the backward pass, on average over the layers."""
    config = description.config
    width, inner = config.hidden_size, config.intermediate_size
    extra = _ACTIVATION_VALUES.get(config.hidden_act, 0) * inner
    if isinstance(description, GatedDecoder):
        return _gated_values(description) + extra + _mask_values(description, sequence_length)
    # Input and result of two norms, which GPT-NeoX gives the same input; q, k, v together, attention; two of width I.
    # GPT-NeoX also keeps rotated q and k.
    return (10 if isinstance(description, GPTNeoX) else 8) * width + 2 * inner + extra


def _gated_values(description: GatedDecoder) -> int:
    width, inner = description.config.hidden_size, description.config.intermediate_size
    heads = description.query_width + description.key_width
    # q, k, v, attention; gate, its activation, up, product.
    values = 2 * heads + 4 * inner
    if isinstance(description, Qwen3 | Gemma3 | OLMo2):
        values += 2 * heads  # input and product of the norms of q and k
    # Input and product of each norm, and what the branches read: the norm's result, in OLMo 2 the residual stream.
    norms = description.norms_per_block
    return values + (2 * norms + 2) * width


def _mask_values(description: GatedDecoder, sequence_length: int) -> int:
    """Return the values per token of the masks of sliding layers, which sequences of at least the window need."""
    if not isinstance(description, Gemma3) or sequence_length < description.config.sliding_window:
        return 0
    layers = description.config.num_hidden_layers
    sliding = layers - layers // description.config.sliding_window_pattern
    return sequence_length * sliding // layers
