"""One rank of a test's trainer: ``python -m torch.distributed.run … staged_rank.py FOLDER CASES``, cases as JSON.

It trains each case with all ranks that torch's launcher started, and writes ``CASE-RANK.safetensors`` into the folder.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from packed import packed_corpus
from safetensors.torch import save_file
from small_corpus import text_corpus
from torch.distributed import distributed_c10d

from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.tokens.corpus import ShardCorpus, TokenSource
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import flat_model
from p2ptrain.train.rank_corpus import RankCorpus
from p2ptrain.train.ranks import Mesh, Ranks, shares
from p2ptrain.train.staged import StagedTask
from p2ptrain.train.stages import StageRange, stage_model

CPU = torch.device("cpu")
BLOCKS, SEQUENCES, MICRO_BATCH, TOKENS = 4, 8, 2, 16
HELD_OUT = 256
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.02,
    "norm_epsilon": 1e-5,
}
GROUPED = {"hidden_act": "silu", "rope_theta": 10_000.0, "num_key_value_heads": 1}
FIELDS = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 32},
    "Gemma3ForCausalLM": {
        **GROUPED,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 10,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 1_000.0,
    },
    "Olmo2ForCausalLM": GROUPED,
    "SmolLM3ForCausalLM": {**GROUPED, "no_rope_layer_interval": 3},
    "GPT2LMHeadModel": {"hidden_act": "gelu_new"},
    "GPTNeoXForCausalLM": {"hidden_act": "gelu", "rope_theta": 10_000.0},
}


def equal_cut(blocks: int, stages: int) -> tuple[StageRange, ...]:
    """Cut into stages of equally many blocks; the first ones have one less if they do not divide."""
    cuts = [blocks * index // stages for index in range(stages + 1)]
    return tuple(StageRange(index, stages, range(*run)) for index, run in enumerate(pairwise(cuts)))


@dataclass(frozen=True)
class Case:
    """What is trained."""

    architecture: str = "LlamaForCausalLM"
    ranks: int = 2
    replicas: int = 1
    optimizer: str = "adamw"
    tied: bool = False
    clip: float = 1.0
    compute: str = "float32"
    packed: bool = False  # whether it trains on dialogues

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.compute == "float32" else getattr(torch, self.compute)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.ranks // self.replicas, self.replicas)

    @property
    def manifest(self) -> Manifest:
        config = {**SHAPE, **FIELDS[self.architecture], "tie_word_embeddings": self.tied}
        changes = {
            "model": {"architecture": self.architecture, "config": config},
            "training.sequence_length": TOKENS,
            "training.sequences_per_step": SEQUENCES,
            "training.warmup_tokens": 128,
            "training.optimizer": self.optimizer,
            "training.gradient_clip": self.clip,
            "training.learning_rate": 3e-3,
            "run.tokens": 6400,
        }
        return with_changes(preset("demo", "ab" * 32), changes)


def corpus(manifest: Manifest, packed: bool = False) -> ShardCorpus:
    length = manifest.training.sequence_length
    return packed_corpus(length) if packed else text_corpus(length)


def rest(case: Case, text: TokenSource) -> tuple:
    """Return the arguments that both kinds of tasks take after the model."""
    manifest = case.manifest
    reader = CorpusReader(manifest.run.seed, PeerId("alice"))
    return text, manifest.training, manifest.run.tokens, reader, Placement(case.autocast, MICRO_BATCH)


def whole_task(case: Case) -> LanguageModelTask:
    manifest = case.manifest
    text = corpus(manifest, case.packed)
    return LanguageModelTask(flat_model(manifest.model, manifest.run.seed, CPU), *rest(case, text))


def train(task: LanguageModelTask) -> list[float]:
    """Make three steps, with a reset and a displacement of the weights on the way; return the losses."""
    losses = []
    for step in range(3):
        if step == 2:
            task.reset(2)
            task.theta.mul_(0.99)
        losses.append(task.inner_step(step * SEQUENCES * TOKENS).loss)
    return losses


def results(task: LanguageModelTask) -> dict[str, torch.Tensor]:
    state = task.state_dict()
    return {"theta": task.theta, "first_moment": state["first_moment"], "second_moment": state["second_moment"]}


def run(number: int, case: Case, folder: Path) -> None:
    ranks, manifest, mesh = Ranks(), case.manifest, case.mesh
    ranks.arrange(mesh)
    stage = equal_cut(BLOCKS, mesh.stages)[ranks.stage]
    counts = shares(SEQUENCES // MICRO_BATCH, mesh.stages, [1.0] * mesh.replicas)
    text = RankCorpus(ranks, corpus(manifest, case.packed) if ranks.rank == 0 else None)
    task = StagedTask(stage_model(manifest.model, manifest.run.seed, CPU, stage), ranks, *rest(case, text), counts)
    losses = train(task)
    save_file(results(task), folder / f"{number}-{ranks.rank}.safetensors")
    held_out = task.tried_loss(HELD_OUT, math.inf) if ranks.replica == 0 else None  # others read none
    heard = ranks.gather({"rank": ranks.rank, "losses": losses, "held_out": held_out})
    if ranks.rank == 0:
        (folder / f"{number}.json").write_text(json.dumps(heard))


def forbid_pickles() -> None:
    """Let every collective of objects fail, sent or received."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("an object would be pickled")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        assert hasattr(distributed_c10d, name)
        setattr(distributed_c10d, name, refuse)


def told(cases: list[Case]) -> str:
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    torch.set_num_threads(1)
    forbid_pickles()
    for index, fields in enumerate(json.loads(sys.argv[2])):
        run(index, Case(**fields), Path(sys.argv[1]))
    distributed_c10d.barrier()
    os._exit(0)  # as a trainer's ranks: gloo's threads may abort while another rank closes its connections
