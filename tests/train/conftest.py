"""A tiny run: a model of 14 thousand weights on a text of four thousand bytes."""

from dataclasses import dataclass

import pytest
import torch
from small_corpus import text_corpus

from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.tokens.corpus import ShardCorpus
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import FlatModel, flat_model

CPU = torch.device("cpu")
TINY = {
    "model.config.hidden_size": 16,
    "model.config.intermediate_size": 32,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2,
    "model.config.max_position_embeddings": 32,
    "training.sequence_length": 16,
    "training.sequences_per_step": 4,
    "training.warmup_tokens": 128,
    "outer.inner_steps": 2,
    "run.tokens": 6400,
}


@dataclass(frozen=True)
class TinyRun:
    manifest: Manifest
    corpus: ShardCorpus

    def model(self) -> FlatModel:
        return flat_model(self.manifest.model, self.manifest.run.seed, CPU)

    def task(
        self,
        peer: str = "alice",
        micro_batch: int = 4,
        autocast: torch.dtype | None = None,
        muon: torch.dtype | None = None,
    ) -> LanguageModelTask:
        return LanguageModelTask(
            self.model(),
            self.corpus,
            self.manifest.training,
            self.manifest.run.tokens,
            CorpusReader(self.manifest.run.seed, PeerId(peer)),
            Placement(autocast, micro_batch, muon=muon),
        )


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run():
    """Return ``tiny_run(**changes)``; dots of a field's path are written as double underscores."""

    def build(**changes: object) -> TinyRun:
        dotted = {path.replace("__", "."): value for path, value in changes.items()}
        fields = {path: value for path, value in TINY.items() if "model" not in dotted or not path.startswith("model.")}
        manifest = with_changes(preset("demo", "ab" * 32), fields | dotted)
        return TinyRun(manifest, text_corpus(manifest.training.sequence_length))

    return build
