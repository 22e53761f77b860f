"""The language model's trainer in the node's own process, so that tests see and change what it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import Notebook
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.process import OnNote
from peer.training.language_trainer import LanguageTrainer, _run_of
from peer.training.plan import TrainerPlan

Memory = Callable[[FlatLayout, int], tuple[HostVector, bool]]


class InProcessTrainer:
    """Fake of ``TrainerHandle``, and of the ``Attachment`` of its trainer."""

    pid = 0

    def __init__(self, command: Sequence[str], notebook: Notebook, ranks: int = 1, waits: object = None) -> None:
        self.note = notebook.note
        self._trainer: LanguageTrainer | None = None
        self._on_note: OnNote = lambda note: True
        self._has_enough = False
        self._questions: list[Callable[[], Any]] = []

    def attach(self, plan: Mapping[str, Any], memory: Memory) -> dict[str, Any]:
        self._memory = memory
        given = TrainerPlan.model_validate_json(json.dumps(plan))
        self._trainer = LanguageTrainer(self, given, _run_of(given).manifest)  # type: ignore[arg-type]  # a fake
        self._trainer.compiler.__enter__()
        return self._trainer.begin()

    def ask(self, name: str, on_note: OnNote = lambda note: True, **arguments: Any) -> Any:
        self._on_note, self._has_enough = on_note, False
        return getattr(self._trainer, name)(**arguments)

    def post(self, name: str, **arguments: Any) -> None:
        self._questions.append(partial(self.ask, name, **arguments))

    def answer(self) -> Any:
        return self._questions.pop(0)()

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.compiler.__exit__()

    kill = close

    # --- of the attachment --------------------------------------------------------------------------------------------

    def host_vector(self, layout: FlatLayout, vectors: int) -> tuple[HostVector, bool]:
        return self._memory(layout, vectors)

    def say(self, **note: Any) -> None:
        self._has_enough = not self._on_note(note)

    def has_enough(self) -> bool:
        return self._has_enough
