"""Memory of a pass: the estimate against counted bytes, and which micro-batches of llama-135m fit which card."""

import pytest
import torch

from p2ptrain.manifest import parameter_count, preset, with_changes
from p2ptrain.train.memory import CARD_MEMORY_FRACTION, pass_bytes
from tests.train.live_memory import counted_bytes
from tests.train.test_model import DESCRIPTIONS

GIB = 1 << 30
SIZES = {  # most of the memory in layers; most in the output layer
    "layers": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 256},
    "words": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 8192},
}


def described(architecture, size, **changes):
    grouped = {"num_key_value_heads": 2} if "num_key_value_heads" in DESCRIPTIONS[architecture] else {}
    config = DESCRIPTIONS[architecture] | SIZES[size] | {"num_attention_heads": 4} | grouped | changes
    model = {"architecture": architecture, "config": {**config, "max_position_embeddings": 128}}
    return with_changes(preset("demo", "ab" * 32), {"model": model}).model


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_the_estimate_is_what_a_pass_takes(architecture, size, recomputes):
    model = described(architecture, size)
    counted = counted_bytes(model, sequences=4, sequence_length=128, recomputes=recomputes)
    assert pass_bytes(model, 128, 4, recomputes) == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_every_nonlinearity_is_counted(architecture, activation):
    model = described(architecture, "layers", hidden_act=activation, tie_word_embeddings=False)
    assert pass_bytes(model, 128, 4) == pytest.approx(counted_bytes(model, 4, 128), rel=0.15)


def test_masks_of_windows_take_memory_where_the_sequence_is_as_long():
    short, long = (described("Gemma3ForCausalLM", "layers", sliding_window=window) for window in (128, 129))
    assert pass_bytes(long, 128, 4) == pytest.approx(counted_bytes(long, 4, 128), rel=0.15)
    masks = 4 * 128 * 128 * 4 * (3 - 1)  # fp32, of the two of three layers that slide
    assert 0 <= masks - (pass_bytes(short, 128, 4) - pass_bytes(long, 128, 4)) < 4 * 128 * 4 * 3
    assert counted_bytes(short, 4, 128) > counted_bytes(long, 4, 128)


LARGE = preset("llama-135m", "ab" * 32)
WEIGHTS = 4 * parameter_count(LARGE.model)
CONTEXT_BYTES = GIB // 2  # of the driver's, a desktop and what torch's allocator wastes


def budget(card_gib):
    """Return what activations may take on such a card, as ``autofit`` counts it."""
    return CARD_MEMORY_FRACTION * (card_gib * GIB - CONTEXT_BYTES - WEIGHTS) - 3 * WEIGHTS


@pytest.mark.parametrize(("card_gib", "sequences"), [(6, 2), (8, 4)])
def test_small_cards_train_the_large_model_with_recomputation(card_gib, sequences):
    """Check even fp32, of which the estimate counts; in 16 bits a pass takes less."""
    assert pass_bytes(LARGE.model, 2048, sequences, recomputes=True) < budget(card_gib)
    assert pass_bytes(LARGE.model, 2048, sequences) > budget(card_gib)


def test_sixteen_sequences_take_less_than_14_gb():
    assert 4 * WEIGHTS + pass_bytes(LARGE.model, 2048, 16, recomputes=True) < 14e9


@pytest.mark.lab
@pytest.mark.parametrize("recomputes", [False, True])
def test_what_the_large_model_takes_on_a_card(recomputes):
    """Count passes in bf16 with 2 and 4 of the 30 layers, with one sequence and two; memory is linear in both."""

    def counted(sequences, layers):
        config = LARGE.model.config.model_copy(update={"num_hidden_layers": layers})
        model = LARGE.model.model_copy(update={"config": config})
        return counted_bytes(model, sequences, 2048, torch.bfloat16, recomputes)

    small = {sequences: [counted(sequences, layers) for layers in (2, 4)] for sequences in (1, 2)}
    one, two = (two_layers + 14 * (four - two_layers) for two_layers, four in small.values())

    def taken(sequences):
        return one + (sequences - 1) * (two - one)

    assert taken(1) < budget(6)  # 2.5 GB, or 0.5 recomputed
    assert (taken(2) < budget(6)) is recomputes
    assert (taken(4) < budget(8)) is recomputes
    assert (4 * WEIGHTS + taken(16) < 14e9) is recomputes  # 32.9 GB, or 5.1
