"""Requests of the leader to another rank's shard, and the answers: JSON with a schema, beside which blobs travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from p2ptrain.base.errors import RemoteError
from p2ptrain.swarm.download_plan import Span
from p2ptrain.team.connection import MOST_NUMBERS
from p2ptrain.team.shard import PendingExchange
from p2ptrain.team.turn import Count, TeamRecord
from p2ptrain.train.widths import Fit, WidthFeedback

LONGEST_REASON = 500
MOST_SPAN_BYTES = 1 << 62

Offset = Annotated[int, Field(ge=0, le=MOST_SPAN_BYTES)]


class PendingRecord(TeamRecord):
    """``shard.PendingExchange``."""

    serial: Count
    exchange: Count
    share: Annotated[float, Field(ge=0, le=1)]
    clip_radius: Annotated[float, Field(ge=0)] | None

    def pending(self) -> PendingExchange:
        radius = float("inf") if self.clip_radius is None else self.clip_radius
        return PendingExchange(self.serial, self.exchange, self.share, radius)


class SpanRecord(TeamRecord):
    """``swarm.download_plan.Span``."""

    fragment: Count
    start: Offset
    stop: Offset

    def span(self) -> Span:
        return Span(self.fragment, self.start, self.stop)


class OpenRequest(TeamRecord):
    op: Literal["open"] = "open"
    exchange: Count
    turn: Count
    fragments: Annotated[list[Count], Field(max_length=MOST_NUMBERS)]
    pending: Annotated[list[PendingRecord], Field(max_length=MOST_NUMBERS)]


class ExchangeRequest(TeamRecord):
    """Proposals; ``Shard.encode`` with both sides' proposals as blobs; ``Shard.compare`` with their parts as blobs."""

    op: Literal["proposals", "encode", "compare"]
    exchange: Count


class JudgeRequest(TeamRecord):
    op: Literal["judge"] = "judge"
    exchange: Count
    verdict: str

    @field_validator("verdict")
    @classmethod
    def _is_known(cls, verdict: str) -> str:
        if verdict not in WidthFeedback.__members__:
            raise ValueError("not a verdict")
        return verdict

    def feedback(self) -> WidthFeedback:
        return WidthFeedback[self.verdict]


class OpenSlowRequest(TeamRecord):
    op: Literal["open_slow"] = "open_slow"
    donation: Count
    turn: Count


class PieceRequest(TeamRecord):
    """``Shard.piece``, and ``Shard.store`` with the piece as a blob."""

    op: Literal["piece", "store"]
    number: Count
    span: SpanRecord


class SketchRequest(TeamRecord):
    op: Literal["sketch"] = "sketch"
    download: Count | None
    """None: the current weights."""
    span: SpanRecord
    seed: Count


class CheckRequest(TeamRecord):
    op: Literal["check"] = "check"
    download: Count


class ZeroRequest(TeamRecord):
    op: Literal["are_zero"] = "are_zero"


ShardRequest = Annotated[
    OpenRequest
    | ExchangeRequest
    | JudgeRequest
    | OpenSlowRequest
    | PieceRequest
    | SketchRequest
    | CheckRequest
    | ZeroRequest,
    Field(discriminator="op"),
]


class FitRecord(TeamRecord):
    """``train.widths.Fit``; messages of strangers may make its numbers infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    sketched: float
    unexplained: float
    blocks: Count
    wrapped: float
    is_known: bool

    def fit(self) -> Fit:
        return Fit(self.sketched, self.unexplained, self.blocks, self.wrapped, self.is_known)


class ShardAnswer(TeamRecord):
    """Answer to any request; blobs have what is not a number."""

    failure: Literal["", "network", "remote", "value"] = ""
    """Kind of the error that the shard raised: NetworkError, RemoteError or ValueError."""
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    norms: list[float] = Field(max_length=MOST_NUMBERS, default_factory=list)
    fits: list[FitRecord] = Field(max_length=MOST_NUMBERS, default_factory=list)
    are_zero: bool = False


_REQUEST: TypeAdapter[ShardRequest] = TypeAdapter(ShardRequest)


def decode_request(body: bytes) -> ShardRequest:
    """Return a request. Raises RemoteError."""
    try:
        return _REQUEST.validate_json(body)
    except ValidationError as error:
        raise RemoteError(f"not a request of a leader: {_first(error)}") from None


def decode_answer(body: bytes) -> ShardAnswer:
    """Return an answer. Raises RemoteError."""
    try:
        return ShardAnswer.model_validate_json(body)
    except ValidationError as error:
        raise RemoteError(f"not an answer of a shard server: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"[:LONGEST_REASON]
