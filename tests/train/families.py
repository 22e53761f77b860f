"""A tiny model of each allowed architecture."""

from p2ptrain.manifest import preset, with_changes

PLAIN = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.02,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
GROUPED = {**PLAIN, "hidden_act": "silu", "rope_theta": 10_000.0, "num_key_value_heads": 1}
GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 10,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
DESCRIPTIONS = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 16},
    "Gemma3ForCausalLM": {**GROUPED, **GEMMA, "sliding_window": 8, "sliding_window_pattern": 2},
    "Olmo2ForCausalLM": GROUPED,
    "SmolLM3ForCausalLM": {**GROUPED, "no_rope_layer_interval": 2},
    "GPT2LMHeadModel": {**PLAIN, "hidden_act": "gelu_new"},
    "GPTNeoXForCausalLM": {**PLAIN, "hidden_act": "gelu", "rope_theta": 10_000.0, "hidden_size": 32},
}


def description(architecture, **changes):
    config = {**DESCRIPTIONS[architecture], "vocab_size": 256, **changes}
    run = {"model": {"architecture": architecture, "config": config}, "training.sequence_length": 16}
    return with_changes(preset("demo", "ab" * 32), run).model
