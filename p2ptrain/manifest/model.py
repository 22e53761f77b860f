"""The model section: an allow-list of causal language models whose size is known before they are built.

A manifest is untrusted, so it cannot configure everything that transformers accepts. Each architecture lists its
fields, each field has a limit, and ``parameter_count`` computes the size from the shapes, without torch.
``config_arguments`` returns the keyword arguments of the transformers configuration class. Field names are those of
transformers where the architectures agree. Dropout is zero, because a peer sees a sequence at most once per epoch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from p2ptrain.manifest.decoder import (
    ConfigArguments,
    Decoder,
    FreeHeadConfig,
    FreeHeadDecoder,
    GatedDecoder,
    GroupedConfig,
    OwnHeadConfig,
    PlainDecoder,
    RopeArguments,
    RotaryConfig,
    common_arguments,
    rope_arguments,
    rotation_faults,
)
from p2ptrain.manifest.section import Section


class RopeScaling(Section):
    """Llama 3.1's scaling of rotary positions (arXiv 2407.21783): long wavelengths are stretched, short ones kept."""

    factor: float = Field(ge=1, le=1_024)
    """Stretch of wavelengths above original_max_position_embeddings / low_freq_factor."""

    low_freq_factor: float = Field(gt=0, le=1_024)
    """Periods in the original length below which a wavelength is stretched in full."""

    high_freq_factor: float = Field(gt=0, le=1_024)
    """Periods in the original length above which a wavelength is kept; greater than low_freq_factor."""

    original_max_position_embeddings: int = Field(ge=8, le=1_048_576)
    """Longest sequence of the training before the stretch, in tokens."""


class LlamaConfig(FreeHeadConfig):
    """Sizes of Llama 1 to 3."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary positions. (Absent: none.)"""


class Llama(FreeHeadDecoder):
    """Llama (arXiv 2302.13971), with grouped-query attention."""

    architecture: Literal["LlamaForCausalLM"]
    """Class name in transformers."""

    config: LlamaConfig
    """Sizes of the model."""

    def rope(self) -> RopeArguments:
        unscaled, scaling = rope_arguments(self.config.rope_theta), self.config.rope_scaling
        return unscaled if scaling is None else unscaled | {"rope_type": "llama3", **scaling.model_dump()}

    def shape_faults(self) -> list[str]:
        faults, scaling = super().shape_faults(), self.config.rope_scaling
        if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
            faults.append(
                f"model.config.rope_scaling.high_freq_factor: {scaling.high_freq_factor} is not greater than "
                f"low_freq_factor, {scaling.low_freq_factor}"
            )
        return faults


class Mistral(FreeHeadDecoder):
    """Mistral (arXiv 2310.06825), without its sliding window."""

    architecture: Literal["MistralForCausalLM"]
    """Class name in transformers."""

    def config_arguments(self) -> ConfigArguments:
        return super().config_arguments() | {"sliding_window": None}


class Qwen2(GatedDecoder):
    """Qwen2 (arXiv 2407.10671): Llama with biases on queries, keys and values."""

    architecture: Literal["Qwen2ForCausalLM"]
    """Class name in transformers."""

    def attention_vectors(self) -> int:
        return self.query_width + 2 * self.key_width


class Qwen3(FreeHeadDecoder):
    """Qwen3 (arXiv 2505.09388): Llama with norms on the queries and keys of each head."""

    architecture: Literal["Qwen3ForCausalLM"]
    """Class name in transformers."""

    config: OwnHeadConfig
    """Sizes of the model."""

    def attention_vectors(self) -> int:
        return 2 * self.head_size


class GemmaConfig(OwnHeadConfig):
    """Sizes of Gemma 3."""

    query_pre_attn_scalar: int = Field(ge=1, le=65_536)
    """Attention scores are divided by the square root of this; usually head_dim."""

    sliding_window: int = Field(ge=2, le=131_072)
    """Tokens that a position of a sliding layer attends to, itself included."""

    sliding_window_pattern: int = Field(ge=1, le=1_024)
    """Every layer with a number divisible by this attends to all positions before it, the others to a window."""

    rope_local_base_freq: float = Field(ge=100, le=1e8)
    """Base wavelength of the rotary positions in sliding layers; rope_theta is that of the others."""


