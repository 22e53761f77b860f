"""Answers of a trainer, as its node checks them: its program may be anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2ptrain.host.tasks import TaskFigures
from p2ptrain.trainer.process import TrainerHandle


class TrainerAnswer(BaseModel):
    """Any answer."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Nothing(TrainerAnswer):
    """An answer that only says that something is done."""


class State(TrainerAnswer):
    """What the node shows, and what another trainer needs to go on, beside the vectors."""

    figures: TaskFigures
    counters: Annotated[list[int], Field(min_length=4, max_length=4)]
    """Steps ever made, those of the optimizer, and length and steps made of the current warm-up."""
    loss_scale: list[float]


class Begun(State):
    """The first answer."""

    guessing: float
    """Loss of a uniform prediction."""
    shares: bool
    """Whether it computes in the host vector."""


class Stepped(State):
    """One inner step."""

    loss: float
    tokens: Annotated[int, Field(ge=1)]


class Tried(TrainerAnswer):
    """A short held-out loss."""

    loss: float | None
    """None: the text is not on this machine yet."""


class Read(TrainerAnswer):
    """A held-out loss."""

    value: float | None
    """None: none was read, or it is not finite."""
    tokens: int
    of: int


class WrittenText(TrainerAnswer):
    """A text that the weights write."""

    text: str


Kind = TypeVar("Kind", bound=TrainerAnswer)


def checked(trainer: TrainerHandle, kind: type[Kind], answer: Mapping[str, Any]) -> Kind:
    """Return a trainer's answer. Raises TrainerDiedError, after ending the trainer, if it does not fit."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise trainer.misfit(ValueError(f"{place}: {first['msg']}")) from error
