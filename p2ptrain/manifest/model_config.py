"""The model section of a published model, from its ``config.json``: untrusted JSON of transformers 4 or 5.

A field that this package does not know, and that is neither null nor off, may change what the model computes: it is
rejected, as is every value that the manifest's section cannot express. Ignored are names, token ids, settings of the
generation, number types, and dropout, which this package sets to zero. A field that the file leaves out has the default
of transformers' class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest.config_fields import (
    ConfigFields,
    ConfigReader,
    free_heads,
    gemma_positions,
    inner_width,
    key_heads,
    neox_positions,
    own_heads,
    positions,
    rope_pattern,
    scaled_positions,
    switched_window,
    usual_heads,
    window,
    window_pattern,
)
from p2ptrain.manifest.decoder import Decoder
from p2ptrain.manifest.faults import error_lines, shown
from p2ptrain.manifest.model import Model
from p2ptrain.manifest.section import Section

_RMS = {"norm_epsilon": "rms_norm_eps"}
_GATED: Mapping[str, object] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_NO_BIAS: Mapping[str, object] = {"attention_bias": False, "mlp_bias": False}
_FAMILIES: Mapping[str, ConfigFields] = {
    "llama": ConfigFields("LlamaForCausalLM", _RMS, _GATED, _NO_BIAS, (key_heads, free_heads, scaled_positions)),
    "mistral": ConfigFields(
        "MistralForCausalLM",
        _RMS,
        {**_GATED, "num_key_value_heads": 8, "sliding_window": 4_096},
        _NO_BIAS,
        (key_heads, free_heads, positions, window),
    ),
    "qwen2": ConfigFields(
        "Qwen2ForCausalLM",
        _RMS,
        {**_GATED, "num_key_value_heads": 32, "sliding_window": 4_096},
        {"mlp_bias": False},
        (key_heads, usual_heads, positions, switched_window),
    ),
    "qwen3": ConfigFields(
        "Qwen3ForCausalLM",
        _RMS,
        {**_GATED, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4_096},
        _NO_BIAS,
        (key_heads, own_heads, positions, switched_window),
    ),
    "gemma3_text": ConfigFields(
        "Gemma3ForCausalLM",
        {**_RMS, "hidden_act": "hidden_activation"},
        {
            **_GATED,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4_096,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        {
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        (key_heads, own_heads, gemma_positions, window_pattern),
    ),
    "olmo2": ConfigFields(
        "Olmo2ForCausalLM", _RMS, {**_GATED, "rms_norm_eps": 1e-5}, _NO_BIAS, (key_heads, usual_heads, positions)
    ),
    "smollm3": ConfigFields(
        "SmolLM3ForCausalLM",
        _RMS,
        {**_GATED, "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        _NO_BIAS,
        (key_heads, usual_heads, positions, switched_window, rope_pattern),
    ),
    "gpt2": ConfigFields(
        "GPT2LMHeadModel",
        {
            "norm_epsilon": "layer_norm_epsilon",
            "hidden_act": "activation_function",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        {
            "activation_function": "gelu_new",
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {
            "add_cross_attention": False,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        },
        (inner_width,),
    ),
    "gpt_neox": ConfigFields(
        "GPTNeoXForCausalLM",
        {"norm_epsilon": "layer_norm_eps"},
        {"hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-5, "tie_word_embeddings": False},
        {"use_parallel_residual": True, "attention_bias": True},
        (neox_positions,),
    ),
}
"""Supported families by ``model_type``."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "initializer_range",
    "norm_epsilon",
    "tie_word_embeddings",
)


def model_section(config: Mapping[str, object]) -> Decoder:
    """Return the manifest's section of the model that ``config.json`` describes.

    ``max_position_embeddings`` may become smaller. Rotary positions do not read it, so it is cut to the largest value
    of a manifest. A sliding window in a family whose section has none is left out, and the value cut to the window, up
    to which all positions see each other. For sequences of this length the model computes the same.

    Args:
        config: the decoded file, untrusted.

    Raises ManifestError for another family, and for what the section cannot express.
    """
    family = _family(config)
    reader = ConfigReader(config, family)
    values = {name: reader.size(name) for name in _SIZES}
    for read in family.readers:
        read(reader, values)
    reader.finish()
    sizes = {name: value for name, value in values.items() if value is not None}
    return _checked({"architecture": family.architecture, "config": sizes}, family.names)


def _family(config: Mapping[str, object]) -> ConfigFields:
    kind, classes = config.get("model_type"), config.get("architectures")
    named = classes[0] if isinstance(classes, Sequence) and not isinstance(classes, str) and classes else None
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or named not in (None, family.architecture):
        raise ManifestError(
            f"The model's config.json has model_type {shown(kind)} and architecture {shown(named)}, of which no run "
            "can be made.",
            f"Choose a causal language model with one of these model types: {', '.join(_FAMILIES)}.",
        )
    return family


class _Holder(Section):
    """Root of the locations in error messages."""

    model: Model


def _checked(section: Mapping[str, object], names: Mapping[str, str]) -> Decoder:
    """Return the checked section. Raises ManifestError, which has the ``names`` of the fields in the file."""
    data = {"model": section}
    try:
        model = _Holder.model_validate(data).model
        lines = model.shape_faults()
    except ValidationError as error:
        lines = error_lines(error, _Holder, ("model",), data)
    if lines:
        text = re.sub(r"\b(?:model\.config\.)?(\w+)", lambda word: names.get(word[1], word[1]), "\n".join(lines))
        raise ManifestError(
            "The model's config.json cannot become a run's model section:\n" + text,
            "Choose another model, or correct the file if it is yours.",
        )
    return model
