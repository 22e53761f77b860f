"""Compilation of a micro-batch's forward and backward pass into a library, in a process of its own.

    python -m p2ptrain.train.pass_compiler LIBRARY    (a ``PassShape`` as JSON on standard input)

``make_fx`` traces loss and gradients into one graph of torch's own operations, and AOTInductor compiles it. The library
is tried on random tokens beside the usual pass before it gets its name, so a faulty one ends this process and not the
peer. The process yields to everything else: low priority, and first to be killed when memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from torch import Tensor

from p2ptrain.base.text import one_line
from p2ptrain.train.compiled_pass import CompiledPass, PassShape, publish
from p2ptrain.train.model import FlatModel, flat_model, summed_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCES = {"fp32": 1e-4, "bfloat16": 0.05}
"""Largest relative difference of loss and gradient from the usual pass. Sums in another order differ by 1e-6 in fp32
and, in products rounded to 8 bits, by about 1e-2."""
NICENESS = 10
"""Priority below that of the trainer (nice(2)): a tenth of its share of a core that both want. With the lowest priority
the compiler would take hours beside a trainer on all cores. Guess: what owners notice."""
MOST_CHARS = 300
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal at the parent's death. ``base.launcher`` sets SIGTERM, too late for a suspended process."""


def compile_pass(model: FlatModel, shape: PassShape, library: Path, workspace: Path) -> None:
    """Write the library of ``model``'s pass; leaves intermediate files in ``workspace``."""
    graph, inputs = traced(model, shape)
    options = {"aot_inductor.output_path": str(workspace / "pass.so"), "cpp.threads": shape.threads}
    with torch.no_grad():
        made = torch._inductor.aot_compile(graph, inputs, options=options)
    Path(str(made)).replace(library)


def traced(model: FlatModel, shape: PassShape) -> tuple[torch.fx.GraphModule, tuple[Tensor, ...]]:
    """Return a graph with the inputs that ``compiled_pass`` names, and examples of these."""
    from torch.fx.experimental.proxy_tensor import make_fx

    summed = _SummedLoss(model.module, shape.autocast)
    names = [f"module.{name}" for name, _ in model.module.named_parameters()]

    def compute(*inputs: Tensor) -> tuple[()]:
        weights, gradients = inputs[: len(names)], inputs[len(names) : -2]
        total, batch = inputs[-2:]
        parameters = [each.detach().requires_grad_() for each in weights]
        given = dict(zip(names, parameters, strict=True))
        loss = torch.func.functional_call(summed, given, (batch,), tie_weights=True) / shape.tokens_per_step
        for gradient, part in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
            gradient.add_(part)
        total.add_(loss.detach())
        return ()

    weights = [each.detach() for each in model.module.parameters()]
    batch = torch.zeros(shape.micro_batch, shape.sequence_length + 1, dtype=torch.int64)
    total = torch.zeros((), dtype=model.theta.dtype)
    inputs = (*weights, *map(torch.zeros_like, weights), total, batch)
    graph: torch.fx.GraphModule = make_fx(compute, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    return graph, inputs


def difference(model: FlatModel, shape: PassShape, library: Path) -> float:
    """Return the larger relative difference, of loss and of gradient, between the library and the usual pass."""
    vocabulary = model.module.config.vocab_size
    size = shape.micro_batch, shape.sequence_length + 1
    batch = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1))
    gradient = torch.zeros_like(model.theta)
    compiled = CompiledPass(library, model, gradient, shape)
    theirs = compiled.run(batch).item()
    for parameter, part in zip(model.module.parameters(), model.layout.views(gradient.neg_()).values(), strict=True):
        parameter.grad = part
    norm = gradient.norm().item()
    loss = summed_loss(model.module, batch, shape.autocast) / shape.tokens_per_step
    torch.autograd.backward(loss)  # adds to the negative of the library's
    return max(abs(theirs / loss.item() - 1), gradient.norm().item() / norm)


class _SummedLoss(torch.nn.Module):
    def __init__(self, module: PreTrainedModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.autocast = autocast

    def forward(self, batch: Tensor) -> Tensor:
        return summed_loss(self.module, batch, self.autocast)


def _give_way() -> None:
    """Yield processor and memory to every other process, and end with the parent, even while suspended."""
    os.nice(NICENESS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


@click.command()
@click.argument("library", type=click.Path(path_type=Path))
def main(library: Path) -> None:
    """Compile the pass that standard input describes; print why not in one line."""
    _give_way()
    request: dict[str, Any] = json.load(sys.stdin)
    workspace = Path(tempfile.mkdtemp(prefix=f"{library.stem}-", dir=library.parent))
    try:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(workspace / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        os.environ["TMPDIR"] = tempfile.tempdir = str(workspace)  # inductor's headers and g++'s files, 280 MB
        warnings.simplefilter("ignore")
        shape = PassShape(**request)
        model = flat_model(described(shape), 0, torch.device("cpu"))
        unchecked = workspace / "unchecked.so"
        compile_pass(model, shape, unchecked, workspace)
        if not (found := difference(model, shape, unchecked)) <= TOLERANCES[shape.computes_in]:  # NaN too
            raise click.ClickException(f"its gradients differ by {found:.1g} from those of the usual pass")
        publish(unchecked, library)
    except click.ClickException:
        raise
    except Exception as error:  # whatever the compiler raises, the parent wants one line of it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = next((line for line in lines if os.strerror(errno.ENOSPC) in line), lines[0] if lines else "")
        raise click.ClickException(one_line(f"{type(error).__name__}: {text}", MOST_CHARS)) from None
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def described(shape: PassShape) -> Any:
    """Return the model section of a shape."""
    from pydantic import TypeAdapter

    from p2ptrain.manifest.model import Model

    return TypeAdapter(Model).validate_json(shape.model)


if __name__ == "__main__":
    main()
