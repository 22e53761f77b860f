"""A large model in a team on the CPU or on one card: an outer step, checkpoint, resumption, export, and their memory.

    python -m bench.large_team [--layers 16] [--ranks 2] [--device cuda:0] [--out out/large_team]

Each part runs in processes of its own: ``train`` (one outer step of one inner step, then a checkpoint), ``resume``
(loads it and saves it again, which must give the same files), ``export`` (streams the weights), ``load`` (transformers
loads the export and compares every weight with the checkpoint). ``--part`` runs one of them; ``--ranks 1 --part train``
trains in one process, to compare with. Bytes are those per parameter that a rank owns, beyond what a process without a
model takes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.checkpoint import Checkpoints, load_latest
from p2ptrain.data.corpus import Corpus
from p2ptrain.data.split import split_stream
from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.manifest import Manifest, parameter_count, preset, with_changes
from p2ptrain.team.checkpoints import RankCheckpoints, TeamCheckpoints, vector_range_of
from p2ptrain.team.sharding import sharding_of
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.inner import LanguageModelTask
from p2ptrain.train.learner import Learner
from p2ptrain.train.model import flat_model, shape_module
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.rules import codecs_of, fragments_of, learner_rules, matrices_of
from p2ptrain.train.stages import equal_cut, stage_model
from p2ptrain.train.team_group import Rendezvous, TeamGroup
from peer.exported_weights import write_weights

TIMEOUT_S = 300.0
SAMPLING_S = 0.01
LEAST_MAPPED = 1 << 22
SEQUENCES, TOKENS = 2, 32
PARTS = ("train", "resume", "export", "load")
OUT_OF_MEMORY_FIRST = "1000"
"""Score by which Linux ends these processes before any other one if memory runs out."""


@dataclass(frozen=True, slots=True)
class LargeCase:
    """What is trained and by how many ranks."""

    layers: int
    ranks: int
    recipe: str
    optimizer: str
    is_mapped: bool
    width: int = 2048
    device: str = "cpu"
    """Device of every rank."""

    @property
    def manifest(self) -> Manifest:
        config = {
            "hidden_size": self.width,
            "intermediate_size": 8512 * self.width // 2048,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
        changes: dict[str, Any] = {
            **{f"model.config.{name}": value for name, value in config.items()},
            "training.sequence_length": TOKENS,
            "training.sequences_per_step": SEQUENCES,
            "training.optimizer": self.optimizer,
            "outer.recipe": self.recipe,
            "outer.inner_steps": 1,
            "outer.cut": "layers",
            "outer.fragments": max(16, self.layers),
            "outer.fragments_per_exchange": 1,
            "outer.exchanges_per_step": 0 if self.recipe == "local" else 1,
        }
        return with_changes(preset("demo", "ab" * 32), changes)


class MappedZeros(TorchFunctionMode):
    """Lets large ``torch.zeros`` in this context be mapped files, which the system writes out if memory is short.

    Gradient, moments and first momentum are such: 16 bytes per parameter that need not be resident.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.mapped_bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.zeros, torch.zeros_like):
            return function(*args, **kwargs)
        like = function(*args, **{**kwargs, "device": "meta"})
        if like.numel() < LEAST_MAPPED or like.dtype != torch.float32:
            return function(*args, **kwargs)
        path = self._folder / f"mapped-{os.getpid()}"
        found = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
        path.unlink()
        self.mapped_bytes += found.nbytes
        return found.view(like.shape)


class PeakMemory:
    """Peak anonymous memory of this process by part, sampled; mapped pages of files do not count (Linux)."""

    def __init__(self) -> None:
        self.base = anonymous_bytes()
        """Before there is a model."""
        self.peaks: dict[str, int] = {}
        self._peak = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def note(self, what: str) -> None:
        """Record the peak since the last note."""
        self.peaks[what], self._peak = max(self._peak, anonymous_bytes()), 0

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, anonymous_bytes())
            time.sleep(SAMPLING_S)


