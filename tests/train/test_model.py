"""The model: from its description alone, equal everywhere, one flat vector."""

import bisect
import itertools
import math
from functools import partial

import pytest
import torch
from families import DESCRIPTIONS, description
from torch.nn import functional
from transformers import AutoModelForCausalLM

from p2ptrain.base.errors import ManifestError
from p2ptrain.host.rules import fragments_of
from p2ptrain.manifest import parameter_count, preset, with_changes
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.outer.fragments import layer_slices, slices
from p2ptrain.train import model
from p2ptrain.train.model import build_module


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_every_allowed_architecture_builds_and_learns_without_dropout(architecture):
    described = description(architecture)
    built = model.flat_model(described, seed=5, device=torch.device("cpu"))
    assert type(built.module).__name__ == architecture
    assert built.theta.dtype == torch.float32
    assert built.layout.parameter_count == pytest.approx(parameter_count(described), rel=0.02)
    assert built.module.config._attn_implementation == "sdpa"
    batch = torch.arange(34).reshape(2, 17)
    one, other = (model.summed_loss(built.module, batch, None) for _ in range(2))
    assert torch.equal(one, other)
    torch.autograd.backward(one)
    assert all(parameter.grad is not None for parameter in built.module.parameters())


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_initial_weights_and_logits_are_those_of_transformers_alone(architecture):
    described = description(architecture)
    ours = model.flat_model(described, seed=5, device=torch.device("cpu"))
    config = ours.module.config_class(**described.config_arguments(), pad_token_id=None)
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(config)
    assert plain.state_dict().keys() == ours.module.state_dict().keys()
    assert all(torch.equal(one, ours.module.state_dict()[name]) for name, one in plain.state_dict().items())
    ids = torch.arange(32).reshape(2, 16) * 7 % 256
    assert torch.equal(ours.module(ids).logits, plain.train()(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_units_are_embedding_blocks_and_the_norm_with_the_head(architecture, tied):
    described = description(architecture)
    described = described.model_copy(
        update={"config": described.config.model_copy(update={"tie_word_embeddings": tied})}
    )
    layout = FlatLayout.of(build_module(described, 5))
    units = layout.unit_lengths
    assert len(units) == 1 + described.config.num_hidden_layers + (not tied)
    assert sum(units) == layout.total
    starts = [0, *itertools.accumulate(units)]
    held = [0] * len(units)
    for shape, offset in zip(layout.shapes, layout.offsets, strict=True):
        held[bisect.bisect_right(starts, offset) - 1] += math.prod(shape)
    assert tuple(held) == described.unit_parameters()


def test_a_run_is_cut_as_its_manifest_says():
    run = preset("llama-15m", "ab" * 32)
    layout = FlatLayout.of(build_module(run.model, 0))
    even = fragments_of(run.outer, layout)
    assert even == slices(layout.total, run.outer.fragments)
    at_layers = fragments_of(with_changes(run, {"outer.cut": "layers"}).outer, layout)
    assert at_layers == layer_slices(layout.unit_lengths, run.outer.fragments)
    assert at_layers != even
    longest = [max(piece.stop - piece.start for piece in pieces) for pieces in (even, at_layers)]
    assert longest[1] < 1.3 * longest[0]


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_the_loss_is_the_cross_entropy_of_the_logits(architecture):
    module = build_module(description(architecture), 5).double()
    batch = torch.arange(34).reshape(2, 17) * 7 % 256
    expected = functional.cross_entropy(
        module(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
    )
    found = model.summed_loss(module, batch, None)
    gradients = [torch.autograd.grad(loss, list(module.parameters())) for loss in (found, expected)]
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_recomputed_activations_give_bitwise_the_same_gradient(architecture, autocast):
    module = build_module(description(architecture), 5)
    batch = torch.arange(34).reshape(2, 17) * 7 % 256
    kept, results = [], []
    for recomputes in (False, True, False):
        model.recompute_activations(module, recomputes)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(partial(counted, kept), lambda tensor: tensor):
            loss = model.summed_loss(module, batch, autocast)
        results.append([loss, *torch.autograd.grad(loss, list(module.parameters()))])
    for one, other in zip(results[0], results[1], strict=True):
        assert torch.equal(one, other)
    assert kept[0] == kept[2] > 3 * kept[1]


def counted(kept, tensor):
    kept[-1] += 1
    return tensor


def test_initial_weights_are_a_function_of_the_seed_alone(tiny_run):
    described = tiny_run().manifest.model
    torch.manual_seed(1)
    first = build_module(described, 7).state_dict()
    torch.manual_seed(2)
    torch.rand(3)
    second = build_module(described, 7).state_dict()
    other = build_module(described, 8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_global_random_state_is_left_alone(tiny_run):
    before = torch.get_rng_state()
    build_module(tiny_run().manifest.model, 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_theta_and_the_module_are_one(tiny_run):
    built = tiny_run().model()
    batch = torch.arange(17).reshape(1, 17)
    before = model.summed_loss(built.module, batch, None)
    built.theta.mul_(2)
    assert not torch.equal(model.summed_loss(built.module, batch, None), before)


def test_a_model_of_another_size_than_was_judged_is_refused(tiny_run, monkeypatch):
    monkeypatch.setattr(model, "parameter_count", lambda _: 1000)
    with pytest.raises(ManifestError, match=r"parameters, but the run.s model has 1,000"):
        build_module(tiny_run().manifest.model, 7)
