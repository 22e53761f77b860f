"""Messages between a leader and the ``p2ptrain rank`` command of another computer: JSON with a schema.

::

    rank                      leader
    JoinMessage           -->
                          <-- WelcomeMessage (blob: the run's signed manifest), or RefusalMessage and the end
    ReadyMessage          -->                             its rank process has imported its libraries
                          <-- PlanMessage (blob: the process's plan)          a generation begins
    ReportMessage         -->                             the process has ended
                          <-- EndMessage                                      the generation has ended: kill the process
    BeatMessage           <-> every ``BEAT_S``; after ``SILENCE_S`` without any message the line counts as cut
"""

from __future__ import annotations

import threading
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.team.connection import Blob, ByteLine, RankConnection, TeamFrame
from p2ptrain.team.turn import MOST_RANKS, TeamRecord

BEAT_S = 2.0
SILENCE_S = 10.0
"""Seconds without any message after which a line counts as cut. Guess: wireless pauses."""
MOST_CONTROL_BYTES = 1 << 20
"""Maximum of a message's blob: a signed manifest, or a plan."""
LONGEST_WORDS = 400

Words = Annotated[str, Field(max_length=LONGEST_WORDS)]
Name = Annotated[str, Field(max_length=128)]


class JoinMessage(TeamRecord):
    """First message of a rank."""

    op: Literal["join"] = "join"
    version: Name
    run: Annotated[str, Field(max_length=64)] | None
    """Run that the rank's home belongs to; None: a new home."""
    name: Name
    """Name of the computer, for people."""
    device: Name


class WelcomeMessage(TeamRecord):
    op: Literal["welcome"] = "welcome"
    rank: Annotated[int, Field(gt=0, lt=MOST_RANKS)]


class RefusalMessage(TeamRecord):
    """Why a computer cannot take part; from a rank: why it cannot join this leader."""

    op: Literal["refusal"] = "refusal"
    reason: Words
    remedy: Words
    is_final: bool
    """Whether another attempt is of no use."""


class ReadyMessage(TeamRecord):
    op: Literal["ready"] = "ready"


class PlanMessage(TeamRecord):
    op: Literal["plan"] = "plan"
    meeting: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    """Random name of the generation, from which its key is derived."""


class ReportMessage(TeamRecord):
    """``RankReport`` of the rank process, or how it ended."""

    op: Literal["report"] = "report"
    kind: Literal["memory", "device", "team", "user", "error", "ended"]
    reason: Words = ""
    remedy: Words = ""


class EndMessage(TeamRecord):
    op: Literal["end"] = "end"
    is_final: bool = False
    """Whether the run has ended, so that the rank's command ends too."""


class BeatMessage(TeamRecord):
    op: Literal["beat"] = "beat"


ControlMessage = Annotated[
    JoinMessage
    | WelcomeMessage
    | RefusalMessage
    | ReadyMessage
    | PlanMessage
    | ReportMessage
    | EndMessage
    | BeatMessage,
    Field(discriminator="op"),
]

_MESSAGE: TypeAdapter[ControlMessage] = TypeAdapter(ControlMessage)


def decode_control(body: bytes) -> ControlMessage:
    """Return a message. Raises RemoteError."""
    try:
        return _MESSAGE.validate_json(body)
    except ValidationError as error:
        raise RemoteError(f"not a message of a team: {error.error_count()} fields are invalid") from None


class ControlLine:
    """Line of control messages. Any thread may send; one receives. Owns the line."""

    def __init__(self, line: ByteLine) -> None:
        self._connection = RankConnection(line, MOST_CONTROL_BYTES)
        self._sending = threading.Lock()

    def send(self, message: TeamRecord, *blobs: Blob) -> None:
        """Send a message. Raises NetworkError."""
        with self._sending:
            self._connection.send(TeamFrame(message.model_dump_json().encode(), blobs), SILENCE_S)

    def receive(self) -> tuple[ControlMessage, bytes]:
        """Return the next message and its blob, or no bytes. Raises NetworkError and RemoteError."""
        frame = self._connection.receive(SILENCE_S)
        message = decode_control(frame.body)
        if len(frame.blobs) != isinstance(message, WelcomeMessage | PlanMessage):
            self.close()
            raise RemoteError(f"{message.op} with {len(frame.blobs)} blobs")
        return message, bytes(frame.blobs[0]) if frame.blobs else b""

    def close(self) -> None:
        """End the line. Safe to call twice."""
        self._connection.close()


def beat(line: ControlLine, stops: threading.Event) -> None:
    """Send signs of life until the line ends or ``stops`` is set."""
    while not stops.wait(BEAT_S):
        try:
            line.send(BeatMessage())
        except NetworkError:
            return
