"""What the layers ask of each other: five small protocols, each with a real side and a fake that ships beside it.

=============  ==============================  =================================
port           real                            fake
=============  ==============================  =================================
InnerTask      train.inner.LanguageModelTask   sim.learners.QuadraticTask
Link           net.links.StreamLink            net.memory.MemoryLink
Transport      net.transport.P2PTransport      net.memory.MemoryTransport
Directory      net.directory.DhtDirectory      net.memory.MemoryDirectory
Notebook       telemetry.EventLog              telemetry.MemoryLog
=============  ==============================  =================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm import Presence

if TYPE_CHECKING:
    from torch import Tensor


class InnerTask(Protocol):
    """The inner optimization: a model's flat weights and one step of training on them. Owned by the trainer thread."""

    @property
    def theta(self) -> Tensor:
        """[P] fp32 on the training device: the fast weights, in place. Writing to it moves the model."""

    def inner_step(self, progress: float) -> StepResult:
        """Move ``theta`` by one inner step at the given progress (tokens per peer; schedules read it)."""

    def reset(self, warmup_steps: int) -> None:
        """Forget the inner optimizer's state and warm it up again: ``theta`` was replaced by a donor's weights."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that ``inner_step`` depends on beside ``theta``: flat tensors (optimizer moments, counters)."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``; raises KeyError or ValueError where it does not fit."""


class HeldOut(Protocol):
    """How good the fast weights are, as they stand. Owned by the trainer thread."""

    @property
    def guessing(self) -> float:
        """Nats a token: the loss of whoever knows nothing, ln(vocabulary)."""

    def loss(self) -> float:
        """Nats a token, over held-out text. Training is not disturbed."""


class StepResult(Protocol):
    """What one inner step did."""

    @property
    def loss(self) -> float: ...

    @property
    def tokens(self) -> int: ...


class Link(Protocol):
    """One two-way stream of frames to one partner. Any call may raise NetworkError or RemoteError, nothing else."""

    peer: PeerId

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        """Send one frame; returns when the transport has taken it (back-pressure)."""

    async def receive(self) -> tuple[int, bytes]:
        """The next frame's kind and body. RemoteError on a malformed or oversized frame, NetworkError at the end."""

    async def close(self) -> None:
        """Close both directions. Safe to call twice."""


class Transport(Protocol):
    """Opens links and takes in those that others open."""

    async def open(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        """Dial a peer. Raises NetworkError."""

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        """Call ``handler`` for every inbound link; the link is closed when it returns."""


class Directory(Protocol):
    """Where live peers of the run are found."""

    async def announce(self, presence: Presence) -> None:
        """Publish our own signed record. Raises NetworkError."""

    async def lookup(self) -> list[Presence]:
        """Live records whose signatures hold: all in a small swarm, a random sample of a large one, another each time.

        Raises NetworkError when nobody could be asked.
        """


class Notebook(Protocol):
    """Takes every noteworthy thing that happens: terminal lines, the JSONL log and counters read from it."""

    def note(self, kind: str, **fields: Any) -> None: ...


Clock = Callable[[], float]
"""Seconds on a monotonic clock; the zero is arbitrary."""

__all__ = ["Clock", "Directory", "InnerTask", "Link", "LinkId", "Notebook", "StepResult", "Transport"]
