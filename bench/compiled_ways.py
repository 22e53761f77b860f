"""Spike: torch.compile beside the ahead-of-time library: seconds to compile, cold and warm, and of a pass.

python -m bench.compiled_ways PRESET CACHE [--library]
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

preset, cache = sys.argv[1:3]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402

from bench.card import manifest as preset_manifest  # noqa: E402
from bench.throughput import SHORTENED  # noqa: E402
from p2ptrain.manifest import with_changes  # noqa: E402
from p2ptrain.train.autofit import place  # noqa: E402
from p2ptrain.train.compiled_pass import CompiledPass, PassShape  # noqa: E402
from p2ptrain.train.model import flat_model, summed_loss  # noqa: E402
from p2ptrain.train.pass_compiler import compile_pass  # noqa: E402

torch.set_num_threads(1)
manifest = preset_manifest(preset)
if preset == "llama-135m":
    manifest = with_changes(manifest, SHORTENED)
device = torch.device("cpu")
model = flat_model(manifest.model, 0, device)
training = manifest.training
placement = place(model, manifest.model, training)
micro = min(placement.micro_batch, training.sequences_per_step)
tokens = training.tokens_per_step
gradient = torch.zeros_like(model.theta)
for parameter, part in zip(model.module.parameters(), model.layout.views(gradient).values(), strict=True):
    parameter.grad = part
vocabulary = model.module.config.vocab_size
batch = torch.randint(vocabulary, (micro, training.sequence_length + 1), generator=torch.Generator().manual_seed(1))


def cpu_s() -> float:
    return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def eager(part: torch.Tensor) -> torch.Tensor:
    loss = summed_loss(model.module, part, placement.autocast) / tokens
    loss.backward()
    return loss.detach()


compiled_loss = torch.compile(lambda part: summed_loss(model.module, part, placement.autocast) / tokens, dynamic=False)


def compiled(part: torch.Tensor) -> torch.Tensor:
    loss = compiled_loss(part)
    loss.backward()
    return loss.detach()


found: dict[str, object] = {
    "preset": preset,
    "micro_batch": micro,
    "autocast": str(placement.autocast),
    "muon": str(placement.muon),
}
began, cpu_began = time.monotonic(), cpu_s()
first = float(compiled(batch))
found["compile_s"], found["compile_cpu_s"] = time.monotonic() - began, cpu_s() - cpu_began
norms = [float(gradient.norm())]
gradient.zero_()
theirs = float(eager(batch))
norms.append(float(gradient.norm()))
found["loss"], found["norm"] = abs(first / theirs - 1), abs(norms[0] / norms[1] - 1)
ways = {"eager": eager, "torch.compile": compiled}
if "--library" in sys.argv:
    shape = PassShape.of(manifest.model, micro, training.sequence_length, tokens, placement.computes_in, device)
    workspace = Path(cache) / "aot"
    workspace.mkdir(parents=True, exist_ok=True)
    library = workspace / "pass.so.whole"
    began, cpu_began = time.monotonic(), cpu_s()
    compile_pass(model, shape, library, workspace)
    found["aot_s"], found["aot_cpu_s"] = time.monotonic() - began, cpu_s() - cpu_began
    ways["library"] = CompiledPass(library, model, gradient, shape).run
times: dict[str, list[float]] = {name: [] for name in ways}
for way in ways.values():
    way(batch)
until = time.monotonic() + float(os.environ.get("SECONDS_", "40"))
while time.monotonic() < until or len(times["eager"]) < 5:
    for name, way in ways.items():
        began = time.perf_counter()
        way(batch)
        times[name].append(time.perf_counter() - began)
found["median_ms"] = {name: 1e3 * statistics.median(each) for name, each in times.items()}
found["rounds"] = len(times["eager"])
found["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(found))
