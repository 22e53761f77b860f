"""Ways to compute the same step: whichever a machine takes, a run of 200 steps ends at the same loss."""

import pytest
import torch

from p2ptrain.train import cross_entropy
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.compiled_pass import use
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import FlatModel, recompute_activations

STEPS = 200


def ended(tiny, task, steps=STEPS) -> float:
    """Return the held-out loss after these steps of the run."""
    tokens = tiny.manifest.training.tokens_per_step
    for step in range(steps):
        task.inner_step(float(step * tokens))
    return validation_loss(task.model.module, tiny.corpus, 10_000, None).value


def in_double(model: FlatModel) -> FlatModel:
    theta = model.theta.double()
    for (_, view), parameter in zip(model.layout.views(theta).items(), model.module.parameters(), strict=True):
        parameter.data = view
    for buffer in model.module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.double()
    return FlatModel(model.module, theta, model.layout)


def task_of(tiny, micro_batch=4, seed=0, double=False) -> LanguageModelTask:
    model = in_double(tiny.model()) if double else tiny.model()
    reader, placement = CorpusReader(seed, "alice"), Placement(None, micro_batch)
    manifest = tiny.manifest
    return LanguageModelTask(model, tiny.corpus, manifest.training, manifest.run.tokens, reader, placement)


@pytest.fixture(scope="module")
def tiny(tiny_run):
    return tiny_run(run__tokens=STEPS * 64)


@pytest.fixture(scope="module")
def spread(tiny) -> tuple[float, float]:
    """Return the loss of the usual way, and how far three orders of the same text end apart."""
    losses = [ended(tiny, task_of(tiny, seed=seed)) for seed in range(3)]
    return losses[0], max(losses) - min(losses)


@pytest.mark.lab
@pytest.mark.parametrize("way", ["micro-batches", "chunks", "recomputed"])
def test_each_eager_way_ends_at_the_same_loss(tiny, spread, monkeypatch, way):
    loss, apart = spread
    if way == "chunks":
        monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 7 * tiny.manifest.model.config.vocab_size)
    task = task_of(tiny, micro_batch=1 if way == "micro-batches" else 4)
    recompute_activations(task.model.module, way == "recomputed")
    found = ended(tiny, task)
    assert abs(found - loss) < 0.05 * apart


def test_in_double_precision_they_agree_to_nine_digits(tiny, monkeypatch):
    """Compare all parameters: rounding alone separates the ways. AdamW multiplies it by up to 10^6 in 200 steps."""
    once, apart = task_of(tiny, double=True), task_of(tiny, micro_batch=1, double=True)
    ended(tiny, once, steps=20)
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 7 * tiny.manifest.model.config.vocab_size)
    ended(tiny, apart, steps=20)
    assert once.theta.dtype == torch.float64
    assert float((once.theta - apart.theta).norm() / once.theta.norm()) < 1e-9


@pytest.mark.lab
def test_the_compiled_way_ends_at_the_same_loss(tiny, spread, tmp_path, monkeypatch):
    loss, apart = spread
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    use(tmp_path)
    task = task_of(tiny)
    task.offer(task.pass_shape(tiny.manifest.model), False, pytest.fail)
    assert abs(ended(tiny, task) - loss) < 0.05 * apart
