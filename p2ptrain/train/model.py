"""Causal language model built from its description alone, with its parameters in one flat vector.

transformers builds the module from a configuration; no weights, files or code are fetched. The manifest's model section
is an allow-list, checked when parsed. Its size follows from the shapes, so that a peer judges the memory before it
builds anything; the finished model's size is checked here. Initial weights are
a function of (model, seed), drawn on the CPU in fp32 for any device, so that the peers of a run start from the same
point. (The last bits may differ between processor families, because samplers are vectorized differently. Exchanges
average such differences out.)

Dimension letters: P parameters, B sequences, T tokens a sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.imports import large_imports
from p2ptrain.manifest import parameter_count
from p2ptrain.outer.flat import FlatLayout, flatten_module
from p2ptrain.train.attention import use_fused_attention
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.sequence_parts import parts_of, predicted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from p2ptrain.manifest import Decoder


FILE_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Names of parameters in files where transformers 5 uses other ones in memory, by model type."""


@dataclass(frozen=True, slots=True)
class FlatModel:
    """Module whose parameters are views of ``theta``: writing to either changes the other."""

    module: PreTrainedModel
    theta: Tensor  # [P] fp32 on the module's device
    layout: FlatLayout


def flat_model(description: Decoder, seed: int, device: torch.device) -> FlatModel:
    """Build the run's model with its initial weights on ``device``."""
    module = build_module(description, seed)
    Module.to(module, device)  # in place; the plain method, because transformers' wrapper hides its signature
    layout = FlatLayout.of(module)
    return FlatModel(module, flatten_module(module), layout)


def in_memory(
    model: FlatModel,
    theta: Tensor,  # [P] fp32 on the module's device
) -> FlatModel:
    """Return the model with its parameters in other memory, whose content they take."""
    views = model.layout.views(theta)
    for name, parameter in model.module.named_parameters():
        parameter.data = views[name]
    return FlatModel(model.module, theta, model.layout)


def build_module(description: Decoder, seed: int) -> PreTrainedModel:
    """Build the run's model with its initial weights: fp32, on the CPU. Leaves the global random state unchanged.

    Raises ManifestError if transformers builds a model of another size than ``parameter_count`` says.
    """
    architecture, config = _class_and_config(description)
    use_fused_attention()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module: PreTrainedModel = architecture(config)
    count = module.num_parameters()
    if count != (counted := parameter_count(description)):
        raise ManifestError(
            f"This transformers builds {count:,} parameters, but the run's model has {counted:,}.",
            "Install the version of transformers that this p2ptrain asks for.",
        )
    module.train()
    return module


def shape_module(description: Decoder) -> PreTrainedModel:
    """Build the run's model without memory for its weights, on torch's device ``meta``, for names and shapes."""
    architecture, config = _class_and_config(description)
    with torch.device("meta"):
        module: PreTrainedModel = architecture(config)
    return module


def _class_and_config(description: Decoder) -> tuple[Any, Any]:
    with large_imports():
        import transformers

        architecture = getattr(transformers, description.architecture)  # transformers imports lazily
    config = architecture.config_class(
        **description.config_arguments(),
        use_cache=False,
        bos_token_id=None,  # the defaults are ids of other tokenizers
        eos_token_id=None,
        pad_token_id=None,  # the embedding of a padding token starts at zero and does not learn
        dtype="float32",
        attn_implementation="sdpa",
    )
    return architecture, config


def recompute_activations(module: PreTrainedModel, recomputes: bool) -> None:
    """Let each layer keep its input alone and compute the rest again in the backward pass, or end that.

    Takes a fraction of the memory for about a third more products (arXiv 1604.06174); the gradient is bitwise the same.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = recomputes  # read in training mode only
            layer._gradient_checkpointing_func = _recomputing  # type: ignore[assignment]  # not declared


def _recomputing(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute a layer. No dropout, so no random state is kept."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def summed_loss(
    module: PreTrainedModel,
    batch: Tensor,  # [B, T+1] or [B, 3, T] int64, any device; see ``sequence_parts``
    autocast: torch.dtype | None,  # compute type of matrix products; None: the weights' own
    gradient_scale: float = 1.0,  # what the backward pass multiplies gradients by; see ``summed_cross_entropy``
) -> Tensor:
    """Return the cross entropy in nats, summed over the predicted tokens: a scalar with a graph."""
    device = module.device
    parts = parts_of(batch.to(device))
    with autocast_to(device, autocast):
        hidden = module.base_model(
            input_ids=parts.inputs, use_cache=False, **parts.arguments
        ).last_hidden_state  # [B, T, D]
    output = module.get_output_embeddings().weight  # [V, D]; no allowed architecture has a bias there
    states, targets = predicted(hidden, parts.labels, parts.positions is not None)
    return summed_cross_entropy(states, output, targets, autocast, gradient_scale)


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