def anonymous_bytes() -> int:
    """Return the resident memory of this process that belongs to no file."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def corpus(manifest: Manifest) -> Corpus:
    tokens = np.frombuffer(b"".join(b"%d times %d is %d.\n" % (n, n, n * n) for n in range(2000)), dtype=np.uint8)
    return Corpus(tokens, split_stream(len(tokens), manifest.training.sequence_length, 0.1), ByteTokenizer())


def run_rank(case: LargeCase, part: str, folder: Path, rank: int) -> dict[str, Any]:
    """Train and save, or resume and save again; return seconds and peak memory of this rank."""
    Path("/proc/self/oom_score_adj").write_text(OUT_OF_MEMORY_FIRST, encoding="ascii")
    memory, seconds, began = PeakMemory(), {}, time.monotonic()

    def done(what: str) -> None:
        nonlocal began
        memory.note(what)
        seconds[what] = time.monotonic() - began
        began = time.monotonic()

    manifest = case.manifest
    stages = equal_cut(case.layers, case.ranks)
    model = stage_model(manifest.model, manifest.run.seed, torch.device(case.device), stages[rank])
    done("build")
    group = TeamGroup(Rendezvous(folder, rank, case.ranks, PARTS.index(part)), TIMEOUT_S)
    try:
        mapped = MappedZeros(folder)
        with mapped if case.is_mapped else nullcontext():
            learner, checkpoints = learner_of(case, model, group, folder)
        if part == "train":
            while learner.step == 0:
                learner.advance()
            done("outer step")
        else:
            found = checkpoints.load_latest().checkpoint
            assert found is not None
            learner.load_state_dict(found.tensors, found.state)
            done("load")
            checkpoints = RankCheckpoints(folder / "again", group, vector_range_of(model))
        tensors, numbers = learner.state_dict()
        group.together("prepare", lambda: None)
        if rank == 0:
            TeamCheckpoints(checkpoints, _together(group)).save(tensors, {**numbers, "run": "bench"})
        else:
            group.least("save", 1)
            checkpoints.write(tensors, learner.step)
        done("checkpoint")
        loss = learner.loss
    finally:
        group.close()
    report = report_of(model.flat.layout.parameter_count, memory, seconds, loss)
    return {**report, "mapped_bytes": mapped.mapped_bytes}


def report_of(parameters: int, memory: PeakMemory, seconds: dict[str, float], loss: float) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "seconds": seconds,
        "peak_bytes": memory.peaks,
        "base_bytes": memory.base,
        "bytes_per_parameter": {what: (peak - memory.base) / parameters for what, peak in memory.peaks.items()},
        "loss": loss if math.isfinite(loss) else None,
    }


def run_alone(case: LargeCase, folder: Path) -> dict[str, Any]:
    """Train and save the whole model in this process, to compare with."""
    memory, seconds, began = PeakMemory(), dict[str, float](), time.monotonic()
    manifest = case.manifest
    model = flat_model(manifest.model, manifest.run.seed, torch.device(case.device))
    memory.note("build")
    reader = CorpusReader(manifest.run.seed, PeerId("amber"))
    task = LanguageModelTask(
        model, corpus(manifest), manifest.training, manifest.run.tokens, reader, Placement(None, 1)
    )
    fragments = fragments_of(manifest.outer, model.layout)
    codec, _ = codecs_of(manifest.codec)
    rules = learner_rules(manifest.outer, manifest.run.tokens)
    learner = Learner(task, rules, fragments, codec, MemoryLog(), matrices=matrices_of(model.layout, fragments))
    while learner.step == 0:
        learner.advance()
    memory.note("outer step")
    Checkpoints(folder / "checkpoints").save(*learner.state_dict())
    memory.note("checkpoint")
    seconds["all"] = time.monotonic() - began
    return report_of(model.layout.parameter_count, memory, seconds, learner.loss)


def learner_of(case: LargeCase, model: Any, group: TeamGroup, folder: Path) -> tuple[Learner, RankCheckpoints]:
    manifest = case.manifest
    stages = equal_cut(case.layers, case.ranks)
    fragments = fragments_of(manifest.outer, model.whole)
    first_block = [_offset(model, stage.blocks.start) if stage.index else 0 for stage in stages]
    sharding = sharding_of(fragments, first_block, model.whole.unit_lengths)
    slices = sharding.slices(group.rank)
    reader = CorpusReader(manifest.run.seed, PeerId("amber"))
    task = PipelineTask(
        model, group, corpus(manifest), manifest.training, manifest.run.tokens, reader, Placement(None, 1)
    )
    codec, gradient_codec = codecs_of(manifest.codec)
    learner = Learner(
        task,
        learner_rules(manifest.outer, manifest.run.tokens),
        slices,
        codec,
        MemoryLog(),
        gradient_codec=gradient_codec,
        matrices=matrices_of(model.flat.layout, slices),
        all_gather=group.gather,
    )
    return learner, RankCheckpoints(folder / "checkpoints", group, vector_range_of(model))


def export(case: LargeCase, folder: Path) -> dict[str, Any]:
    """Write the weights as ``p2ptrain export`` does; return seconds and peak memory."""
    memory, began = PeakMemory(), time.monotonic()
    found = load_latest(folder / "checkpoints").checkpoint
    assert found is not None
    target = folder / "export"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    module = shape_module(case.manifest.model)
    write_weights(target, found.tensors, module, folder)
    module.config.save_pretrained(target)
    memory.note("export")
    files = sorted(path.name for path in target.iterdir())
    seconds = time.monotonic() - began
    return {
        "seconds": seconds,
        "peak_bytes": memory.peaks,
        "base_bytes": memory.base,
        "files": files,
    }


def load(case: LargeCase, folder: Path) -> dict[str, Any]:
    """Load the export with transformers; return whether every weight is the checkpoint's."""
    from transformers import AutoModelForCausalLM

    found = load_latest(folder / "checkpoints").checkpoint
    assert found is not None
    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    begin, differs = 0, []
    for name, parameter in model.named_parameters():
        wanted = found.tensors.read("slow", begin, begin + parameter.numel())
        begin += -(-parameter.numel() // 16) * 16
        if not torch.equal(parameter.detach().reshape(-1), wanted):
            differs.append(name)
    return {"parameters": model.num_parameters(), "differ": differs}


def _offset(model: Any, block: int) -> int:
    """Return where a block begins in the whole flat vector."""
    return next(
        offset for name, offset in zip(model.whole.names, model.whole.offsets, strict=True) if f".{block}." in name
    )


def _together(group: TeamGroup) -> Any:
    def together(own: Any) -> Any:
        group.least("save", 1)
        return own()

    return together


def same_files(folder: Path) -> bool:
    """Return whether the resumed state was saved bit for bit as the first one."""
    documents = [
        json.loads(next((folder / name).glob("step-*/state.json")).read_text()) for name in ("checkpoints", "again")
    ]
    return bool(documents[0]["files"] == documents[1]["files"])


def run_part(case: LargeCase, part: str, folder: Path) -> dict[str, Any]:
    """Run one part in its own processes; return their reports."""
    began = time.monotonic()
    ranks = case.ranks if part in ("train", "resume") else 1
    for path in folder.glob("generation-*"):
        path.unlink()
    command = [sys.executable, "-m", "bench.large_team", "--child", json.dumps(asdict(case)), "--part", part]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank), "--out", str(folder)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0].splitlines() for process in processes]
    if any(process.returncode for process in processes):
        raise click.ClickException(f"part {part} failed; its errors are above")
    reports = [json.loads(lines[-1]) for lines in printed]
    result: dict[str, Any] = {"wall_s": time.monotonic() - began, "processes": reports}
    if part == "resume":
        result["is_bitwise"] = same_files(folder)
        shutil.rmtree(folder / "again")
    return result


