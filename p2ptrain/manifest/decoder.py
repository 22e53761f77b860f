"""Base classes of the model section: sizes that architectures share, and the numbers of weights that follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from p2ptrain.manifest.initial_weights import InitialWeights
from p2ptrain.manifest.section import Section

MAX_LOGITS = 2**31
"""Sequence length x vocabulary of one sequence, the smallest micro-batch; 8 GiB in fp32.

Guess: survey the volunteers' cards.
"""

MAX_POSITIONS = 131_072
"""Longest sequence of a model, in tokens."""

Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]

RopeArguments = dict[str, str | float]
"""Parameters of a rotary position embedding in transformers."""

ConfigArguments = dict[str, int | float | bool | str | RopeArguments | dict[str, RopeArguments] | None]
"""Keyword arguments of a transformers configuration class."""


class DecoderConfig(Section):
    """Sizes of any decoder-only transformer."""

    vocab_size: int = Field(ge=2, le=524_288)
    """Number of token ids of the model; at least the tokenizer's (256 for bytes)."""

    hidden_size: int = Field(ge=8, le=16_384)
    """Width of the residual stream; a multiple of num_attention_heads."""

    intermediate_size: int = Field(ge=8, le=65_536)
    """Width inside the feed-forward blocks."""

    num_hidden_layers: int = Field(ge=1, le=256)
    """Number of transformer blocks."""

    num_attention_heads: int = Field(ge=1, le=256)
    """Attention heads per block."""

    max_position_embeddings: int = Field(ge=8, le=MAX_POSITIONS)
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


class FreeHeadConfig(GroupedConfig):
    """Sizes of a grouped rotary decoder whose heads together may be wider or narrower than the residual stream."""

    head_dim: int | None = Field(default=None, ge=2, le=1_024)
    """Width of an attention head. (Absent: hidden_size / num_attention_heads.)"""

    @model_serializer(mode="wrap")
    def _absent_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out absent fields, so that the RunId of a run without them does not depend on them."""
        data: dict[str, Any] = serialize(self)
        return {name: value for name, value in data.items() if value is not None}


class OwnHeadConfig(FreeHeadConfig):
    """Sizes of a grouped rotary decoder that states the width of its heads."""

    head_dim: int = Field(ge=2, le=1_024)
    """Width of an attention head."""


class Decoder(Section, ABC):
    """Base class of the allow-listed architectures."""

    architecture: str
    """Class name in transformers."""

    config: DecoderConfig
    """Sizes of the model."""

    init: InitialWeights | None = None
    """Published weights from which the run begins; without it, random ones by run.seed."""

    @model_serializer(mode="wrap")
    def _random_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out random initial weights, so that the RunId of such a run does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("init") is None:
            data.pop("init", None)
        return data

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


def common_arguments(config: DecoderConfig) -> ConfigArguments:
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


def rope_arguments(theta: float, rotated_fraction: float = 1.0) -> RopeArguments:
    """Return transformers' parameters of unscaled rotary positions."""
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated_fraction}


def rotation_faults(rotated: int, what: str) -> list[str]:
    """Return a sentence if a rotated part of this many elements cannot be rotated in pairs."""
    if rotated < 2 or rotated % 2:
        return [f"model.config.num_attention_heads: {what} is {rotated} wide, and rotary positions need an even width"]
    return []


class GatedDecoder(Decoder):
    """Base class of Llama's descendants: RMS norms, gated feed-forward, grouped rotary attention."""

    config: GroupedConfig
    """Sizes of the model."""

    norms_per_block: ClassVar[int] = 2
    """Norms of a block over the residual stream's width."""

    @property
    def query_width(self) -> int:
        """Width of all query heads together, in elements."""
        return self.config.num_attention_heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together, in elements; value heads have the same."""
        return self.config.num_key_value_heads * self.head_size

    def attention_vectors(self) -> int:
        """Return the number of weights of biases and norms inside the attention of one block."""
        return 0

    def norm_parameters(self) -> int:
        return self.config.hidden_size

    def block_parameters(self) -> int:
        hidden = self.config.hidden_size
        attention = 2 * hidden * (self.query_width + self.key_width) + self.attention_vectors()
        return attention + 3 * hidden * self.config.intermediate_size + self.norms_per_block * self.norm_parameters()

    def rope(self) -> RopeArguments | dict[str, RopeArguments]:
        """Return the parameters of the rotary positions, by layer type if layers differ."""
        return rope_arguments(self.config.rope_theta)

    def config_arguments(self) -> ConfigArguments:
        return common_arguments(self.config) | {
            "intermediate_size": self.config.intermediate_size,
            "num_key_value_heads": self.config.num_key_value_heads,
            "hidden_act": self.config.hidden_act,
            "rms_norm_eps": self.config.norm_epsilon,
            "rope_parameters": self.rope(),
            "attention_dropout": 0.0,
        }

    def shape_faults(self) -> list[str]:
        faults = super().shape_faults() or rotation_faults(self.head_size, "an attention head")
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        if heads % shared:
            faults.append(f"model.config.num_key_value_heads: {shared} does not divide num_attention_heads, {heads}")
        return faults


class FreeHeadDecoder(GatedDecoder):
    """Base class of gated decoders whose manifest may state the width of a head."""

    config: FreeHeadConfig
    """Sizes of the model."""

    @property
    def head_size(self) -> int:
        return self.config.head_dim or super().head_size

    def config_arguments(self) -> ConfigArguments:
        return super().config_arguments() | {"head_dim": self.head_size}


class PlainDecoder(Decoder):
    """Base class of GPT-2 and GPT-NeoX: layer norms with bias, two-layer feed-forward, biases everywhere."""

    def norm_parameters(self) -> int:
        return 2 * self.config.hidden_size

    def block_parameters(self) -> int:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        attention = 4 * hidden * hidden + 4 * hidden
        return attention + 2 * hidden * inner + inner + hidden + 2 * self.norm_parameters()
