"""Stages of a model: chained, they compute what the whole does; where to cut."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from staged_rank import BLOCKS, CPU, FIELDS, Case, corpus, equal_cut

from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.model import build_module, flat_model, summed_loss
from p2ptrain.train.optimizer import hidden_matrices
from p2ptrain.train.staged import StageModule
from p2ptrain.train.stages import (
    StageRange,
    UnitCosts,
    balanced_cut,
    fitting_micro_batch,
    stage_model,
)

WAYS = pytest.mark.parametrize("count", [1, 2, 3])
ALL = pytest.mark.parametrize("architecture", FIELDS)


def built(case, count):
    manifest = case.manifest
    return [stage_model(manifest.model, manifest.run.seed, CPU, stage) for stage in equal_cut(BLOCKS, count)]


def chained_loss(models, batch, autocast=None):
    """Pass a batch through stages in one process, with a graph."""
    hidden = batch[:, :-1]
    for model in models:
        hidden = StageModule(model, autocast)(hidden)
    return summed_cross_entropy(hidden.flatten(0, 1), models[-1].output, batch[:, 1:].flatten(), autocast)


def gradients(model):
    """Return the gradient of a stage or a whole model as a flat vector."""
    flat = torch.zeros_like(model.theta)
    for view, parameter in zip(model.layout.views(flat).values(), model.module.parameters(), strict=True):
        view.copy_(parameter.grad)
    return flat


@ALL
@WAYS
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_stages_end_to_end_are_the_whole_model(architecture, count, autocast):
    case = Case(architecture)
    manifest = case.manifest
    whole = flat_model(manifest.model, manifest.run.seed, CPU)
    models = built(case, count)
    assert torch.equal(torch.cat([model.flat.theta for model in models]), whole.theta)
    assert sum((model.flat.layout.names for model in models), ()) == whole.layout.names
    batch = corpus(manifest).step_batch(1, "alice", 0, 4)
    losses = summed_loss(whole.module, batch, autocast), chained_loss(models, batch, autocast)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert torch.equal(torch.cat([gradients(model.flat) for model in models]), gradients(whole))


@ALL
@WAYS
def test_a_stage_knows_its_place(architecture, count):
    models = built(Case(architecture), count)
    begin, first = 0, 0
    for model in models:
        assert (model.offset, model.first_parameter) == (begin, first)
        begin += model.flat.layout.total
        first += len(model.flat.layout.names)
    assert {model.whole for model in models} == {models[0].whole}
    assert begin == models[0].whole.total


@ALL
def test_stages_have_the_hidden_matrices_of_the_whole(architecture):
    manifest = Case(architecture).manifest
    whole = hidden_matrices(build_module(manifest.model, 0))
    parts = [hidden_matrices(model.flat.module) for model in built(Case(architecture), 3)]
    assert frozenset().union(*parts) == whole


@ALL
def test_tied_embeddings_have_a_guest_on_the_last_stage(architecture):
    case = Case(architecture, tied=True)
    manifest = case.manifest
    whole = flat_model(manifest.model, manifest.run.seed, CPU)
    models = built(case, 3)
    assert [model.guest is not None for model in models] == [False, False, True]
    assert all(model.is_tied for model in models)
    assert torch.equal(torch.cat([model.flat.theta for model in models]), whole.theta)
    assert torch.equal(models[-1].guest, models[0].embedding)
    batch = corpus(manifest).step_batch(1, "alice", 0, 4)
    losses = summed_loss(whole.module, batch, None), chained_loss(models, batch)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    models[0].embedding.grad += models[-1].guest.grad
    expected = gradients(whole)
    assert torch.allclose(torch.cat([gradients(model.flat) for model in models]), expected, rtol=0, atol=1e-5)


def test_one_stage_of_a_tied_model_has_no_guest():
    (model,) = built(Case(tied=True), 1)
    assert model.guest is None
    assert not model.is_tied
    assert model.output is model.embedding


@ALL
def test_a_stage_that_receives_minus_zero_passes_it_on(architecture):
    model = built(Case(architecture), 2)[1]
    base = model.flat.module.base_model
    if architecture == "GPT2LMHeadModel":
        received = torch.tensor([-0.0, 0.0, 1.0]) + base.wpe(torch.arange(3))
        assert torch.signbit(received).tolist() == [True, False, False]


def test_parameters_of_a_stage_take_its_share_of_memory():
    for model in built(Case(), 2):
        sizes = {parameter.untyped_storage().nbytes() for parameter in model.flat.module.parameters()}
        assert sizes == {model.flat.theta.nbytes}


# --- where to cut -----------------------------------------------------------------------------------------------------


def slowest(costs, stages):
    return max(sum(costs.seconds[each.index][unit] for unit in units(each, len(costs.state_bytes))) for each in stages)


def units(stage, count):
    own = [block + 1 for block in stage.blocks]
    return [0] * stage.is_first + own + [count - 1] * stage.is_last


def fits(costs, limits, micro_batches, stages):
    for each, limit in zip(stages, limits, strict=True):
        kept = min(micro_batches, each.count - each.index)
        own = units(each, len(costs.state_bytes))
        need = sum(costs.state_bytes[unit] + kept * costs.activation_bytes[unit] for unit in own)
        if limit is not None and need > limit:
            return False
    return True


def all_cuts(blocks, count):
    for inner in combinations(range(1, blocks), count - 1):
        cuts = [0, *inner, blocks]
        yield tuple(StageRange(index, count, range(cuts[index], cuts[index + 1])) for index in range(count))


@given(st.data())
def test_the_cut_is_the_best_of_all(data):
    blocks = data.draw(st.integers(1, 6), label="blocks")
    count = data.draw(st.integers(1, blocks), label="stages")
    numbers = st.lists(st.integers(0, 9), min_size=blocks + 2, max_size=blocks + 2)
    costs = UnitCosts([data.draw(numbers) for _ in range(count)], data.draw(numbers), data.draw(numbers))
    limits = data.draw(st.lists(st.none() | st.integers(0, 60), min_size=count, max_size=count), label="limits")
    micro_batches = data.draw(st.integers(1, 4), label="micro-batches")
    possible = [cut for cut in all_cuts(blocks, count) if fits(costs, limits, micro_batches, cut)]
    found = balanced_cut(costs, limits, micro_batches)
    if not possible:
        assert found is None
        return
    assert found in possible
    assert slowest(costs, found) == min(slowest(costs, cut) for cut in possible)


def test_a_card_twice_as_fast_gets_twice_the_blocks():
    fast, slow = [0.0, *[1.0] * 12, 0.0], [0.0, *[2.0] * 12, 0.0]
    costs = UnitCosts([fast, slow], [1] * 14, [0] * 14)
    assert [each.blocks for each in balanced_cut(costs, [None, None], 8)] == [range(8), range(8, 12)]


def test_a_small_card_gets_what_fits():
    costs = UnitCosts([[1.0] * 14] * 2, [10] * 14, [1] * 14)
    assert [len(each.blocks) for each in balanced_cut(costs, [60, None], 8)] == [4, 8]
    assert balanced_cut(costs, [60, 60], 8) is None


def test_a_large_output_layer_counts():
    costs = UnitCosts([[0.1, *[1.0] * 12, 4.0]] * 2, [1] * 14, [0] * 14)
    assert [len(each.blocks) for each in balanced_cut(costs, [None, None], 8)] == [8, 4]


@pytest.mark.parametrize(("blocks", "stages"), [(4, 5), (4, 0)])
def test_stages_without_blocks_are_refused(blocks, stages):
    assert balanced_cut(UnitCosts([[1.0] * 6] * stages, [1] * 6, [1] * 6), [None] * stages, 4) is None


@pytest.mark.parametrize(
    ("sequences", "at_most", "stages", "fits"),
    [(8, 8, 2, 4), (8, 3, 2, 2), (8, 1, 8, 1), (7, 4, 2, 1), (12, 5, 3, 4), (2, 4, 3, None)],
)
def test_micro_batches_divide_the_step_into_as_many_as_stages(sequences, at_most, stages, fits):
    assert fitting_micro_batch(sequences, at_most, stages) == fits
