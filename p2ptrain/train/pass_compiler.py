"""Compilation of a pass in a process of its own, which ``compiling`` starts; its result is torch's caches.

    python -m p2ptrain.train.pass_compiler CACHE NICENESS

The first line of standard input is JSON: a ``PassShape``, and in ``in_graphs`` whether the card may have room for a
CUDA graph. The pass is tried on random tokens beside the eager one, so a faulty one ends this process and not the
trainer. The process is the first to be killed when memory is short.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from p2ptrain.base.launcher import lower_priority
from p2ptrain.base.text import one_line
from p2ptrain.train import accelerator
from p2ptrain.train.compiled_pass import IN_GRAPHS, CompiledPass, CompiledPassError, PassShape, use
from p2ptrain.train.memory import CARD_MEMORY_FRACTION
from p2ptrain.train.model import FlatModel, flat_model, summed_loss

TOLERANCES = {"fp32": 1e-4, "bfloat16": 0.05}
"""Largest relative difference of loss and gradient from the eager pass. Sums in another order differ by 1e-6 in fp32
and, in products rounded to 8 bits, by about 1e-2."""
TF32_TOLERANCE = 0.05 / 8
"""That of fp32 on cards which round products to TF32's 11 bits."""
GRAPH_CALLS = 3
"""Calls until a CUDA graph is replayed: one without it, one that records it."""
TRIALS = 3
"""Passes of each kind, alternating, whose shortest are compared."""
MOST_CHARS = 300


def compared(model: FlatModel, shape: PassShape, in_graphs: bool) -> tuple[float, float]:
    """Compile a pass; return how it differs from the eager one, and how many times as fast it is.

    The first is the larger relative difference, of loss and of gradient. The eager pass computes the whole micro-batch,
    as the trainer does; one sequence at a time if memory is short, as a card's may be beside a peer that trains.
    """
    size = shape.micro_batch, shape.sequence_length + 1
    batch = torch.randint(model.module.config.vocab_size, size, generator=torch.Generator().manual_seed(1))
    batch = batch.to(model.theta.device)
    gradient = torch.zeros_like(model.theta)
    for parameter, part in zip(model.module.parameters(), model.layout.views(gradient).values(), strict=True):
        parameter.grad = part

    def eager(parts: tuple[torch.Tensor, ...]) -> float:
        found = 0.0
        for part in parts:
            loss = summed_loss(model.module, part, shape.autocast) / shape.tokens_per_step
            torch.autograd.backward(loss)
            found += loss.item()
        return found

    parts: tuple[torch.Tensor, ...] = (batch,)
    try:
        eager(parts)
    except (RuntimeError, MemoryError) as error:
        if not accelerator.is_out_of_memory(error):
            raise
        parts = batch.split(1)
    accelerator.empty_cache(batch.device)  # outside the handler, whose traceback keeps tensors alive
    compiled = CompiledPass(model, gradient, shape, in_graphs)
    for _ in range(GRAPH_CALLS if in_graphs else 1):
        gradient.zero_()
        theirs = compiled.run(batch).item()
    norm = gradient.norm().item()
    gradient.neg_()
    ours = eager(parts)  # adds to the negative of the compiled one's
    found = max(abs(theirs / ours - 1), gradient.norm().item() / norm)
    times = [(_seconds(lambda: eager(parts)), _seconds(lambda: compiled.run(batch).item())) for _ in range(TRIALS)]
    eager_s, compiled_s = map(min, zip(*times, strict=True))
    return found, eager_s / compiled_s


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def described(shape: PassShape) -> Any:
    """Return the model section of a shape."""
    from pydantic import TypeAdapter

    from p2ptrain.manifest.model import Model

    return TypeAdapter(Model).validate_json(shape.model)


def compile_pass(shape: PassShape, may_use_graphs: bool) -> bool:
    """Compile a pass in this process's cache; return whether as a CUDA graph, which is tried first.

    Raises CompiledPassError if it computes something else, or slowly.
    """
    device = accelerator.choose_device(shape.device)
    if device.type == "cpu":
        torch.set_num_threads(shape.threads)
    else:
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(CARD_MEMORY_FRACTION * free / total, device)
    model = flat_model(described(shape), 0, device)
    if may_use_graphs:
        with contextlib.suppress(CompiledPassError, torch.OutOfMemoryError):
            _check(model, shape, in_graphs=True)
            return True
        torch.compiler.reset()
        accelerator.empty_cache(device)
    _check(model, shape, in_graphs=False)
    return False


def _check(model: FlatModel, shape: PassShape, in_graphs: bool) -> None:
    rounds = shape.autocast is None and accelerator.has_tf32(model.theta.device)
    found, ratio = compared(model, shape, in_graphs)
    if not found <= (TF32_TOLERANCE if rounds else TOLERANCES[shape.computes_in]):  # NaN too
        raise CompiledPassError(f"its gradients differ by {found:.1g} from those of the eager pass")
    if ratio < 1.0:
        raise CompiledPassError(f"it takes {1 / ratio:.2f} times as long as the eager pass")


def _end_with_parent() -> None:
    """End this process and its compilers when standard input ends, which the parent holds open."""
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main(cache: str, niceness: str) -> int:
    """Compile the pass that the first line of standard input describes; print why not in one line."""
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # killed first
    lower_priority(int(niceness))
    asked = json.loads(sys.stdin.buffer.readline())
    may_use_graphs = bool(asked.pop(IN_GRAPHS))
    shape = PassShape(**asked)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent at the parent's death; standard input ends then, too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use(Path(cache))
    try:
        if compile_pass(shape, may_use_graphs):
            (Path(cache) / IN_GRAPHS).touch()
    except Exception as error:  # whatever the compiler raises, the parent wants one line of it
        name = "" if isinstance(error, CompiledPassError) else f"{type(error).__name__}: "
        sys.stderr.write(one_line(name + str(error).partition("\n")[0], MOST_CHARS) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread waits for standard input
