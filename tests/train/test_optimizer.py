"""Parameters that Muon moves, in every architecture that a manifest may name, and by how much."""

import pytest
import torch
from families import DESCRIPTIONS, description

from p2ptrain.manifest import with_changes
from p2ptrain.train.model import build_module
from p2ptrain.train.optimizer import RATIONAL, hidden_matrices, orthogonalized, products_type, rational


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_muon_moves_the_blocks_matrices_and_nothing_else(architecture, tied):
    module = build_module(description(architecture, tie_word_embeddings=tied), 1)
    hidden = hidden_matrices(module)
    # q, k, v, o, gate, up, down; or qkv, projection, two of the feed-forward part
    matrices_a_block = 4 if architecture in ("GPT2LMHeadModel", "GPTNeoXForCausalLM") else 7
    assert len(hidden) == 2 * matrices_a_block
    for name, parameter in module.named_parameters():
        if name in hidden:
            assert parameter.ndim == 2
            assert any(part.isdigit() for part in name.split(".")), name  # a parameter of a block


def test_muons_step_is_as_large_as_adamws(tiny_run):
    """Check the root mean square of one step without decay: 0.2 to 0.4 of the rate for AdamW, 0.2 sqrt(s) for Muon."""
    changes = {"training__weight_decay": 0.0, "training__warmup_tokens": 0, "training__schedule": "constant"}
    tiny = tiny_run(training__optimizer="muon", **changes)
    task = tiny.task()
    before = task.model.layout.views(task.theta.clone())
    task.inner_step(0.0)
    after = task.model.layout.views(task.theta)
    for name in hidden_matrices(task.model.module):
        step = (after[name] - before[name]).square().mean().sqrt() / tiny.manifest.training.learning_rate
        assert 0.1 < step < 0.3, (
            name
        )  # singular values of five steps lie between .5 and 1.5 where the gradient has full rank


def test_the_state_has_one_form(tiny_run):
    states = [tiny_run(training__optimizer=name).task() for name in ("adamw", "muon")]
    for task in states:
        task.inner_step(64.0)
    adamw, muon = (task.state_dict() for task in states)
    assert {name: tensor.shape for name, tensor in adamw.items()} == {
        name: tensor.shape for name, tensor in muon.items()
    }
    assert torch.equal(adamw["counters"], muon["counters"])
    layout = states[1].model.layout
    hidden = hidden_matrices(states[1].model.module)
    for name, view in layout.views(muon["first_moment"]).items():
        assert view.any(), name
        assert bool(layout.views(muon["second_moment"])[name].any()) == (name not in hidden), name


def test_a_manifest_may_name_either(tiny_run):
    assert tiny_run().manifest.training.optimizer == "muon"
    assert with_changes(tiny_run().manifest, {"training.optimizer": "adamw"}).training.muon_momentum == 0.95


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float16])
def test_gradients_of_any_size_are_orthogonalized(products, size):
    matrices = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(3)) * size
    found = orthogonalized(matrices, products)
    assert found.dtype is products
    values = torch.linalg.svdvals(found.float())
    assert values.min() > 0.5
    assert values.max() < 1.5


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("rows", [8, 49, 96, 101])  # halves of equal and of unequal size
def test_singular_values_move_as_the_rational_function_says(rows, size):
    """Check values between a thousandth and all of the largest, in fp32, against singular value decomposition."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(2, n, rows, generator=generator).double()).Q for n in (rows, 2 * rows))
    values = torch.logspace(0, -3, rows, dtype=torch.float64) * size
    matrices = left * values @ right.mT
    grams = (matrices @ matrices.mT).float()
    found = rational(grams.clone()).double() @ matrices
    c, a, b = RATIONAL
    s = values / torch.linalg.matrix_norm(grams[0].double()).sqrt()
    wanted = left * (c * s * (s**2 + a) / (s**2 + b)) @ right.mT
    assert (found - wanted).norm() < 1e-3 * wanted.norm()
    near = torch.linalg.svdvals(found)[:, : 2 * rows // 3]
    assert near.min() > 0.5
    assert near.max() < 1.5


def test_no_gradient_is_no_step():
    assert not torch.bmm(rational(torch.zeros(1, 96, 96)), torch.zeros(1, 96, 96)).any()


def test_a_cpu_computes_muon_in_fp32():
    assert products_type(torch.device("cpu")) is torch.float32


def test_muon_moves_alike_in_every_type(tiny_run):
    """Check fp32 beside the 16-bit types of cards, and these, which take the same steps, beside one another."""
    tiny = tiny_run(training__optimizer="muon")
    tasks = {each: tiny.task(muon=each) for each in (None, torch.bfloat16, torch.float16)}
    start = tasks[None].theta.clone()
    for task in tasks.values():
        task.inner_step(0.0)
    usual, half, older = (task.theta - start for task in tasks.values())
    assert not torch.equal(half, older)
    assert (half - older).norm() < 0.02 * half.norm()
    assert 0 < (usual - half).norm() < 0.4 * half.norm()
