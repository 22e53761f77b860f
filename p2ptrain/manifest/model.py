"""The model section: an allow-list of causal language models whose size is known before they are built.

A manifest is untrusted, so it cannot configure everything that transformers accepts. Each architecture lists its
fields, each field has a limit, and ``parameter_count`` computes the size from the shapes, without torch.
``config_arguments`` returns the keyword arguments of the transformers configuration class. Field names are those of
transformers where the architectures agree. Dropout is zero, because a peer sees a sequence at most once per epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from p2ptrain.manifest.section import Section

MAX_LOGITS = 2**31
"""Sequence length x vocabulary of one sequence, the smallest micro-batch; 8 GiB in fp32.

Guess: survey the volunteers' cards.
"""

Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]

ConfigArguments = dict[str, int | float | bool | str | dict[str, str | float] | None]
"""Keyword arguments of a transformers configuration class."""


class DecoderConfig(Section):
    """Sizes of any decoder-only transformer."""

    vocab_size: int = Field(ge=2, le=262_144)
    """Number of token ids of the model; at least the tokenizer's (256 for bytes)."""

    hidden_size: int = Field(ge=8, le=16_384)
    """Width of the residual stream; a multiple of num_attention_heads."""

    intermediate_size: int = Field(ge=8, le=65_536)
    """Width inside the feed-forward blocks."""

    num_hidden_layers: int = Field(ge=1, le=256)
    """Number of transformer blocks."""

    num_attention_heads: int = Field(ge=1, le=256)
    """Attention heads per block."""

    max_position_embeddings: int = Field(ge=8, le=131_072)
    """Longest sequence the model can read, in tokens; at least training.sequence_length."""

    hidden_act: Activation
    """Nonlinearity of the feed-forward blocks: silu, gelu, gelu_new, gelu_pytorch_tanh or relu."""

    initializer_range: float = Field(gt=0, le=1)
    """Standard deviation of the initial weights."""

    norm_epsilon: float = Field(gt=0, le=0.01)
    """Added to the variance inside the normalization layers."""

    tie_word_embeddings: bool
    """Whether the output layer shares the input embedding's weights."""


class RotaryConfig(DecoderConfig):
    """Sizes of a decoder with rotary positions."""

    rope_theta: float = Field(ge=100, le=1e8)
    """Base wavelength of the rotary position embedding."""


class GroupedConfig(RotaryConfig):
    """Sizes of a rotary decoder with grouped-query attention."""

    num_key_value_heads: int = Field(ge=1, le=256)
    """Key and value heads per block; divides num_attention_heads, and equals it if no heads are shared."""


class Decoder(Section, ABC):
    """Base class of the allow-listed architectures."""

    architecture: str
    """Class name in transformers."""

    config: DecoderConfig
    """Sizes of the model."""

    @property
    def head_size(self) -> int:
        """Width of one attention head, in elements."""
        return self.config.hidden_size // self.config.num_attention_heads

    @abstractmethod
    def block_parameters(self) -> int:
        """Return the number of weights of one transformer block."""

    @abstractmethod
    def norm_parameters(self) -> int:
        """Return the number of weights of one normalization layer."""

    def position_parameters(self) -> int:
        """Return the number of weights that encode positions; rotary positions have none."""
        return 0

    def unit_parameters(self) -> tuple[int, ...]:
        """Return the number of weights of each unit that ``outer.cut = "layers"`` keeps whole.

        Units are the embedding, each block, and the last norm with the head; without a head of its own, the norm
        belongs to the last block. (``outer.FlatLayout.unit_lengths`` is the same of a built model, with padding.)
        """
        embedding = self.config.vocab_size * self.config.hidden_size
        *blocks, last = [self.block_parameters()] * self.config.num_hidden_layers
        norm = self.norm_parameters()
        end = (last + norm,) if self.config.tie_word_embeddings else (last, norm + embedding)
        return embedding + self.position_parameters(), *blocks, *end

    @abstractmethod
    def config_arguments(self) -> ConfigArguments:
        """Return the keyword arguments of the architecture's transformers configuration class."""

    def shape_faults(self) -> list[str]:
        """Return the inconsistencies between sizes, one sentence each."""
        config = self.config
        if config.hidden_size % config.num_attention_heads:
            return [
                f"model.config.hidden_size: {config.hidden_size} is not a multiple of "
                f"num_attention_heads, {config.num_attention_heads}"
            ]
        return []


