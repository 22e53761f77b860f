"""One rank of a test's team, a process of its own: ``python team_rank.py FOLDER RANK``, then one case a line on stdin.

For each case it forms a group of its own generation, trains, writes ``GENERATION-RANK.safetensors`` into the folder and
prints a JSON object. Ranks beyond a case's size skip it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from packed import packed_corpus
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from p2ptrain.base.errors import TeamError
from p2ptrain.base.ids import PeerId
from p2ptrain.data.corpus import Corpus
from p2ptrain.data.split import split_stream
from p2ptrain.data.tokenizer import ByteTokenizer
from p2ptrain.manifest import Manifest, preset, with_changes
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.boundary import Boundary
from p2ptrain.train.inner import COMPILED, LanguageModelTask
from p2ptrain.train.model import flat_model
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.replicas import Mesh, Replicas, ReplicatedTask, shares
from p2ptrain.train.stage_lines import line_bytes_per_s
from p2ptrain.train.stages import StageModel, StageRange, equal_cut, stage_model
from p2ptrain.train.team_group import Rendezvous, TeamGroup

CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("P2PTRAIN_TEST_DEVICE", "cpu"))
"""Device of every rank, so that one card can stand for several (docs/CARD-QUEUE.md)."""
BLOCKS, SEQUENCES, MICRO_BATCH, TOKENS = 4, 8, 2, 16
HELD_OUT = 256
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.02,
    "norm_epsilon": 1e-5,
}
GROUPED = {"hidden_act": "silu", "rope_theta": 10_000.0, "num_key_value_heads": 1}
FIELDS = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 32},
    "Gemma3ForCausalLM": {
        **GROUPED,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 10,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 1_000.0,
    },
    "Olmo2ForCausalLM": GROUPED,
    "SmolLM3ForCausalLM": {**GROUPED, "no_rope_layer_interval": 3},
    "GPT2LMHeadModel": {"hidden_act": "gelu_new"},
    "GPTNeoXForCausalLM": {"hidden_act": "gelu", "rope_theta": 10_000.0},
}


@dataclass(frozen=True)
class Case:
    """What a team trains, and what goes wrong."""

    architecture: str = "LlamaForCausalLM"
    ranks: int = 2
    replicas: int = 1
    optimizer: str = "adamw"
    tied: bool = False
    clip: float = 1.0
    compute: str = "float32"
    boundary: str = "fp32"
    micro_batch: int = MICRO_BATCH
    steps: int = 3
    timeout_s: float = 60.0
    fails: str = ""  # "dies", "freezes" or "memory": what the last rank does after its first step
    at: str = ""  # method of its task in which it fails; empty: the backward pass
    generation: int = 0
    packed: bool = False  # whether it trains on dialogues
    libraries: str = ""  # folder of the ranks' compiled passes; empty: all compute eagerly

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.compute == "float32" else getattr(torch, self.compute)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.ranks // self.replicas, self.replicas)

    @property
    def manifest(self) -> Manifest:
        config = {**SHAPE, **FIELDS[self.architecture], "tie_word_embeddings": self.tied}
        changes = {
            "model": {"architecture": self.architecture, "config": config},
            "training.sequence_length": TOKENS,
            "training.sequences_per_step": SEQUENCES,
            "training.warmup_tokens": 128,
            "training.optimizer": self.optimizer,
            "training.gradient_clip": self.clip,
            "training.learning_rate": 3e-3,
            "run.tokens": 6400,
        }
        return with_changes(preset("demo", "ab" * 32), changes)


def stages(case: Case) -> tuple[StageRange, ...]:
    """Return stages of 2 and 2, or of 1, 1 and 2 blocks."""
    return equal_cut(BLOCKS, case.mesh.stages)


def corpus(manifest: Manifest, packed: bool = False) -> Corpus:
    if packed:
        return packed_corpus(manifest.training.sequence_length)
    text = "".join(f"{number} times {number} is {number * number}.\n" for number in range(200)).encode()
    tokens = np.frombuffer(text, dtype=np.uint8)
    return Corpus(tokens, split_stream(len(tokens), manifest.training.sequence_length, 0.1), ByteTokenizer())


def rest(case: Case) -> tuple:
    """Return the arguments that both kinds of tasks take last."""
    manifest = case.manifest
    reader = CorpusReader(manifest.run.seed, PeerId("alice"))
    placement = Placement(case.autocast, case.micro_batch)
    return corpus(manifest, case.packed), manifest.training, manifest.run.tokens, reader, placement


def whole_task(case: Case) -> LanguageModelTask:
    manifest = case.manifest
    return LanguageModelTask(flat_model(manifest.model, manifest.run.seed, DEVICE), *rest(case))


def train(task: LanguageModelTask, case: Case) -> list[float]:
    """Make the case's steps, with a reset and a displacement of the weights on the way; return the losses."""
    losses = []
    for step in range(case.steps):
        if step == 2:
            task.reset(2)
            task.theta.mul_(0.99)
        losses.append(task.inner_step(step * SEQUENCES * TOKENS).loss)
    return losses


