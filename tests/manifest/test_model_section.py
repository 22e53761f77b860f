"""Computed sizes of models equal those of the models that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import (
    PRESETS,
    Decoder,
    Manifest,
    SignedManifest,
    parameter_count,
    parse_toml,
    preset,
    render_toml,
)
from p2ptrain.manifest.document import run_id
from p2ptrain.manifest.faults import validated
from p2ptrain.manifest.signing import sign
from tests.manifest.conftest import KEY

GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 2e4,
}
LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"head_dim": 40},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 24},
    "Gemma3ForCausalLM": GEMMA,
    "Olmo2ForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2},
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def with_model(data: dict[str, Any], architecture: str, **config: Any) -> Manifest:
    """Return the manifest with another architecture; None removes a field that the architecture does not have."""
    merged = {**data["model"]["config"], **config}
    fields = {name: value for name, value in merged.items() if value is not None}
    return validated({**data, "model": {"architecture": architecture, "config": fields}})


def built(model: Decoder) -> Any:
    """Build the model on torch's meta device: shapes without memory."""
    import torch
    import transformers

    architecture = getattr(transformers, model.architecture)
    config = architecture.config_class(
        **model.config_arguments(), bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    with torch.device("meta"):
        return architecture(config)


def weights(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_of_presets(name: str) -> None:
    model = preset(name, "0" * 64).model
    assert parameter_count(model) == weights(built(model))


def test_preset_sizes_are_what_their_names_say() -> None:
    assert 14e6 < parameter_count(preset("llama-15m", "0" * 64).model) < 16e6
    assert parameter_count(preset("llama-135m", "0" * 64).model) == 134_515_008  # as published


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shared_heads", [1, 2, 4])
@pytest.mark.parametrize("architecture", LLAMA_LIKE)
def test_parameter_count_of_gated_decoders(
    data: dict[str, Any], architecture: str, shared_heads: int, tied: bool
) -> None:
    changes = LLAMA_LIKE[architecture] | {"num_key_value_heads": shared_heads, "tie_word_embeddings": tied}
    model = with_model(data, architecture, **changes).model
    assert parameter_count(model) == weights(built(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("removed", [{"rope_theta": None}, {}])
def test_parameter_count_of_plain_decoders(data: dict[str, Any], tied: bool, removed: dict[str, None]) -> None:
    architecture = "GPT2LMHeadModel" if removed else "GPTNeoXForCausalLM"
    model = with_model(data, architecture, num_key_value_heads=None, tie_word_embeddings=tied, **removed).model
    assert parameter_count(model) == weights(built(model))


def test_every_field_reaches_the_built_configuration(data: dict[str, Any]) -> None:
    llama = built(
        with_model(data, "LlamaForCausalLM", rope_theta=5e4, hidden_act="gelu", norm_epsilon=1e-3).model
    ).config
    assert llama.rope_parameters["rope_theta"] == 5e4
    assert (llama.hidden_act, llama.rms_norm_eps, llama.num_key_value_heads) == ("gelu", 1e-3, 2)
    assert (llama.max_position_embeddings, llama.initializer_range) == (128, 0.02)
    neox = built(with_model(data, "GPTNeoXForCausalLM", num_key_value_heads=None, rope_theta=5e4).model).config
    assert neox.rope_parameters["rope_theta"] == 5e4
    assert neox.rope_parameters["partial_rotary_factor"] == 0.25
    plain = {"num_key_value_heads": None, "rope_theta": None}
    gpt2 = built(with_model(data, "GPT2LMHeadModel", hidden_act="gelu_new", norm_epsilon=1e-3, **plain).model).config
    assert (gpt2.n_embd, gpt2.n_inner, gpt2.n_positions, gpt2.n_layer) == (64, 192, 128, 2)
    assert (gpt2.activation_function, gpt2.layer_norm_epsilon) == ("gelu_new", 1e-3)
    assert gpt2.resid_pdrop == gpt2.embd_pdrop == gpt2.attn_pdrop == 0
    mistral = built(with_model(data, "MistralForCausalLM").model).config
    assert mistral.sliding_window is None
    scaled = built(with_model(data, "LlamaForCausalLM", head_dim=24, rope_scaling=SCALING).model).config
    assert scaled.rope_parameters.items() >= {"rope_type": "llama3", "rope_theta": 1e4, **SCALING}.items()
    assert scaled.head_dim == 24
    gemma = built(with_model(data, "Gemma3ForCausalLM", num_hidden_layers=4, hidden_act="relu", **GEMMA).model).config
    assert gemma.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (gemma.sliding_window, gemma.query_pre_attn_scalar, gemma.head_dim) == (16, 20, 24)
    assert gemma.hidden_activation == "relu"
    assert gemma.rope_parameters["sliding_attention"]["rope_theta"] == 2e4
    assert gemma.rope_parameters["full_attention"]["rope_theta"] == 1e4
    smol = built(with_model(data, "SmolLM3ForCausalLM", num_hidden_layers=4, no_rope_layer_interval=3).model).config
    assert smol.no_rope_layers == [1, 1, 0, 1]
    assert smol.layer_types == ["full_attention"] * 4


def test_absent_fields_are_neither_digested_nor_written(data: dict[str, Any]) -> None:
    before = validated(data)
    assert before.model_dump()["model"] == data["model"]
    assert "head_dim" not in render_toml(before)
    after = with_model(data, "LlamaForCausalLM", head_dim=24, rope_scaling=SCALING)
    assert run_id(after) != run_id(before)
    text = render_toml(after)
    assert "\n[model.config.rope_scaling]\n" in text
    assert parse_toml(text) == after
    assert SignedManifest.from_bytes(sign(after, KEY).to_bytes()).manifest == after


def test_scaling_has_an_order(data: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match=r"high_freq_factor: 1\.0 is not greater than low_freq_factor, 1\.0"):
        with_model(data, "LlamaForCausalLM", rope_scaling=SCALING | {"high_freq_factor": 1.0})
    with pytest.raises(ManifestError, match=r"model\.config\.rope_scaling\.factor: missing"):
        with_model(data, "LlamaForCausalLM", rope_scaling={"low_freq_factor": 1.0})


def test_architectures_take_only_their_own_fields(data: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        with_model(data, "GPT2LMHeadModel")
    assert "model.config.rope_theta: unknown field" in caught.value.problem
    assert "model.config.num_key_value_heads: unknown field" in caught.value.problem


def test_an_architecture_off_the_list_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match=r"model\.architecture: 'LamaForCausalLM' is not known; did you mean Llama"):
        with_model(data, "LamaForCausalLM")
    with pytest.raises(ManifestError, match=r"'EvilModel' is not known"):
        with_model(data, "EvilModel")
    del data["model"]["architecture"]
    with pytest.raises(ManifestError, match=r"model\.architecture: missing"):
        validated(data)


@pytest.mark.parametrize(
    "extra", [{"auto_map": {"AutoModel": "evil.py"}}, {"trust_remote_code": True}, {"_name_or_path": "/etc"}]
)
def test_no_door_for_remote_code_or_paths(data: dict[str, Any], extra: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="unknown field"):
        with_model(data, "LlamaForCausalLM", **extra)


def test_rotated_part_of_a_neox_head_must_be_even(data: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="a quarter of an attention head is 1 wide"):
        with_model(data, "GPTNeoXForCausalLM", num_key_value_heads=None, hidden_size=16)
