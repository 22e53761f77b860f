"""Estimate of the memory that activations take, from a model's shapes alone.

Counts values that the modules of transformers and ``cross_entropy`` hold at once, in fp32; scores of attention are not
among them, because the fused kernel keeps none. A test compares the estimate with what torch's allocator gave out.

Letters: T tokens at once, D width, I width inside the feed-forward blocks,
V vocabulary, L layers.
"""

from __future__ import annotations

from p2ptrain.manifest import Decoder
from p2ptrain.manifest.decoder import GatedDecoder
from p2ptrain.manifest.model import Gemma3, GPTNeoX, OLMo2, Qwen3
from p2ptrain.train.cross_entropy import CHUNK_LOGITS

_ACTIVATION_VALUES = {"gelu_new": 3, "relu": -1}
"""Values of width I that a nonlinearity keeps beyond its input: gelu_new is made of many operations, and relu keeps its
result alone."""


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