class Gemma3(FreeHeadDecoder):
    """Gemma 3 for text (arXiv 2503.19786): most layers attend to a window; norms before and after each branch."""

    architecture: Literal["Gemma3ForCausalLM"]
    """Class name in transformers."""

    config: GemmaConfig
    """Sizes of the model."""

    norms_per_block: ClassVar[int] = 4

    def attention_vectors(self) -> int:
        return 2 * self.head_size

    def rope(self) -> dict[str, RopeArguments]:
        return {
            "sliding_attention": rope_arguments(self.config.rope_local_base_freq),
            "full_attention": rope_arguments(self.config.rope_theta),
        }

    def config_arguments(self) -> ConfigArguments:
        arguments = super().config_arguments()
        arguments["hidden_activation"] = arguments.pop("hidden_act")
        return arguments | {
            "query_pre_attn_scalar": self.config.query_pre_attn_scalar,
            "sliding_window": self.config.sliding_window,
            "sliding_window_pattern": self.config.sliding_window_pattern,
        }


class OLMo2(GatedDecoder):
    """OLMo 2 (arXiv 2501.00656): norms after each branch, and on all queries and all keys together."""

    architecture: Literal["Olmo2ForCausalLM"]
    """Class name in transformers."""

    def attention_vectors(self) -> int:
        return self.query_width + self.key_width


class SmolLMConfig(GroupedConfig):
    """Sizes of SmolLM3."""

    no_rope_layer_interval: int = Field(ge=1, le=1_024)
    """Every layer with a number divisible by this has no rotary positions."""


class SmolLM3(GatedDecoder):
    """SmolLM3 (huggingface.co/blog/smollm3): Llama with some layers that have no rotary positions."""

    architecture: Literal["SmolLM3ForCausalLM"]
    """Class name in transformers."""

    config: SmolLMConfig
    """Sizes of the model."""

    def config_arguments(self) -> ConfigArguments:
        return super().config_arguments() | {"no_rope_layer_interval": self.config.no_rope_layer_interval}


class GPT2(PlainDecoder):
    """GPT-2 (Radford et al. 2019): learned positions."""

    architecture: Literal["GPT2LMHeadModel"]
    """Class name in transformers."""

    def position_parameters(self) -> int:
        return self.config.max_position_embeddings * self.config.hidden_size

    def config_arguments(self) -> ConfigArguments:
        return common_arguments(self.config) | {
            "n_inner": self.config.intermediate_size,
            "activation_function": self.config.hidden_act,
            "layer_norm_epsilon": self.config.norm_epsilon,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }


class GPTNeoX(PlainDecoder):
    """GPT-NeoX (arXiv 2204.06745): parallel residual branches, a quarter of each head rotated."""

    architecture: Literal["GPTNeoXForCausalLM"]
    """Class name in transformers."""

    config: RotaryConfig
    """Sizes of the model."""

    def config_arguments(self) -> ConfigArguments:
        return common_arguments(self.config) | {
            "intermediate_size": self.config.intermediate_size,
            "hidden_act": self.config.hidden_act,
            "layer_norm_eps": self.config.norm_epsilon,
            "rope_parameters": rope_arguments(self.config.rope_theta, rotated_fraction=0.25),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    def shape_faults(self) -> list[str]:
        return super().shape_faults() or rotation_faults(self.head_size // 4, "a quarter of an attention head")


Model = Annotated[
    Llama | Mistral | Qwen2 | Qwen3 | Gemma3 | OLMo2 | SmolLM3 | GPT2 | GPTNeoX,
    Field(discriminator="architecture"),
]
"""Any allow-listed architecture; its name determines the fields of ``config``."""


def parameter_count(model: Decoder) -> int:
    """Compute the number of trainable weights from the shapes, tied ones counted once."""
    return sum(model.unit_parameters())
