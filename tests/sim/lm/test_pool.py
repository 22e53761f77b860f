"""The pool of simulated language models computes, step by step, what the real peers' task computes."""

import math
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from small_corpus import LINES, corpus_of

from p2ptrain.base.errors import CorpusError
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import preset, with_changes
from p2ptrain.tokens import builtin
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.compiling import compiler_program
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.model import flat_model, summed_loss
from sim.lm import pool as pool_module
from sim.lm.pool import LanguageModelPool
from sim.lm.text import Text, shares

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
TILED = {
    "model__config__hidden_size": 32,
    "model__config__intermediate_size": 64,
    "training__sequence_length": 32,
    "training__sequences_per_step": 2,
}
"""A shape with as many tokens a step that ``sim.lm.native`` computes."""
READERS = tuple(CorpusReader(1, PeerId(name)) for name in ("alice", "bob", "carol"))


def manifest(**changes):
    dotted = {path.replace("__", "."): value for path, value in changes.items()}
    return with_changes(preset("demo", "ab" * 32), TINY | dotted)


def text(blocks=6, length=16):
    words = Text(builtin.regions(np.frombuffer(LINES, dtype=np.uint8), length, 0.1), length)
    assert len(words.regions.held_out) >= blocks
    return words


def pool(run=None, readers=READERS, kind="iid"):
    run = run or manifest()
    words = text(length=run.training.sequence_length)
    return LanguageModelPool(run.model, run.training, run.run.tokens, words, shares(words, readers, kind), run.run.seed)


def real(run, reader):
    model = flat_model(run.model, run.run.seed, torch.device("cpu"))
    length = run.training.sequence_length
    corpus = corpus_of(*text(length=length).regions, length)
    return LanguageModelTask(model, corpus, run.training, run.run.tokens, reader, Placement(None, 64))


def step_all(some_pool, progress):
    some_pool.prepare([(row, progress) for row in range(len(some_pool.tasks))])
    return [task.inner_step(progress).loss for task in some_pool.tasks]


@pytest.mark.parametrize("shape", [{}, TILED], ids=["torch", "native"])
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 4 * 2**-23 * 20), ("muon", 1e-2)])
def test_the_pool_computes_what_the_real_tasks_compute(optimizer, tolerance, shape):
    """Check ten steps, with a displacement and a reset. Tolerances are fractions of the way that weights moved.

    AdamW: fp32 rounds by 2^-23, and the sums on a gradient's way have about 400 terms (tokens, vocabulary, widths),
    whose roundings grow with the root; four times that. Muon multiplies the smallest singular values most. Ways are
    means over weights, not root mean squares: AdamW divides by the root of the second moment, so that where a gradient
    is nearly zero any rounding moves one weight by up to the learning rate.
    """
    run = manifest(training__optimizer=optimizer, **shape)
    simulated, tasks = pool(run), [real(run, reader) for reader in READERS]
    assert (simulated.native is None) == (shape is not TILED or compiler_program(os.environ) is None)
    begin = simulated.theta[0].clone()
    for step in range(10):
        progress = float(64 * step)
        losses = step_all(simulated, progress)
        expected = [task.inner_step(progress).loss for task in tasks]
        assert losses == pytest.approx(expected, rel=1e-6 if optimizer == "adamw" else 1e-4)
        if step == 4:
            for one in (*simulated.tasks, *tasks):
                one.theta.mul_(1.01)
        if step == 6:
            for one in (simulated.tasks[1], tasks[1]):
                one.reset(3)
    for one, other in zip(simulated.tasks, tasks, strict=True):
        assert (one.theta - other.theta).abs().mean() < tolerance * (other.theta - begin).abs().mean()
        mine, theirs = one.state_dict(), other.state_dict()
        assert torch.equal(mine["counters"], theirs["counters"])
        for name in ("first_moment", "second_moment"):
            error = torch.linalg.vector_norm(mine[name] - theirs[name])
            assert error < 2 * tolerance * torch.linalg.vector_norm(theirs[name])