def _common_arguments(config: DecoderConfig) -> ConfigArguments:
    """Return the arguments whose names all configuration classes share."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _rope(theta: float, rotated_fraction: float = 1.0) -> dict[str, str | float]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated_fraction}


def _rotation_faults(rotated: int, what: str) -> list[str]:
    if rotated < 2 or rotated % 2:
        return [f"model.config.num_attention_heads: {what} is {rotated} wide, and rotary positions need an even width"]
    return []


class GatedDecoder(Decoder):
    """Common base of Llama, Mistral and Qwen2: RMS norms, gated feed-forward, grouped rotary attention."""

    config: GroupedConfig
    """Sizes of the model."""

    def projection_biases(self) -> int:
        """Return the number of bias weights on queries, keys and values together."""
        return 0

    def norm_parameters(self) -> int:
        return self.config.hidden_size

    def block_parameters(self) -> int:
        hidden, key_value = self.config.hidden_size, self.config.num_key_value_heads * self.head_size
        attention = 2 * hidden * hidden + 2 * hidden * key_value + self.projection_biases()
        return attention + 3 * hidden * self.config.intermediate_size + 2 * self.norm_parameters()

    def config_arguments(self) -> ConfigArguments:
        return _common_arguments(self.config) | {
            "intermediate_size": self.config.intermediate_size,
            "num_key_value_heads": self.config.num_key_value_heads,
            "hidden_act": self.config.hidden_act,
            "rms_norm_eps": self.config.norm_epsilon,
            "rope_parameters": _rope(self.config.rope_theta),
            "attention_dropout": 0.0,
        }

    def shape_faults(self) -> list[str]:
        faults = super().shape_faults() or _rotation_faults(self.head_size, "an attention head")
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        if heads % shared:
            faults.append(f"model.config.num_key_value_heads: {shared} does not divide num_attention_heads, {heads}")
        return faults


class Llama(GatedDecoder):
    """Llama (arXiv 2302.13971), with grouped-query attention."""

    architecture: Literal["LlamaForCausalLM"]
    """Class name in transformers."""


class Mistral(GatedDecoder):
    """Mistral (arXiv 2310.06825), without its sliding window."""

    architecture: Literal["MistralForCausalLM"]
    """Class name in transformers."""

    def config_arguments(self) -> ConfigArguments:
        return super().config_arguments() | {"sliding_window": None}


class Qwen2(GatedDecoder):
    """Qwen2 (arXiv 2407.10671): Llama with biases on queries, keys and values."""

    architecture: Literal["Qwen2ForCausalLM"]
    """Class name in transformers."""

    def projection_biases(self) -> int:
        return self.config.hidden_size + 2 * self.config.num_key_value_heads * self.head_size


class PlainDecoder(Decoder):
    """Common base of GPT-2 and GPT-NeoX: layer norms with bias, two-layer feed-forward, biases everywhere."""

    def norm_parameters(self) -> int:
        return 2 * self.config.hidden_size

    def block_parameters(self) -> int:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        attention = 4 * hidden * hidden + 4 * hidden
        return attention + 2 * hidden * inner + inner + hidden + 2 * self.norm_parameters()


class GPT2(PlainDecoder):
    """GPT-2 (Radford et al. 2019): learned positions."""

    architecture: Literal["GPT2LMHeadModel"]
    """Class name in transformers."""

    def position_parameters(self) -> int:
        return self.config.max_position_embeddings * self.config.hidden_size

    def config_arguments(self) -> ConfigArguments:
        return _common_arguments(self.config) | {
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
        return _common_arguments(self.config) | {
            "intermediate_size": self.config.intermediate_size,
            "hidden_act": self.config.hidden_act,
            "layer_norm_eps": self.config.norm_epsilon,
            "rope_parameters": _rope(self.config.rope_theta, rotated_fraction=0.25),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    def shape_faults(self) -> list[str]:
        return super().shape_faults() or _rotation_faults(self.head_size // 4, "a quarter of an attention head")


Model = Annotated[Llama | Mistral | Qwen2 | GPT2 | GPTNeoX, Field(discriminator="architecture")]
"""Any allow-listed architecture; its name determines the fields of ``config``."""


def parameter_count(model: Decoder) -> int:
    """Compute the number of trainable weights from the shapes, tied ones counted once."""
    return sum(model.unit_parameters())
