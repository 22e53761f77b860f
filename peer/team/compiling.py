"""Compilers of a team's stages, one in each rank's process."""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2ptrain.data.stream import cache_directory
from p2ptrain.manifest import Manifest
from p2ptrain.ports import Notebook
from p2ptrain.train.compiling import BackgroundCompiler
from p2ptrain.train.libraries import FOLDER
from p2ptrain.train.pipeline import PipelineTask
from peer.capacity import compiler_fault
from peer.owner.settings import CompileMode
from peer.team.processes import RankHandle


def stage_compiler(
    task: PipelineTask, manifest: Manifest, mode: CompileMode, memory_bytes: float | None, notebook: Notebook
) -> BackgroundCompiler:
    """Return the compiler of a rank's stage; entered, it works while the rank trains.

    Args:
        memory_bytes: host memory that the owner allows; None: no limit.
    """

    def obstacle() -> str:
        allowed = math.inf if memory_bytes is None else memory_bytes
        share = len(task.theta) / task.parameter_count
        return compiler_fault(manifest, task.theta.device, task.micro_batch, allowed, share)

    pace = task.pace
    return BackgroundCompiler(
        task,
        manifest.model,
        mode,
        cache_directory() / FOLDER,
        notebook,
        pace.is_training,
        pace.remaining_s,
        obstacle,
    )


class TeamCompilers:
    """The compilers of a team as its leader sees them: its own, and what the other ranks report.

    Args:
        mode: what the owner wants.
        memory_bytes: host memory that the owner allows; None: no limit.
    """

    def __init__(self, mode: CompileMode, memory_bytes: float | None, notebook: Notebook) -> None:
        self.mode: CompileMode = mode
        self.memory_bytes = memory_bytes
        self._notebook = notebook
        self._own: BackgroundCompiler | None = None
        self._ranks: Sequence[RankHandle] = ()

    def begin(self, task: PipelineTask, manifest: Manifest, ranks: Sequence[RankHandle]) -> None:
        """Compile the leader's stage in a new generation of ranks, which compile theirs."""
        self._ranks = ranks
        self._own = stage_compiler(task, manifest, self.mode, self.memory_bytes, self._notebook)
        self._own.__enter__()

    def end(self) -> None:
        """End the leader's compiler, and forget the ranks. Safe to call twice."""
        own, self._own, self._ranks = self._own, None, ()
        if own is not None:
            own.__exit__()

    def note_eager(self, rank: int, why: str) -> None:
        """Note that a rank's stage is not compiled; any thread."""
        self._notebook.note("not compiled", why=f"rank {rank}: {why}")

    @property
    def state(self) -> str:
        """What all compilers do, in one line; the same of all ranks is said once. Safe from any thread."""
        own = self._own
        if own is None:
            return ""
        states = {0: own.state, **{each.rank: each.compiler for each in self._ranks if each.compiler}}
        if len(set(states.values())) == 1:
            return own.state
        return "; ".join(f"rank {rank}: {state}" for rank, state in sorted(states.items()))
