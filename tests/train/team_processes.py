"""Teams of a test: processes that run ``team_rank.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file
from team_rank import Case, told

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("team_rank.py")


class Rank:
    """A process that is one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        command = [sys.executable, str(SCRIPT), str(folder), str(rank)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, case: Case) -> None:
        self.process.stdin.write(told(case) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Team:
    """Ranks that live for several cases, because they take seconds to start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[Rank] = []
        self._generations = count()

    def tell(self, case: Case) -> Case:
        case = replace(case, generation=next(self._generations))
        while len(self.ranks) < case.ranks:
            self.ranks.append(Rank(self.folder, len(self.ranks)))
        for rank in self.ranks[: case.ranks]:
            rank.tell(case)
        return case

    def run(self, case: Case) -> tuple[list[dict], dict[str, torch.Tensor]]:
        """Return the ranks' answers, and their tensors end to end."""
        case = self.tell(case)
        answers = [rank.answer() for rank in self.ranks[: case.ranks]]
        return answers, self.tensors(case, 0)

    def tensors(self, case: Case, replica: int) -> dict[str, torch.Tensor]:
        """Return what a replica's ranks have saved, end to end."""
        ranks = case.mesh.pipelines[replica]
        parts = [load_file(self.folder / f"{case.generation}-{rank}.safetensors") for rank in ranks]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def lose(self, rank: int) -> None:
        self.ranks[rank].end()
        del self.ranks[rank]

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
