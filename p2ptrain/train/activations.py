"""Estimate of the memory that activations take, from a model's shapes alone.

Counts values that the modules of transformers and ``cross_entropy`` hold at once, in fp32; scores of attention are not
among them, because the fused kernel keeps none. A test compares the estimate with what torch's allocator gave out.

Letters: T tokens at once, D width, I width inside the feed-forward blocks,
V vocabulary, L layers.
"""

from __future__ import annotations

from p2ptrain.manifest import Decoder
from p2ptrain.manifest.decoder import GatedDecoder
from p2ptrain.manifest.model import GPTNeoX
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
    kept = layer_values(description)
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


def layer_values(description: Decoder) -> int:
    """Return the values per token that a layer keeps for the backward pass."""
    config = description.config
    width, inner = config.hidden_size, config.intermediate_size
    extra = _ACTIVATION_VALUES.get(config.hidden_act, 0) * inner
    if isinstance(description, GatedDecoder):
        # Input, product and result of two norms, q, k, v, attention; gate, its activation, up, product.
        keys = description.config.num_key_value_heads * description.head_size
        return 8 * width + 2 * keys + 4 * inner + extra
    # Input and result of two norms, which GPT-NeoX gives the same input; q, k, v together, attention; two of width I.
    # GPT-NeoX also keeps rotated q and k.
    return (10 if isinstance(description, GPTNeoX) else 8) * width + 2 * inner + extra