def results(task: LanguageModelTask) -> dict[str, torch.Tensor]:
    """Return what has to be equal; the last gradient is clipped, and Muon overwrites it."""
    state = task.state_dict()
    names = ("first_moment", "second_moment")
    return {"theta": task.theta, "gradient": task._gradient, **{name: state[name] for name in names}}


def fail(task: PipelineTask, how: str, at: str) -> None:
    """Let this rank fail in its next step."""

    def hook(*arguments: object) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("CUDA error: out of memory")

    if at:
        setattr(task, at, hook)
    else:
        task.stage_model.output.register_hook(hook)


def run(case: Case, folder: Path, rank: int) -> dict[str, object]:
    group = TeamGroup(Rendezvous(folder, rank, case.ranks, case.generation), case.timeout_s)
    manifest = case.manifest
    model = stage_model(manifest.model, manifest.run.seed, DEVICE, stages(case)[case.mesh.stage(rank)])
    try:
        task = pipeline_task(case, model, group)
        if rank >= case.mesh.stages:
            return follow(task, case, folder, rank)
        if case.fails:
            task.inner_step(0)
            if rank == case.ranks - 1:
                fail(task, case.fails, case.at)
        if case.libraries:
            use_library(task, case, rank)
        losses = train(task, case)
        save_file(results(task), folder / f"{case.generation}-{rank}.safetensors")
        held_out = task.held_out(HELD_OUT, math.inf).loss()
        answer = {"losses": losses, "held_out": held_out, "listens_on": listening(), "said": say(task.group)}
        return {**answer, "is_line_fast": line_bytes_per_s(task.group) > 1e5}
    except TeamError as error:
        return {"error": str(error), "kind": type(error).__name__}
    finally:
        group.close()


def use_library(task: PipelineTask, case: Case, rank: int) -> None:
    """Let a rank compute by its compiled pass alone, without comparing it."""
    path, shape = Path(case.libraries) / f"{rank}.so", task.pass_shape(case.manifest.model)
    task.offer(path, shape, lambda way, ratio: None, lambda why: None)
    assert task.compiled is not None
    task.compiled.choice._chosen = COMPILED


def pipeline_task(case: Case, model: StageModel, group: TeamGroup) -> PipelineTask:
    if case.replicas == 1:
        return PipelineTask(model, group, *rest(case), Boundary(case.boundary))
    pipeline = group.part("connecting the stages", case.mesh.pipelines)
    counts = shares(SEQUENCES // case.micro_batch, case.mesh.stages, [1.0] * case.replicas)
    return ReplicatedTask(
        model, pipeline, *rest(case), Boundary(case.boundary), replicas=Replicas.of(group, case.mesh, counts)
    )


def follow(task: PipelineTask, case: Case, folder: Path, rank: int) -> dict[str, object]:
    """Follow the first replica until it closes its connections; save what this one then has."""
    assert isinstance(task, ReplicatedTask)
    if case.fails and rank == case.ranks - 1:
        backward = task._backward

        def failing(batch: torch.Tensor) -> torch.Tensor:
            if task.step:
                fail(task, case.fails, case.at)
            return backward(batch)

        task._backward = failing
    try:
        task.follow_replica()
    except TeamError as error:
        if case.fails:
            raise
        save_file(results(task), folder / f"{case.generation}-{rank}.safetensors")
        return {"ended": str(error), "listens_on": listening()}


def say(group: TeamGroup) -> list[object]:
    """Exchange numbers and bytes of different lengths; return what this rank heard."""
    own = torch.arange(group.rank, dtype=torch.float64) + 10 * group.rank
    heard: list[object] = [group.gather("numbers", own).tolist(), group.least("least", 7 - group.rank)]
    for body in (b"", b"turn"):
        heard.append(group.broadcast("turn", body if group.rank == 0 else b"not read", 4).decode())
    try:
        group.broadcast("turn", b"much too long", 4)
    except ValueError as error:
        heard.append(str(error))
    return heard


def listening() -> list[str]:
    """Return the addresses on which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return sorted({each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN})


def forbid_pickles() -> None:
    """Let every collective of objects fail, sent or received."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("an object would be pickled")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        assert hasattr(distributed_c10d, name)
        setattr(distributed_c10d, name, refuse)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    forbid_pickles()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        if rank < case.ranks:
            sys.stdout.write(json.dumps(run(case, folder, rank)) + "\n")
            sys.stdout.flush()


def told(case: Case) -> str:
    return json.dumps(asdict(case))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
