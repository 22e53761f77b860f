"""The compiled pass beside the eager one, in pairs, by CPU time: for machines that have other work, too.

    python -m bench.compiled_pass PRESET CACHE [PAIRS]

CACHE is a folder; the second run finds there what the first one has compiled. A pass of one micro-batch, one thread.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.card import manifest as preset_manifest
from p2ptrain.train.autofit import place
from p2ptrain.train.compiled_pass import CompiledPass, PassShape, use
from p2ptrain.train.model import flat_model, summed_loss

WARM_UPS = 3


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the compilers that it has run."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def thread_s(work: Callable[[Tensor], Tensor], part: Tensor) -> float:
    began = time.thread_time()
    work(part)
    return time.thread_time() - began


def measured(preset: str, pairs: int) -> dict[str, object]:
    """Return the figures of one preset; torch's caches must be chosen."""
    run, device = preset_manifest(preset), torch.device("cpu")
    model, training = flat_model(run.model, run.run.seed, device), run.training
    how = place(model, run.model, training)
    gradient = torch.zeros_like(model.theta)
    for parameter, view in zip(model.module.parameters(), model.layout.views(gradient).values(), strict=True):
        parameter.grad = view
    shape = PassShape.of(
        run.model, how.micro_batch, training.sequence_length, training.tokens_per_step, how.computes_in, device
    )
    compiled = CompiledPass(model, gradient, shape).run

    def eager(part: Tensor) -> Tensor:
        loss = summed_loss(model.module, part, how.autocast) / training.tokens_per_step
        torch.autograd.backward(loss)
        return loss.detach()

    part = torch.zeros(how.micro_batch, training.sequence_length + 1, dtype=torch.int64)
    began, wall = cpu_s(), time.monotonic()
    compiled(part)
    first_s, first_wall_s = cpu_s() - began, time.monotonic() - wall
    times = [(thread_s(eager, part), thread_s(compiled, part)) for _ in range(WARM_UPS + pairs)][WARM_UPS:]
    eager_s, compiled_s = (statistics.median(each) for each in zip(*times, strict=True))
    ratios = statistics.quantiles([one / other for one, other in times], n=4)
    return {
        "preset": preset,
        "computes_in": how.computes_in,
        "micro_batch": how.micro_batch,
        "first_cpu_s": first_s,
        "first_s": first_wall_s,
        "eager_ms": 1e3 * eager_s,
        "compiled_ms": 1e3 * compiled_s,
        "ratio_quartiles": ratios,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    use(Path(sys.argv[2]).absolute())
    sys.stdout.write(json.dumps(measured(sys.argv[1], int((sys.argv[3:] or ["60"])[0]))) + "\n")