@click.command()
@click.option("--layers", default=16, show_default=True, help="Blocks of 62.8 million parameters.")
@click.option("--width", default=2048, show_default=True, help="Of the residual stream.")
@click.option("--ranks", default=2, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Of every rank.")
@click.option("--recipe", default="swarm", show_default=True)
@click.option("--optimizer", default="adamw", show_default=True)
@click.option("--mapped", is_flag=True, help="Keep gradient and moments in mapped files, if memory is short.")
@click.option("--part", multiple=True, type=click.Choice(PARTS), help="Only these; by default all.")
@click.option("--out", default=Path("out/large_team"), type=click.Path(path_type=Path), show_default=True)
@click.option("--child", hidden=True)
@click.option("--rank", default=0, hidden=True)
def main(
    layers: int,
    width: int,
    ranks: int,
    device: str,
    recipe: str,
    optimizer: str,
    mapped: bool,
    part: tuple[str, ...],
    out: Path,
    child: str | None,
    rank: int,
) -> None:
    """Train a large model for one outer step in a team, save, resume and export it; measure memory."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (LargeCase(**json.loads(child)).ranks if child else ranks)))
    if child is not None:
        case = LargeCase(**json.loads(child))
        does = {"export": export, "load": load, **({"train": run_alone} if case.ranks == 1 else {})}
        report = does[part[0]](case, out) if part[0] in does else run_rank(case, part[0], out, rank)
        click.echo(json.dumps(report))
        return
    case = LargeCase(layers, ranks, recipe, optimizer, mapped, width, device)
    out.mkdir(parents=True, exist_ok=True)
    click.echo(f"{parameter_count(case.manifest.model):,} parameters, {ranks} ranks")
    target = out / "report.json"
    reports: dict[str, Any] = json.loads(target.read_text()) if part and target.exists() else {}
    for each in part or PARTS:
        reports[each] = run_part(case, each, out)
        target.write_text(json.dumps({**reports, "case": asdict(case)}, indent=1) + "\n", encoding="utf-8")
        click.echo(json.dumps({each: reports[each]}))


if __name__ == "__main__":
    main()
