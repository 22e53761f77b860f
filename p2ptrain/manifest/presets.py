"""Presets for new runs: ``demo`` (minutes on a laptop), ``llama-15m`` (hours), ``llama-135m`` (GPUs).

The first two read the shipped Shakespeare as bytes and need no internet; for the third one ``init`` reads
``PRESET_TEXTS``. Guess: for each number without a
source in a comment, sweep it in short runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import PROTOCOL_VERSION
from p2ptrain.manifest.faults import shown, validated
from p2ptrain.manifest.schema import Manifest

_INNER = {
    # 8 % below AdamW at equal tokens, both tuned (docs/results/R1.md: eight peers, H = 10, three seeds).
    "optimizer": "muon",
    "muon_momentum": 0.95,  # Muon's authors (kellerjordan.github.io/posts/muon).
    "beta1": 0.9,
    "beta2": 0.95,  # GPT-3 (arXiv 2005.14165, appendix B) and most language models since.
    "epsilon": 1e-8,  # Adam (arXiv 1412.6980).
    "weight_decay": 0.1,  # GPT-3.
    "gradient_clip": 1.0,  # GPT-3.
}
# Best of nine pairs for eight peers; two prefer a rate of .5 to .7, 32 the other way (docs/results/tuning.md).
_SWARM = {
    "recipe": "swarm",
    "learning_rate": 0.5,
    "momentum": 0.6,
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    # With equal weights a peer 4 or 20 times as fast as seven others is later than alone (our measurement).
    "weights": "work",
    "exchanges_per_step": 2,
}
# The recipe mixes no pseudo-gradients, so their codec and its rank are not read.
_MODULAR4 = {"name": "modular4", "block_size": 1024, "gradients": "int8", "rank": 16}
_LLAMA = {"hidden_act": "silu", "initializer_range": 0.02, "norm_epsilon": 1e-5, "rope_theta": 10_000.0}
_SHAKESPEARE = {"kind": "builtin", "name": "shakespeare", "validation_fraction": 0.05}

_DEMO: dict[str, Any] = {
    "run": {"name": "demo", "seed": 1, "tokens": 2_400_000},  # 156 outer steps for each of three peers.
    "model": {
        "architecture": "LlamaForCausalLM",
        "config": {
            **_LLAMA,
            "vocab_size": 256,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "tokenizer": {"kind": "bytes"},
    "corpus": _SHAKESPEARE,
    "training": {
        **_INNER,
        "sequence_length": 128,
        "sequences_per_step": 2,  # Better than 4 at equal tokens, for a swarm and for one peer (our measurement).
        "learning_rate": 5e-3,  # Best of 5e-3, 1e-2 and 2e-2 for three peers (our measurement).
        "warmup_tokens": 120_000,
        "schedule": "cosine",
        "final_learning_rate_fraction": 0.05,
    },
    "outer": {
        **_SWARM,
        "inner_steps": 20,  # Half the traffic of 10; better if an exchange takes several steps (our measurement).
        "fragments": 1,
        "fragments_per_exchange": 1,
    },
    "codec": _MODULAR4,
    # With int8, two peers that agree still measure 1.2 % (our measurement); smaller values are never reached.
    "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 20.0},
}

# 15.5M parameters, the size of llama2.c's stories15M, with an embedding of 256 bytes instead of 32,000 pieces.
_LLAMA_15M: dict[str, Any] = {
    "run": {"name": "llama-15m", "seed": 1, "tokens": 50_000_000},  # 101 outer steps for each of four peers.
    "model": {
        "architecture": "LlamaForCausalLM",
        "config": {
            **_LLAMA,
            "vocab_size": 256,
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
    },
    "tokenizer": {"kind": "bytes"},
    "corpus": _SHAKESPEARE,
    "training": {
        **_INNER,
        "sequence_length": 256,  # stories15M.
        "sequences_per_step": 16,
        "learning_rate": 1e-3,
        "warmup_tokens": 1_000_000,
        "schedule": "cosine",
        "final_learning_rate_fraction": 0.1,
    },
    "outer": {
        **_SWARM,
        "inner_steps": 30,
        "fragments": 4,
        "fragments_per_exchange": 4,
    },
    "codec": _MODULAR4,
    "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 120.0},
}

# Shape, tokenizer and peak learning rate of SmolLM-135M (huggingface.co/HuggingFaceTB/SmolLM-135M).
_LLAMA_135M: dict[str, Any] = {
    # 20 tokens per parameter (manifest/fitting.py), 103 outer steps for each of eight peers.
    "run": {"name": "llama-135m", "seed": 1, "tokens": 2_700_000_000},
    "model": {
        "architecture": "LlamaForCausalLM",
        "config": {
            **_LLAMA,
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    },
    # init replaces both by the texts of PRESET_TEXTS.
    "tokenizer": {"kind": "bytes"},
    "corpus": _SHAKESPEARE,
    "training": {
        **_INNER,
        "sequence_length": 2048,
        "sequences_per_step": 32,
        "learning_rate": 3e-3,
        "warmup_tokens": 54_000_000,
        "schedule": "cosine",
        "final_learning_rate_fraction": 0.1,
    },
    "outer": {
        **_SWARM,
        "inner_steps": 50,
        "fragments": 16,
        # Half the parameters, which 20 Mbit/s carry in 50 s of steps (formulas of bench/cost.py).
        "fragments_per_exchange": 8,
    },
    "codec": _MODULAR4,
    "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.02, "final_gossip_s": 1800.0},
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"demo": _DEMO, "llama-15m": _LLAMA_15M, "llama-135m": _LLAMA_135M}
)
"""Manifests without protocol version and author's key."""


class PresetText(NamedTuple):
    """What ``init`` reads for a preset, if the author names nothing else."""

    corpus: str
    tokenizer: str


PRESET_TEXTS: Mapping[str | None, PresetText] = MappingProxyType(
    {
        "llama-135m": PresetText(
            "hf:HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9:sample-10BT",
            "hf:HuggingFaceTB/SmolLM-135M@1d461723eec654e65efdc40cf49301c89c0c92f4",
        )
    }
)
"""Texts and tokenizers of the presets whose text is not the shipped one."""


def preset(name: str, public_key: str = "00" * 32) -> Manifest:
    """Return a preset's manifest for the author with this key (64 hexadecimal digits), or for nobody.

    Raises ManifestError.
    """
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"Did you mean {nearest[0]}? " if nearest else ""
        raise ManifestError(f"There is no preset {shown(name)}.", f"{hint}Choose one of {', '.join(PRESETS)}.")
    data = PRESETS[name]
    return validated({**data, "run": {**data["run"], "protocol": PROTOCOL_VERSION, "public_key": public_key}})
