"""The compiler's process: by how much results may differ, and how long they may take."""

from dataclasses import replace

import pytest
import torch

from p2ptrain.train import accelerator, pass_compiler
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.model import flat_model, summed_loss


@pytest.mark.parametrize(
    ("kind", "computes_in", "found", "is_right"),
    [
        ("cpu", "fp32", 1e-5, True),
        ("cpu", "fp32", 1e-3, False),
        ("cuda", "fp32", 1e-3, True),  # it rounds products to TF32
        ("cuda", "fp32", 0.01, False),
        ("cuda", "bfloat16", 0.01, True),
        ("cuda", "bfloat16", float("nan"), False),
    ],
)
def test_what_differs_by_more_than_rounding_is_no_success(tiny_run, monkeypatch, kind, computes_in, found, is_right):
    tiny = tiny_run()
    shape = replace(tiny.task().pass_shape(tiny.manifest.model), computes_in=computes_in)
    monkeypatch.setattr(accelerator, "has_tf32", lambda device: kind == "cuda")
    monkeypatch.setattr(pass_compiler, "compared", lambda *_: (found, 1.5))
    if is_right:
        pass_compiler.compile_pass(shape, False)
    else:
        with pytest.raises(CompiledPassError, match="its gradients differ by"):
            pass_compiler.compile_pass(shape, False)


def test_what_takes_longer_is_no_success(tiny_run, monkeypatch):
    tiny = tiny_run()
    monkeypatch.setattr(pass_compiler, "compared", lambda *_: (0.0, 0.8))
    with pytest.raises(CompiledPassError, match=r"takes 1\.25 times as long"):
        pass_compiler.compile_pass(tiny.task().pass_shape(tiny.manifest.model), False)


@pytest.mark.parametrize(
    ("may_use", "with_graphs", "tried", "is_in_graphs"),
    [
        (False, 9.0, [False], False),
        (True, 1.2, [True], True),
        (True, 0.9, [True, False], False),
        (True, torch.OutOfMemoryError("CUDA out of memory"), [True, False], False),
    ],
)
def test_a_graph_is_tried_first_and_used_if_it_is_faster(
    tiny_run, monkeypatch, may_use, with_graphs, tried, is_in_graphs
):
    seen = []

    def compared(model, shape, in_graphs):
        seen.append(in_graphs)
        if in_graphs and isinstance(with_graphs, Exception):
            raise with_graphs
        return 0.0, with_graphs if in_graphs else 1.5

    tiny = tiny_run()
    monkeypatch.setattr(pass_compiler, "compared", compared)
    assert pass_compiler.compile_pass(tiny.task().pass_shape(tiny.manifest.model), may_use) is is_in_graphs
    assert seen == tried


class EagerPasses:
    """Passes without a compiler; notes how many sequences each eager one takes, and runs out of memory beyond some."""

    def __init__(self, monkeypatch, most):
        self.sizes, self.most = [], most
        real = torch.compile
        monkeypatch.setattr(torch, "compile", lambda module, **given: real(module, backend="eager", fullgraph=True))
        monkeypatch.setattr(pass_compiler, "summed_loss", self)

    def __call__(self, module, part, autocast):
        self.sizes.append(len(part))
        if len(part) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return summed_loss(module, part, autocast)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize(("most", "size"), [(4, 4), (3, 1)])
def test_the_eager_pass_takes_a_micro_batch_as_the_trainer_does_if_memory_suffices(
    tiny_run, monkeypatch, most, size, in_graphs
):
    tiny, eager = tiny_run(), EagerPasses(monkeypatch, most)
    shape = tiny.task().pass_shape(tiny.manifest.model)
    assert shape.micro_batch == 4
    model = flat_model(pass_compiler.described(shape), 0, accelerator.CPU)
    assert pass_compiler.compared(model, shape, in_graphs)[0] < 1e-5
    assert eager.sizes[0] == 4
    assert set(eager.sizes[1:]) == {size}
