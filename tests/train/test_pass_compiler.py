"""The compiler's process: with which status it ends, and by how much results may differ."""

import errno
import os
from dataclasses import replace

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.train import accelerator, pass_compiler
from p2ptrain.train.compiled_pass import TRY_LATER, CompiledPassError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RuntimeError("C++ compile error\nnext line"), 1, "RuntimeError: C++ compile error"),
        (CompiledPassError("its gradients differ"), 1, "its gradients differ"),
        (RuntimeError("a\ng++: No space left on device"), TRY_LATER, "RuntimeError: No space left on device"),
        (caused(CompiledPassError("x"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), TRY_LATER, "No space left"),
        (caused(CompiledPassError("no memory"), torch.OutOfMemoryError("CUDA out of memory.")), TRY_LATER, "no memory"),
        (MemoryError(), TRY_LATER, "MemoryError: "),
        (DeviceError("It is busy.", "Wait."), TRY_LATER, "DeviceError: It is busy."),
    ],
)
def test_only_what_would_fail_again_ends_for_good(error, status, line):
    found, said = pass_compiler.failure(error)
    assert (found, said[: len(line)]) == (status, line)


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
    monkeypatch.setattr(pass_compiler, "difference", lambda model, shape: found)
    if is_right:
        pass_compiler.compile_pass(shape)
    else:
        with pytest.raises(CompiledPassError, match="its gradients differ by"):
            pass_compiler.compile_pass(shape)
