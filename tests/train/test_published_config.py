"""Model sections of published models' config.json: each family there and back, and what is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from p2ptrain.base.errors import ManifestError
from p2ptrain.manifest import Decoder, parameter_count
from p2ptrain.manifest.decoder import MAX_POSITIONS
from p2ptrain.manifest.model import Model
from p2ptrain.train.published_config import model_section

GATED = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA = GATED | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA_3 | {"factor": 32.0, "rope_type": "llama3"},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "HuggingFaceTB/SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "vocab_size": 49152,
    },
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "google/gemma-3-270m": {
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0.dev0",
        "use_bidirectional_attention": False,
        "use_cache": True,
        "vocab_size": 262144,
    },
    "HuggingFaceTB/SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "allenai/OLMo-2-0425-1B": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "openai-community/gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "EleutherAI/pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "mistralai/Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "Qwen/Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
"""Files as transformers 4 wrote them for these models."""
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "google/gemma-3-270m": 268_098_176,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "openai-community/gpt2": 124_439_808,
    "EleutherAI/pythia-160m": 162_322_944,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
}
"""Sizes of the same models: what the hub reports of their weights."""


GEMMA = PUBLISHED["google/gemma-3-270m"]
SMOLLM = PUBLISHED["HuggingFaceTB/SmolLM3-3B"]


def parsed(config: dict[str, Any]) -> Decoder:
    """Return the section of a file that was written and read."""
    return model_section(json.loads(json.dumps(config)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size(name: str) -> None:
    assert parameter_count(parsed(PUBLISHED[name])) == PARAMETERS[name]


def test_fields_of_published_models_are_read() -> None:
    llama = parsed(PUBLISHED["meta-llama/Llama-3.2-1B"]).config.model_dump()
    assert llama["rope_scaling"] == LLAMA_3 | {"factor": 32.0}
    assert "head_dim" not in llama  # the usual one
    gemma = parsed(GEMMA).config.model_dump()
    assert (gemma["sliding_window"], gemma["sliding_window_pattern"]) == (512, 6)
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"], gemma["head_dim"]) == (1e6, 1e4, 256)
    assert gemma["tie_word_embeddings"] is True  # the class's default
    assert parsed(SMOLLM).config.model_dump()["no_rope_layer_interval"] == 4
    assert parsed(PUBLISHED["openai-community/gpt2"]).config.intermediate_size == 4 * 768


# --- there and back ---------------------------------------------------------------------------------------------------


@st.composite
def sections(draw: st.DrawFn, architecture: str) -> Decoder:
    """Draw a section of any sizes."""
    heads, keys = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]))
    layers = draw(st.integers(1, 9))
    theta = st.floats(100, 1e8).map(float)
    config: dict[str, Any] = {
        "vocab_size": draw(st.integers(2, 524_288)),
        "hidden_size": heads * 8 * draw(st.integers(1, 9)),
        "intermediate_size": draw(st.integers(8, 65_536)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": draw(st.integers(8, MAX_POSITIONS)),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])),
        "initializer_range": draw(st.floats(1e-4, 1.0)),
        "norm_epsilon": draw(st.floats(1e-9, 0.01)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if architecture != "GPT2LMHeadModel":
        config["rope_theta"] = draw(theta)
    if architecture not in ("GPT2LMHeadModel", "GPTNeoXForCausalLM"):
        config["num_key_value_heads"] = keys
    if architecture in ("GPTNeoXForCausalLM",):
        config["hidden_size"] *= 2
    unusual = 2 * draw(st.integers(100, 512))
    if architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM") or (
        architecture in ("LlamaForCausalLM", "MistralForCausalLM") and draw(st.booleans())
    ):
        config["head_dim"] = unusual
    if architecture == "LlamaForCausalLM" and draw(st.booleans()):
        config["rope_scaling"] = LLAMA_3 | {"factor": draw(st.floats(1, 1_024))}
    if architecture == "Gemma3ForCausalLM":
        config |= {
            "query_pre_attn_scalar": draw(st.integers(1, 65_536)),
            "sliding_window": draw(st.integers(2, 131_072)),
            "sliding_window_pattern": draw(st.integers(1, 12)),
            "rope_local_base_freq": draw(theta),
        }
    if architecture == "SmolLM3ForCausalLM":
        config["no_rope_layer_interval"] = draw(st.integers(1, 12))
    model: Decoder = TypeAdapter(Model).validate_python({"architecture": architecture, "config": config})
    assert model.shape_faults() == []
    return model


@pytest.mark.parametrize("architecture", sorted({config["architectures"][0] for config in PUBLISHED.values()}))
@settings(max_examples=20)
@given(data=st.data())
def test_what_transformers_writes_gives_the_section_back(architecture: str, data: st.DataObject) -> None:
    section = data.draw(sections(architecture))
    kind = getattr(transformers, architecture).config_class
    config = kind(**section.config_arguments(), architectures=[architecture], dtype="bfloat16")
    for written in (config.to_dict(), config.to_diff_dict()):
        assert model_section(json.loads(json.dumps(written, default=str))) == section


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_a_file_that_transformers_reads_and_writes_gives_the_same_section(config: dict[str, Any]) -> None:
    """Check both spellings: transformers 5 writes what it read from transformers 4."""
    kind = getattr(transformers, config["architectures"][0]).config_class
    rewritten = json.loads(kind.from_dict(config).to_json_string())
    assert rewritten.keys() != config.keys()
    assert model_section(rewritten) == parsed(config)


# --- what a run cannot express ----------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "model_type None and architecture None"),
        (LLAMA | {"model_type": "mamba"}, "model_type 'mamba'"),
        (LLAMA | {"model_type": ["llama"]}, "model_type"),
        (LLAMA | {"architectures": ["LlamaModel"]}, "architecture 'LlamaModel'"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "model_type 'gemma3'"),
        (LLAMA | {"attention_bias": True}, "attention_bias is True, and a run has only False"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA | {"rope_scaling": YARN}, "rope_parameters is .*yarn"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters is "),
        (LLAMA | {"rope_parameters": YARN | {"rope_theta": 1e4}}, "rope_parameters is .*yarn"),
        (LLAMA | {"rope_scaling": "yarn"}, "rope_parameters.* with value 'yarn'"),
        (LLAMA | {"rope_scaling": {"factor": 2.0}}, "rope_parameters is {'factor': 2.0"),
        (LLAMA | {"rope_scaling": LLAMA_3 | {"rope_type": "llama3", "beta": 2}}, "rope_scaling.beta: unknown field"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        (
            LLAMA | {"rope_scaling": LLAMA_3 | {"rope_type": "llama3", "high_freq_factor": 1.0}},
            "1.0 is not greater than low_freq_factor, 1.0",
        ),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor': 0.5"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "does not know, .*: 'quantization_config'"),
        (LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "'auto_map'"),
        (LLAMA | {f"x{number}": 1 for number in range(9)}, "'x4' and 4 more"),
        (LLAMA | {"hidden_act": "swiglu"}, "hidden_act"),
        (LLAMA | {"vocab_size": None}, "vocab_size"),
        (LLAMA | {"num_hidden_layers": 10**9}, "a run has 1 to 256 layers"),
        (LLAMA | {"vocab_size": True}, "vocab_size"),
        (LLAMA | {"vocab_size": 10**9}, "vocab_size: input should be at least 2 and at most 524288"),
        (LLAMA | {"num_attention_heads": 0}, "ZeroDivisionError"),
        (LLAMA | {"num_key_value_heads": 3}, "3 does not divide num_attention_heads"),
        (LLAMA | {"head_dim": "64"}, "head_dim"),
        (LLAMA | {"head_dim": 7}, "even rotary dim"),
        (LLAMA | {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA | {"rope_theta": [1e4]}, "rope_theta"),
        (PUBLISHED["Qwen/Qwen2.5-0.5B"] | {"head_dim": 128}, "'head_dim'"),
        (PUBLISHED["Qwen/Qwen2.5-0.5B"] | {"layer_types": ["sliding_attention"] * 24}, "layer_types is"),
        (PUBLISHED["Qwen/Qwen3-0.6B"] | {"layer_types": ["linear_attention"] * 28}, "layer_types is"),
        (PUBLISHED["Qwen/Qwen3-0.6B"] | {"rope_scaling": LLAMA_3 | {"rope_type": "llama3"}}, "rope_parameters is "),
        (PUBLISHED["openai-community/gpt2"] | {"scale_attn_weights": None}, "scale_attn_weights"),
        (PUBLISHED["openai-community/gpt2"] | {"n_positions": 200_000}, "\nn_positions: input should"),
        (PUBLISHED["openai-community/gpt2"] | {"n_embd": 770}, "\nn_embd: 770 is not a multiple of n_head, 12"),
        (PUBLISHED["EleutherAI/pythia-160m"] | {"rotary_pct": 1.0}, "partial_ro"),
        (PUBLISHED["EleutherAI/pythia-160m"] | {"use_parallel_residual": False}, "use_parallel_residual is False"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA | {"use_bidirectional_attention": True}, "sliding_window is 512"),
        (GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters is "),
        (GEMMA | {"sliding_window": None}, "sliding_window"),
        (GEMMA | {"layer_types": ["full_attention", *["sliding_attention"] * 17]}, "layer_types is"),
        (GEMMA | {"layer_types": ["full_attention"]}, "layer_type"),
        (SMOLLM | {"no_rope_layers": [0, 1, 1, 1] * 9}, "no_rope_layers is"),
        (SMOLLM | {"no_rope_layers": [1]}, "no_rope_layers is"),
        (SMOLLM | {"no_rope_layers": {"a": 1}}, "no_rope_layers"),
    ],
)
def test_what_a_run_cannot_compute_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ManifestError, match=why):
        model_section(config)


@pytest.mark.parametrize("value", [None, False, 0, "x", [], {}, [[]], -1, 10**30, 0.5, float("inf")])
@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "google/gemma-3-270m", "HuggingFaceTB/SmolLM3-3B"])
def test_no_value_of_any_field_raises_anything_else(name: str, value: object) -> None:
    for field in (*PUBLISHED[name], "rope_parameters", "layer_types", "use_sliding_window", "head_dim"):
        with contextlib.suppress(ManifestError):
            model_section(PUBLISHED[name] | {field: value})


def test_a_longer_sequence_than_a_manifest_allows_is_cut() -> None:
    assert parsed(LLAMA | {"max_position_embeddings": 1_048_576}).config.max_position_embeddings == MAX_POSITIONS


@pytest.mark.parametrize(
    ("name", "changes", "longest"),
    [
        ("mistralai/Mistral-7B-v0.1", {}, 4_096),
        ("mistralai/Mistral-7B-v0.1", {"sliding_window": None}, 32_768),
        ("Qwen/Qwen2.5-0.5B", {}, 32_768),
        ("Qwen/Qwen2.5-0.5B", {"use_sliding_window": True, "sliding_window": 1_000}, 1_000),
        ("Qwen/Qwen3-0.6B", {"use_sliding_window": True}, 40_960),
        ("HuggingFaceTB/SmolLM3-3B", {"use_sliding_window": True, "sliding_window": 2_048}, 2_048),
    ],
)
def test_a_window_bounds_the_sequence_instead(name: str, changes: dict[str, Any], longest: int) -> None:
    assert parsed(PUBLISHED[name] | changes).config.max_position_embeddings == longest


def test_the_pattern_of_few_layers_is_what_the_file_states() -> None:
    few = GEMMA | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    assert parsed(few).config.model_dump()["sliding_window_pattern"] == 6
    del few["_sliding_window_pattern"]
    assert parsed(few | {"sliding_window_pattern": 4}).config.model_dump()["sliding_window_pattern"] == 4
    full = few | {"layer_types": ["full_attention"] * 2}
    assert parsed(full).config.model_dump()["sliding_window_pattern"] == 1
