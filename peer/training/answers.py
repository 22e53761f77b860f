"""Answers of a trainer, as its node checks them: its program may be anybody's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Nothing(_Answer):
    """An answer that only says that something is done."""


class Figures(_Answer):
    """What the node shows of its trainer; see ``train.tasks.TaskFigures``."""

    device_name: str
    parameter_count: int
    computes_in: str
    skipped_steps: int
    coverage: float
    micro_batch: int
    learning_rate: float
    cpu_s: float
    compiler: str


class State(_Answer):
    """What the node shows, and what another trainer needs to go on, beside the vectors."""

    figures: Figures
    counters: Annotated[list[int], Field(min_length=4, max_length=4)]
    """Steps ever made, those of the optimizer, and length and steps made of the current warm-up."""
    loss_scale: list[float]


class Begun(State):
    """The first answer."""

    guessing: float
    """Loss of a uniform prediction."""
    shares: bool
    """Whether it computes in the host vector."""


class Losses(_Answer):
    """Losses that have arrived, of the oldest steps without one."""

    losses: list[float]


class Stepped(State, Losses):
    """One inner step."""

    tokens: Annotated[int, Field(ge=1)]


class Tried(_Answer):
    """A short held-out loss."""

    loss: float


class Read(_Answer):
    """A held-out loss."""

    value: float | None
    """None: none was read, or it is not finite."""
    tokens: int
    of: int


class Text(_Answer):
    """A text that the weights write."""

    text: str
