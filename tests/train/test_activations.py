"""Memory of a pass: the estimate against counted bytes, and which micro-batches of llama-135m fit which card."""

import pytest

from p2ptrain.manifest import preset, with_changes
from p2ptrain.train.activations import pass_bytes
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
