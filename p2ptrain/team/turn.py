"""The turn: a record that the leader broadcasts before each inner step, so that all ranks do the same.

A turn is four fixed bytes, which say the version, and JSON. Ranks trust each other, but a decoder checks
everything: a rank of another version is an error and not a wrong model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2ptrain.base.errors import TeamError
from p2ptrain.train.team_group import TeamGroup

MOST_DELIVERIES = 64
"""Maximum number of deliveries in a turn; the others wait for the next one."""
MOST_RELEASED = 1024
MOST_RANKS = 256
MOST_BYTES = 1024 + MOST_DELIVERIES * (512 + 4 * MOST_RANKS) + 20 * MOST_RELEASED
"""Room for the longest turn: 512 bytes of a delivery, 4 of an owner, 20 of a released number."""

_HEADER = b"pt\x01\n"

Count = Annotated[int, Field(ge=0, lt=2**63)]


class TeamRecord(BaseModel):
    """Base class of what ranks tell each other: strict types, no unknown fields, finite numbers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class DisplacementRecord(TeamRecord):
    """``train.inbox.Displacement`` without its tensors, which the owners have."""

    kind: Literal["displacement"] = "displacement"
    serial: Count
    exchange: Count
    """Number of the exchange at the owners' shards."""
    owners: Annotated[list[Annotated[int, Field(ge=0, lt=MOST_RANKS)]], Field(max_length=MOST_RANKS)]
    share: Annotated[float, Field(ge=0, le=1)]
    clip_radius: Annotated[float, Field(ge=0)] | None
    """None: no limit."""
    progress: float
    finished: bool
    follow: Annotated[float, Field(ge=0, le=1)]


class RoundRecord(TeamRecord):
    """``train.inbox.RoundFinished``."""

    kind: Literal["round"] = "round"
    step: Count


class AdoptionRecord(TeamRecord):
    """``train.inbox.Adoption`` without its tensors, which the owners have."""

    kind: Literal["adoption"] = "adoption"
    adoption: Count
    """Number of the download at the owners' shards."""
    step: Count
    progress: float
    left_behind: bool = False


DeliveryRecord = Annotated[DisplacementRecord | RoundRecord | AdoptionRecord, Field(discriminator="kind")]

TurnAction = Literal["advance", "settle", "evaluate", "save", "save_trained", "gather", "stop"]
"""advance: ``Learner.advance``. settle: ``Learner.settle``, also to show that the leader lives. evaluate: the held-out
loss. save: a checkpoint. save_trained: the slow weights at the end of training. gather: wait while the leader reads the
slow weights of all ranks. stop: no further turn follows."""


class Turn(TeamRecord):
    """What all ranks do next."""

    number: Count
    """Turns are numbered from 1 within a generation of the team."""
    action: TurnAction
    peers: Annotated[float, Field(gt=0)]
    """Number of peers that train (``Learner.peers``)."""
    tokens: Count = 0
    """Held-out tokens to read, for ``evaluate``."""
    deliveries: list[DeliveryRecord] = Field(max_length=MOST_DELIVERIES, default_factory=list)
    released: list[Count] = Field(max_length=MOST_RELEASED, default_factory=list)
    """Exchanges, donations and downloads that the leader no longer needs."""


def encode_turn(turn: Turn) -> bytes:
    """Return a turn as bytes. Raises ValueError (a bug) if it is too long."""
    body = turn.model_dump_json().encode()
    if len(_HEADER) + len(body) > MOST_BYTES:
        raise ValueError(f"a turn of {len(body)} bytes is longer than {MOST_BYTES}")
    return _HEADER + body


def decode_turn(data: bytes) -> Turn:
    """Return the turn in these bytes. Raises TeamError."""
    if data[: len(_HEADER)] != _HEADER:
        raise TeamError("turn", "the leader runs another version of p2ptrain")
    body = data[len(_HEADER) :]
    try:
        return Turn.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TeamError("turn", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def send_turn(group: TeamGroup, turn: Turn) -> None:
    """Broadcast a turn from rank 0, a collective with ``receive_turn``. Raises TeamError."""
    group.broadcast(f"turn {turn.number}", encode_turn(turn), MOST_BYTES)


def receive_turn(group: TeamGroup, number: int) -> Turn:
    """Receive the turn of this number. Raises TeamError."""
    name = f"turn {number}"
    try:
        turn = decode_turn(group.broadcast(name, b"", MOST_BYTES))
    except ValueError as error:
        raise TeamError(name, str(error)) from error
    if turn.number != number:
        raise TeamError(name, f"the leader is at turn {turn.number}")
    return turn
