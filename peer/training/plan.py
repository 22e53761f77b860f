"""What a node tells the language model's trainer at its start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from p2ptrain.base.ids import PeerId
from peer.owner.settings import CompileMode

VECTORS = ("theta", "first_moment", "second_moment", "displacement")
"""Vectors of the host vector, in order. The last one passes displacements to cards, and weights from them."""

OWNERS_FAULT = 2
"""Exit status of ranks and launchers that have told this computer's owner what to mend."""
REMOTE = "P2PTRAIN_RANK"
"""Environment variable with the ``RemotePlan`` of a rank on another computer than its node."""

LAUNCHER = "P2PTRAIN_LAUNCHER"
"""Environment variable with the process id of torch's launcher, after which a rank ends, even if it ended first."""


class RemotePlan(BaseModel):
    """What the owner of another computer says about the rank there; all else is the node's ``TrainerPlan``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    home: str
    device: str
    threads: int
    weights: str | None


class TrainerPlan(BaseModel):
    """Plan of one trainer. The run is that of the manifest in the home."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    home: str
    peer: PeerId
    devices: tuple[str, ...]
    """Names for ``choose_device``, of the ranks, in order; a rank on another computer has its own."""
    at: str | None = None
    """Address on which this computer waits for others; None: there are none."""
    others: int = 0
    """Ranks on other computers, each the only one there; they are the last ones."""
    stages: int
    """Stages of each replica; the ranks are replicas x stages."""
    threads: int
    """Threads of torch in each rank."""
    activation_bytes: int
    """Host memory for activations, as ``autofit.place`` takes it."""
    most_sequences: int
    """Largest micro-batch."""
    store: str
    """Directory of the shards of text."""
    index: str | None
    """The index of the run's text; None: the text ships with the package."""
    weights: str | None
    begins: bool
    """Whether the run's initial weights are needed; else the host vector gets or holds others."""
    tried_tokens: int
    """Held-out text of the test of a donor's weights, and seconds to read it."""
    tried_s: float
    compile: CompileMode
    memory_bytes: float | None
    """Host memory that the peer plans with; None: all."""
    shares: bool = True
    """Whether a trainer on the CPU computes in the host vector; tests let it copy, as from a card."""

    @property
    def own_ranks(self) -> int:
        """Ranks on this computer."""
        return len(self.devices) - self.others

    @property
    def command(self) -> tuple[str, ...]:
        """The language model's trainer and its arguments."""
        python, launcher, ranks = (sys.executable, "-P", "-m"), "peer.training.launch", str(self.own_ranks)
        if self.at is not None:
            return *python, launcher, ranks, self.at, str(1 + self.others), "0"
        return (*python, launcher, ranks) if self.own_ranks > 1 else (*python, "peer.training.language_trainer")

    def path(self, name: str) -> Path | None:
        """Return a file of the plan."""
        found: str | None = getattr(self, name)
        return None if found is None else Path(found)


def with_own(plan: TrainerPlan, rank: int) -> TrainerPlan:
    """Return the plan of a rank on another computer, with what that computer's owner has named."""
    own = RemotePlan.model_validate_json(os.environ[REMOTE])
    devices = tuple(own.device if each == rank else name for each, name in enumerate(plan.devices))
    return plan.model_copy(update={**own.model_dump(exclude={"device"}), "devices": devices})