def test_the_state_is_the_real_tasks_state():
    run = manifest()
    simulated, task = pool(run), real(run, READERS[1])
    for step in range(3):
        task.inner_step(64.0 * step)
    simulated.tasks[1].theta.copy_(task.theta)
    simulated.tasks[1].load_state_dict(task.state_dict())
    for step in range(3, 6):
        expected = task.inner_step(64.0 * step).loss
        assert simulated.tasks[1].inner_step(64.0 * step).loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [{}, TILED], ids=["torch", "native"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_how_steps_are_grouped_changes_no_bit(optimizer, shape):
    run = manifest(training__optimizer=optimizer, **shape)
    together, alone = pool(run), pool(run)
    for step in range(4):
        losses = step_all(together, 64.0 * step)
        assert losses == [task.inner_step(64.0 * step).loss for task in reversed(alone.tasks)][::-1]
    assert torch.equal(together.theta, alone.theta)


def test_stacked_rows_agree_with_rows_one_by_one(monkeypatch):
    """Check the batched kernels that CUDA uses, here on the CPU."""
    run = manifest(training__optimizer="adamw")
    alone, stacked = pool(run), pool(run)
    monkeypatch.setattr(LanguageModelPool, "_rows_at_once", 2)
    for step in range(4):
        progress = [64.0 * step, 64.0 * step + 1, 64.0 * step + 2]
        stacked.prepare(list(zip((2, 0, 1), progress, strict=True)))
        losses = [stacked.tasks[row].inner_step(at).loss for row, at in zip((2, 0, 1), progress, strict=True)]
        others = [alone.tasks[row].inner_step(at).loss for row, at in zip((2, 0, 1), progress, strict=True)]
        assert losses == pytest.approx(others, rel=1e-6)
    assert torch.allclose(stacked.theta, alone.theta, atol=1e-5)


def test_peers_move_only_themselves():
    simulated = pool()
    before = simulated.theta.clone()
    simulated.tasks[1].inner_step(0.0)
    moved = [not torch.equal(now, then) for now, then in zip(simulated.theta, before, strict=True)]
    assert moved == [False, True, False]


def test_sequences_beyond_one_pass_are_accumulated(monkeypatch):
    """Check a data-parallel peer with many sequences: the step is equal to rounding."""
    whole, parts = pool(), pool()
    monkeypatch.setattr(pool_module, "CPU_PASS_TOKENS", 48)
    some = parts.tasks[0].inner_step(64.0).loss
    monkeypatch.undo()
    assert some == pytest.approx(whole.tasks[0].inner_step(64.0).loss, rel=1e-6)
    assert torch.allclose(whole.theta, parts.theta, atol=1e-5)


def test_a_gradient_that_is_not_finite_moves_nothing():
    simulated = pool()
    task = simulated.tasks[0]
    task.inner_step(0.0)
    kept = task.theta.clone()
    task.theta.fill_(float("nan"))
    moment = task.state_dict()["first_moment"].clone()
    assert math.isnan(task.inner_step(64.0).loss)
    assert torch.isnan(task.theta).all()
    assert torch.equal(task.state_dict()["first_moment"], moment)
    assert task.step == 2
    task.theta.copy_(kept)
    assert math.isfinite(task.inner_step(64.0).loss)


def test_a_resumed_peer_goes_on_as_if_never_stopped():
    steady, resumed = pool(), pool()
    step_all(steady, 0.0)
    steady.tasks[2].reset(4)
    step_all(steady, 64.0)
    for old, new in zip(steady.tasks, resumed.tasks, strict=True):
        new.theta.copy_(old.theta)
        new.load_state_dict({name: tensor.clone() for name, tensor in old.state_dict().items()})
    for progress in (128.0, 192.0):
        assert step_all(steady, progress) == step_all(resumed, progress)
    assert torch.equal(steady.theta, resumed.theta)


@pytest.mark.parametrize("shape", [{}, TILED], ids=["torch", "native"])
def test_evaluation_is_the_real_modules_loss(shape):
    run = manifest(**shape)
    simulated = pool(run)
    step_all(simulated, 64.0)
    model = flat_model(run.model, run.run.seed, torch.device("cpu"))
    words = text(length=run.training.sequence_length)
    measured = {}
    for part in ("validation", "test"):
        starts = words.starts(part)
        rows = torch.stack([words.tokens[each : each + words.sequence_length + 1] for each in starts]).long()
        assert simulated.evaluate(simulated.theta, part).tolist() == pytest.approx(
            [float(_loss(model, theta, rows)) for theta in simulated.theta], rel=1e-6
        )
        measured[part] = simulated.evaluate(simulated.theta, part)
    assert not torch.equal(measured["validation"], measured["test"])


def _loss(model, theta, rows):
    model.theta.copy_(theta)
    with torch.no_grad():
        return summed_loss(model.module, rows, None) / rows[:, 1:].numel()


def test_a_part_of_the_evaluation_is_spread_over_the_text():
    simulated = pool()
    few = simulated.evaluate(simulated.theta[:1], "test", sequences=5)
    assert few.shape == (1,)
    assert few.item() == pytest.approx(simulated.evaluate(simulated.theta[:1], "test").item(), rel=0.05)


def test_the_shipped_text_is_cut_into_three_parts_without_overlap():
    words = Text.builtin(64)
    parts = [words.starts("validation"), words.starts("test")]
    (whole,) = shares(words, READERS[:1], "iid")
    trained = whole.starts(0, whole.sequences)
    assert max(trained) + 64 < words.regions.training.size <= min(map(min, parts))
    spans = sorted((start, number) for number, starts in enumerate(parts) for start in starts)
    for (start, one), (following, other) in pairwise(spans):
        assert following >= start + (64 if one == other else 65)  # neighbours in one block share a token
    assert len(parts[0]) == len(parts[1]) > 3000


def test_every_shard_is_another_piece_of_the_text():
    words = text()
    parts = shares(words, READERS, "shards")
    (whole, other, _) = shares(words, READERS, "iid")
    total = whole.sequences
    assert [part.first for part in parts] == [0, total // 3, 2 * total // 3]
    read = [set(part.starts(0, part.sequences)) for part in parts]
    assert sum(len(one) for one in read) == len(set.union(*read)) == total
    orders = [part.starts(0, total) for part in (whole, other)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    with pytest.raises(CorpusError, match="cannot share"):
        shares(words, READERS * total, "shards")


def test_a_peer_reads_the_sequences_that_a_real_one_reads_also_of_several_shards():
    words = Text.builtin(64)
    real_one = corpus_of(*words.regions, 64)
    assert real_one.index.training_shards > 2
    (share,) = shares(words, READERS[:1], "iid")
    for step in (0, 3, 9_000, 10_000, 20_000):
        starts = share.starts(step, 5)
        rows = torch.stack([words.tokens[start : start + 65] for start in starts]).long()
        assert torch.equal(rows, real_one.step_batch(READERS[0].seed, READERS[0].peer, step, 5))


def test_a_shard_is_learned_by_its_peer():
    run = manifest(run__tokens=64_000, training__learning_rate=1e-2)
    simulated = pool(run, kind="shards")
    first = step_all(simulated, 0.0)
    for step in range(1, 40):
        last = step_all(simulated, 64.0 * step)
    assert all(after < 0.8 * before for before, after in zip(first, last, strict=True))
