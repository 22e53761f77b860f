"""An author's key and a valid manifest that does not change with the presets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.ids import PROTOCOL_VERSION
from p2ptrain.manifest import Manifest
from p2ptrain.manifest.faults import validated
from p2ptrain.manifest.signing import public_key_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))

DATA: dict[str, Any] = {
    "run": {
        "name": "a test",
        "protocol": PROTOCOL_VERSION,
        "public_key": public_key_of(KEY),
        "seed": 7,
        "tokens": 100_000,
    },
    "model": {
        "architecture": "LlamaForCausalLM",
        "config": {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "norm_epsilon": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        },
    },
    "tokenizer": {"kind": "bytes"},
    "corpus": {"kind": "builtin", "name": "shakespeare", "validation_fraction": 0.05},
    "training": {
        "sequence_length": 64,
        "sequences_per_step": 4,
        "optimizer": "adamw",
        "learning_rate": 3e-3,
        "warmup_tokens": 1_000,
        "schedule": "cosine",
        "final_learning_rate_fraction": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "muon_momentum": 0.95,
        "weight_decay": 0.1,
        "gradient_clip": 1.0,
    },
    "outer": {
        "recipe": "swarm",
        "inner_steps": 10,
        "learning_rate": 0.7,
        "momentum": 0.9,
        "nesterov": True,
        "topology": "random",
        "partners": 1,
        "weights": "equal",
        "exchanges_per_step": 1,
        "fragments": 4,
        "fragments_per_exchange": 2,
    },
    "codec": {"name": "int8", "block_size": 1024, "gradients": "int8", "rank": 16},
    "swarm": {"catch_up_outer_steps": 20, "final_disagreement": 0.01, "final_gossip_s": 20.0},
}


@pytest.fixture(scope="session")
def key() -> Ed25519PrivateKey:
    return KEY


@pytest.fixture
def data() -> dict[str, Any]:
    """Return the plain data of a valid manifest, for tests to alter."""
    return copy.deepcopy(DATA)


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    return validated(DATA)
