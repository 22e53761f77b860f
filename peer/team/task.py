"""The inner task of a team as the application sees it, through the leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2ptrain.team.trainer import LeadingTrainer
from p2ptrain.train.evaluate import GoesOn, HeldOutLoss
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.replicas import Mesh

FIGURES = ("parameter_count", "computes_in", "skipped_steps", "coverage", "micro_batch", "learning_rate")
"""Names of ``train.tasks.TaskFigures`` that the leader's task has."""


class LeadingTask:
    """``train.tasks.PeerTask`` for the leader's session, whatever generation of ranks trains.

    Args:
        devices: names of all ranks'.
        mesh: their arrangement.
        trainer: lets the other ranks take part in an evaluation.
        own: returns the leader's task in the current generation; None between generations.
    """

    cpu_s = 0.0

    def __init__(
        self,
        devices: Sequence[str],
        mesh: Mesh,
        trainer: LeadingTrainer,
        own: Callable[[], PipelineTask | None],
    ) -> None:
        replicas = f" ({mesh})" if mesh.replicas > 1 else ""
        self.device_name = " + ".join(devices) + replicas
        self._trainer = trainer
        self._own = own
        self._known: dict[str, Any] = {}
        self._read()

    @property
    def parameter_count(self) -> int:
        value: int = self._read()["parameter_count"]
        return value

    @property
    def computes_in(self) -> str:
        value: str = self._read()["computes_in"]
        return value

    @property
    def skipped_steps(self) -> int:
        value: int = self._read()["skipped_steps"]
        return value

    @property
    def coverage(self) -> float:
        value: float = self._read()["coverage"]
        return value

    @property
    def micro_batch(self) -> int:
        value: int = self._read()["micro_batch"]
        return value

    @property
    def learning_rate(self) -> float:
        value: float = self._read()["learning_rate"]
        return value

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss on all ranks (``PeerTask.held_out_loss``). Raises TeamError."""
        task = self._own()
        assert task is not None, "the trainer evaluates within a generation"
        return self._trainer.evaluate(most_tokens, lambda: task.held_out_loss(most_tokens, patience_s, goes_on))

    def _read(self) -> dict[str, Any]:
        """Return the current figures, between generations the last ones."""
        if (task := self._own()) is not None:
            self._known = {name: getattr(task, name) for name in FIGURES}
        return self._known

    def sample(self, new_tokens: int) -> str:
        """Return no text: stages generate none."""
        return ""
