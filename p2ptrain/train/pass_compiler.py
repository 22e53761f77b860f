"""Compilation of a micro-batch's forward and backward pass into a library, in a process of its own.

    python -m p2ptrain.train.pass_compiler LIBRARY    (a ``PassShape`` as JSON on standard input)

``make_fx`` traces loss and gradients into one graph of torch's own operations, and AOTInductor compiles it. The library
is tried on random tokens beside the usual pass before it gets its name, so a faulty one ends this process and not the
peer. The process yields to everything else: low priority, and first to be killed when memory is short. If memory or
disk run out it ends with ``TRY_LATER``; other failures would repeat.
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

from p2ptrain.base.errors import DeviceError
from p2ptrain.base.text import one_line
from p2ptrain.train import accelerator, card_compiler
from p2ptrain.train.compiled_pass import CompiledPass, CompiledPassError, PassShape
from p2ptrain.train.libraries import TRY_LATER, publish
from p2ptrain.train.model import FlatModel, flat_model, summed_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCES = {"fp32": 1e-4, "bfloat16": 0.05}
"""Largest relative difference of loss and gradient from the usual pass. Sums in another order differ by 1e-6 in fp32
and, in products rounded to 8 bits, by about 1e-2."""
TF32_TOLERANCE = 0.05 / 8
"""That of fp32 on cards which round products to TF32's 11 bits."""
NICENESS = 10
"""Priority below that of the trainer (nice(2)): a tenth of its share of a core that both want. With the lowest priority
the compiler would take hours beside a trainer on all cores. Guess: what owners notice."""
MOST_CHARS = 300
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal at the parent's death. ``base.launcher`` sets SIGTERM, too late for a suspended process."""


def compile_pass(model: FlatModel, shape: PassShape, library: Path, workspace: Path) -> None:
    """Write the library of ``model``'s pass; leaves intermediate files in ``workspace``."""
    graph, inputs = traced(model, shape)
    options: dict[str, Any] = {"aot_inductor.output_path": str(workspace / "pass.so")}
    if shape.device == "cpu":
        options["cpp.threads"] = shape.threads
    else:
        options["aot_inductor.embed_kernel_binary"] = True  # else they are files in the workspace
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
    device = model.theta.device
    batch = torch.zeros(shape.micro_batch, shape.sequence_length + 1, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=model.theta.dtype, device=device)
    inputs = (*weights, *map(torch.zeros_like, weights), total, batch)
    graph: torch.fx.GraphModule = make_fx(compute, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    return graph, inputs


def difference(model: FlatModel, shape: PassShape, library: Path) -> float:
    """Return the larger relative difference, of loss and of gradient, between the library and the usual pass.

    The usual pass computes one sequence at a time: beside a peer that trains, a card has little memory left.
    """
    vocabulary = model.module.config.vocab_size
    size = shape.micro_batch, shape.sequence_length + 1
    batch = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1))
    gradient = torch.zeros_like(model.theta)
    compiled = CompiledPass(library, model, gradient, shape)
    theirs, ours = compiled.run(batch).item(), 0.0
    for parameter, part in zip(model.module.parameters(), model.layout.views(gradient.neg_()).values(), strict=True):
        parameter.grad = part
    norm = gradient.norm().item()
    for sequence in batch.split(1):
        loss = summed_loss(model.module, sequence, shape.autocast) / shape.tokens_per_step
        torch.autograd.backward(loss)  # adds to the negative of the library's
        ours += loss.item()
    return max(abs(theirs / ours - 1), gradient.norm().item() / norm)


class _SummedLoss(torch.nn.Module):
    def __init__(self, module: PreTrainedModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.autocast = autocast

    def forward(self, batch: Tensor) -> Tensor:
        return summed_loss(self.module, batch, self.autocast)


def _give_way(niceness: int) -> None:
    """Yield processor and memory to every other process, and end with the parent, even while suspended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.nice(niceness)


@click.command()
@click.argument("library", type=click.Path(path_type=Path))
@click.option("--niceness", type=int, default=NICENESS)
def main(library: Path, niceness: int) -> None:
    """Compile the pass that standard input describes; print why not in one line."""
    _give_way(niceness)
    request: dict[str, Any] = json.load(sys.stdin)
    workspace = Path(tempfile.mkdtemp(prefix=f"{library.stem}-", dir=library.parent))
    try:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(workspace / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        os.environ["TMPDIR"] = tempfile.tempdir = str(workspace)  # inductor's headers and g++'s files, 280 MB
        warnings.simplefilter("ignore")
        shape = PassShape(**request)
        device = accelerator.choose_device(shape.device)
        if device.type != "cpu":
            card_compiler.prepare(device, workspace, os.environ)
        unchecked = workspace / "unchecked.so"
        model = flat_model(described(shape), 0, device)
        compile_pass(model, shape, unchecked, workspace)
        found = difference(model, shape, unchecked)
        if not found <= _tolerance(shape, device):  # NaN too
            raise click.ClickException(f"its gradients differ by {found:.1g} from those of the usual pass")
        publish(unchecked, library)
    except click.ClickException:
        raise
    except Exception as error:  # whatever the compiler raises, the parent wants one line of it
        raise _failure(error) from None
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _tolerance(shape: PassShape, device: torch.device) -> float:
    rounds = shape.autocast is None and accelerator.has_tf32(device)
    return TF32_TOLERANCE if rounds else TOLERANCES[shape.computes_in]


class _TryLater(click.ClickException):
    exit_code = TRY_LATER


def _failure(error: Exception) -> click.ClickException:
    """Return one line of what the compiler raised, with the status that says whether it would be raised again."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    full = next((line for line in lines if os.strerror(errno.ENOSPC) in line), None)
    text = one_line(f"{type(error).__name__}: {full or (lines[0] if lines else '')}", MOST_CHARS)
    # A library that fails does not say why, and other programs may use a card alone: memory may be the reason.
    passes = isinstance(error, CompiledPassError | DeviceError | MemoryError)
    passes |= full is not None or accelerator.says_out_of_memory(str(error))
    return _TryLater(text) if passes else click.ClickException(text)


def described(shape: PassShape) -> Any:
    """Return the model section of a shape."""
    from pydantic import TypeAdapter

    from p2ptrain.manifest.model import Model

    return TypeAdapter(Model).validate_json(shape.model)


if __name__ == "__main__":
    main()
