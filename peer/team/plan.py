"""What a leader tells a rank process at its start, and what the process reports: one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from p2ptrain.base.errors import TeamError
from p2ptrain.manifest import Manifest, parameter_count
from p2ptrain.team.turn import MOST_RANKS, TeamRecord
from peer.owner.settings import CompileMode

LONGEST_LINE = 1 << 16
"""Bytes of a line."""
LONGEST_REASON = 400
LEADER_SOCKET = "leader"
"""Name of the leader's socket in the team's folder."""

Count = Annotated[int, Field(ge=0)]


class RankPlan(TeamRecord):
    """Everything that a rank needs besides the run's manifest, which it reads from the home."""

    home: str
    peer: str
    """The peer's id, by which it draws batches."""
    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    devices: Annotated[list[str], Field(min_length=2, max_length=MOST_RANKS)]
    stages: Annotated[int, Field(ge=1)]
    """Stages of the pipeline; the devices are replicas of so many."""
    generation: Count
    folder: str
    """Private folder of the rendezvous and of the leader's socket."""
    key: str
    """Key of the generation, hexadecimal."""
    data: str | None
    tokenizer: str | None
    template: str | None = None
    threads: Annotated[int, Field(ge=1)]
    compile: CompileMode
    """Whether the rank compiles its stage."""
    memory_bytes: Annotated[float, Field(gt=0)] | None
    """Host memory that the owner allows; None: no limit."""
    timeout_s: Annotated[float, Field(gt=0)]
    """Longest wait for another rank in a collective."""
    activation_bytes: Count
    """Host memory that the activations of a rank without a card may take."""
    most_sequences: Annotated[int, Field(ge=1)]
    """Maximum of sequences in a micro-batch."""
    starts: Annotated[list[int], Field(max_length=MOST_RANKS)]
    """First block of each rank; empty: the ranks measure their devices and agree on it."""

    leader: str = ""
    """Where the leader of a team on several computers listens, HOST:PORT; empty: all ranks are on one computer."""
    host: str = ""
    """Private address of this computer on which gloo listens, beside ``leader``."""
    meeting: str = ""
    """Random name of the generation, hexadecimal, beside ``leader``."""

    leader_ranks: Annotated[int, Field(ge=0, lt=MOST_RANKS)] = 0
    """Number of the ranks on the leader's computer, the first ones, beside ``leader``."""

    @property
    def device(self) -> str:
        return self.devices[self.rank]


class RankReport(TeamRecord):
    """What a rank process reports: that it has imported its libraries, or why it ends."""

    kind: Literal["ready", "alive", "compiler", "eager", "memory", "device", "team", "user", "error"]
    """alive: its threads run, whatever its device computes; repeated. compiler: what its compiler does, for ``status``.
    eager: why its stage is not compiled. memory: its device ran out of memory. device: its
    device failed. team: another rank failed first. user: a problem that the owner can solve. error: a bug, whose
    traceback is on the standard error."""
    reason: Annotated[str, Field(max_length=LONGEST_REASON)] = ""
    remedy: Annotated[str, Field(max_length=LONGEST_REASON)] = ""


PASSING = ("alive", "compiler", "eager")
"""Kinds of reports after which the process goes on."""


def most_message_bytes(manifest: Manifest) -> int:
    """Return the maximum of a message's blobs between leader and rank: both sides' payloads of the whole model."""
    return (1 << 20) + 16 * parameter_count(manifest.model)


def decode_plan(line: bytes) -> RankPlan:
    """Return the plan in a line. Raises TeamError."""
    try:
        return RankPlan.model_validate_json(line)
    except ValidationError as error:
        raise TeamError("plan", f"{error.error_count()} fields are invalid") from error


def decode_report(line: bytes) -> RankReport | None:
    """Return the report in a line; None if it holds none."""
    try:
        return RankReport.model_validate_json(line)
    except ValidationError:
        return None
