"""Checkpoints of a team: each rank writes its own fragments, and one rename by the leader makes the whole durable.

All ranks see the same directory. No process holds more than its own part, and any number of ranks, or one process,
resumes what others saved. A rank that dies or cannot write leaves a temporary directory that nobody loads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from p2ptrain.base.errors import HomeError
from p2ptrain.checkpoint import (
    TORN,
    Checkpoint,
    Checkpoints,
    Found,
    Share,
    Torn,
    VectorRange,
    checkpoints_in,
    explained,
    load,
    parts,
    plainly,
    write_part,
)
from p2ptrain.train.stages import StageModel
from p2ptrain.train.team_group import TeamGroup

if TYPE_CHECKING:
    from p2ptrain.ports import Saved

T = TypeVar("T")

DIGEST_WORDS = 4
"""int64 numbers of a BLAKE3 digest."""
IS_TORN, IS_UNREADABLE, IS_WHOLE = range(3)
"""What a rank finds of its share of a checkpoint; the least of all ranks decides, as a torn file hardly opens."""


def vector_range_of(model: StageModel) -> VectorRange:
    """Return a stage's part of the whole flat vector."""
    return VectorRange(model.offset, model.offset + model.flat.layout.total, model.whole.total)


class RankCheckpoints:
    """One rank's part in the checkpoints of a directory. Its methods are collectives of all ranks.

    Args:
        directory: the same on all ranks.
        group: the team.
        vector_range: the rank's part of the flat vectors (``vector_range_of``).
    """

    def __init__(self, directory: Path, group: TeamGroup, vector_range: VectorRange) -> None:
        self.known = Checkpoints(directory)
        """What the leader's session knows of the directory."""
        self._directory = directory
        self._group = group
        self._share = Share(group.rank, group.size, vector_range)

    def load_latest(self) -> Found:
        """Load the newest checkpoint that is whole for all ranks; its vectors are the rank's parts.

        Each rank checks its share of the files. Torn checkpoints are reported, and nothing is changed. Raises HomeError
        on all ranks if one of them cannot read, TeamError.
        """
        there = self._steps()
        passed_over: list[Torn] = []
        for step, path in there.items():
            found = self._group.together(f"checkpoint {step}: check", partial(self._attempt, path))
            if isinstance(found, Checkpoint):
                own, reason = IS_WHOLE, "a part of another rank is damaged"
            else:
                own, reason = (IS_TORN if isinstance(found, TORN) else IS_UNREADABLE), plainly(found)
            verdict = self._group.least(f"checkpoint {step}: verdict", own)
            if verdict == IS_UNREADABLE:
                if isinstance(found, Exception):
                    raise found
                raise HomeError(f"A rank of this peer cannot read {path}; nothing was changed.", "See its message.")
            if verdict == IS_WHOLE and isinstance(found, Checkpoint):
                return self._told(Found(found, tuple(passed_over)), there)
            passed_over.append(Torn(path, reason))
        return self._told(Found(None, tuple(passed_over)), there)

    def write(self, tensors: Mapping[str, Saved], step: int) -> list[str]:
        """Write this rank's file of a checkpoint that the leader has prepared; return all ranks' digests.

        Raises OSError on all ranks if one of them could not write, TeamError.
        """
        if self._share.rank:
            length = self._length
            tensors = {name: saved for name, saved in tensors.items() if _elements(saved) == length}
        outcome = self._group.together(f"checkpoint {step}: files", lambda: self._write(tensors, step))
        outcomes = self._group.gather(f"checkpoint {step}: digests", outcome).view(self._group.size, -1)
        for number in outcomes[:, 0].tolist():
            if number:
                raise OSError(number, os.strerror(number))
        return [row.numpy().tobytes().hex() for row in outcomes[:, 1:].contiguous()]

    def names(self) -> list[str]:
        """Return the names of all ranks' files."""
        return [Share(rank, self._share.ranks).file for rank in range(self._share.ranks)]

    @property
    def _length(self) -> int:
        vector_range = self._share.vector_range
        assert vector_range is not None
        return vector_range.end - vector_range.begin

    def _write(self, tensors: Mapping[str, Saved], step: int) -> Tensor:
        """Write this rank's file; return an error's number, or 0, and the digest, [1 + DIGEST_WORDS]."""
        outcome = torch.zeros(1 + DIGEST_WORDS, dtype=torch.int64)
        try:
            digest = write_part(self._directory, step, self._share, tensors)
            outcome[1:] = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.int64)
        except OSError as error:
            outcome[0] = error.errno or errno.EIO
        return outcome

    def _steps(self) -> dict[int, Path]:
        """Return the checkpoints that the leader sees, the newest first."""
        mine, unreadable = [], None
        if self._share.rank == 0:
            try:
                with explained(lambda: self._directory):
                    mine = sorted(checkpoints_in(self._directory), reverse=True)
            except HomeError as error:
                unreadable = error
        status = [int(unreadable is not None), *mine] if self._share.rank == 0 else []
        found = self._group.gather("checkpoints", torch.tensor(status, dtype=torch.int64)).tolist()
        if unreadable is not None:
            raise unreadable
        if found[0]:
            raise HomeError(f"The leader of this peer cannot read {self._directory}.", "See its message.")
        there = checkpoints_in(self._directory)
        return {step: there.get(step, self._directory / f"step-{step:08d}") for step in found[1:]}

    def _attempt(self, path: Path) -> Checkpoint | Exception:
        """Load one checkpoint, or return why that failed."""
        try:
            with explained(lambda: path):
                return load(path, self._share)
        except (*TORN, HomeError) as error:
            return error

    def _told(self, found: Found, there: Mapping[int, Path]) -> Found:
        self.known.know(found, set(there))
        return found


class Together(Protocol):
    """``LeadingTrainer.save`` or another turn of it: lets all ranks begin, then does the leader's part."""

    def __call__(self, own: Callable[[], T]) -> T: ...


class TeamCheckpoints:
    """``checkpoint.CheckpointStore`` of a team, for its leader's trainer thread.

    Args:
        own: the leader's part.
        together: lets the other ranks call ``RankCheckpoints.write``.
    """

    def __init__(self, own: RankCheckpoints, together: Together) -> None:
        self._own = own
        self._together = together

    def restart(self, own: RankCheckpoints) -> None:
        """Use the leader's part in a new generation of ranks."""
        self._own = own

    @property
    def digest(self) -> str | None:
        """``Checkpoints.digest``."""
        return self._own.known.digest

    def load_latest(self) -> Found:
        """``RankCheckpoints.load_latest``."""
        return self._own.load_latest()

    def save(
        self,
        tensors: Mapping[str, Saved],  # the leader's part
        state: Mapping[str, Any],
    ) -> Path:
        """Let all ranks write their parts and make the whole durable, as ``Checkpoints.save``. Raises HomeError."""
        own, step = self._own, state["step"]
        own.known.prepare(step)
        with own.known.cleaned(step):
            digests = self._together(lambda: own.write(tensors, step))
        return own.known.conclude(state, dict(zip(own.names(), digests, strict=True)))


def _elements(saved: Saved) -> int:
    return sum(part.numel() for part in parts(saved))
