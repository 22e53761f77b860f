"""The compiler's process: by how much results may differ, and how long they may take."""

from dataclasses import replace

import pytest

from p2ptrain.train import accelerator, pass_compiler
from p2ptrain.train.compiled_pass import CompiledPassError


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
    monkeypatch.setattr(pass_compiler, "compared", lambda model, shape: (found, 1.5))
    if is_right:
        pass_compiler.compile_pass(shape)
    else:
        with pytest.raises(CompiledPassError, match="its gradients differ by"):
            pass_compiler.compile_pass(shape)


def test_what_takes_longer_is_no_success(tiny_run, monkeypatch):
    tiny = tiny_run()
    monkeypatch.setattr(pass_compiler, "compared", lambda model, shape: (0.0, 0.8))
    with pytest.raises(CompiledPassError, match=r"takes 1\.25 times as long"):
        pass_compiler.compile_pass(tiny.task().pass_shape(tiny.manifest.model))
