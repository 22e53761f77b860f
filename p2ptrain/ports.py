"""Ports between the layers: small interfaces, each with a real implementation and one in memory.

================  ==============================  ====================================
port              real                            in memory
================  ==============================  ====================================
InnerTask         train.inner.LanguageModelTask   sim.learners.QuadraticTask
RemoteInnerTask   peer.training.RemoteTask        none: such a task is in this process
ExchangePayloads  host.payloads.Payloads          sim.counting.CountingLearner
DonorWeights      host.payloads.Payloads          the same, with small tensors
Deliveries        host.inbox.Inbox                sim.counting.CountingLearner
Link              net.links.StreamLink            tests: memory_network.MemoryLink
Transport         net.transport.P2PTransport      tests: memory_network.MemoryTransport
Directory         net.directory.DhtDirectory      tests: memory_network.MemoryDirectory
Notebook          base.telemetry.EventLog         base.telemetry.MemoryLog
================  ==============================  ====================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm import Presence
from p2ptrain.swarm.download_plan import Span
from p2ptrain.swarm.events import Commit

if TYPE_CHECKING:
    from torch import Tensor

    Saved = Tensor | Sequence[Tensor]
    """A tensor of a checkpoint, or the parts of a vector, in order, which the checkpoint has as one tensor."""


class InnerTask(Protocol):
    """Inner optimization: a model's flat weights and one training step on them. Owned by the training thread."""

    @property
    def theta(self) -> Tensor:
        """Fast weights, [P] fp32 on the training device. Writing to the tensor changes the model."""

    def inner_step(self, progress: float) -> StepResult:
        """Move ``theta`` by one inner step at the given progress (tokens of all peers; schedules read it)."""

    def reset(self, warmup_steps: int) -> None:
        """Clear the inner optimizer's state and warm it up again after ``theta`` was replaced by a donor's weights."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all else that ``inner_step`` depends on, as flat tensors (optimizer moments, counters)."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit."""


class RemoteInnerTask(InnerTask, Protocol):
    """Inner task in another process, whose ``theta`` is memory of this one: shared, or a copy of a card's weights.

    It may begin a step before the result of the one before is read.
    """

    @property
    def tokens_per_step(self) -> int: ...

    @property
    def is_ahead(self) -> bool:
        """Whether it makes a step whose result ``inner_step`` has not returned: nobody else may touch ``theta``."""

    def follow_with(self, progress: float | None) -> None:
        """Let the next ``inner_step`` begin another step after its own, at this progress; None: no other."""

    def store(self, moments: bool = False) -> None:
        """Bring ``theta`` up to date; without a trainer, it holds the last copy."""

    def load(self) -> None:
        """Give the trainer what was written to ``theta``."""

    def add(self, piece: slice, displacement: Tensor) -> None:
        """Add a displacement to a piece of the weights, and to ``theta`` if it is shared."""


GoesOn = Callable[[int, int], bool]
"""Called after each batch of a held-out text with the tokens read and wanted; False: read no further."""


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Held-out loss, and the text that it was read from."""

    value: float  # mean cross entropy in nats per predicted token
    tokens: int  # tokens that were read; of dialogues only the answers are predicted
    of: int  # predicted tokens that are read without a limit: tokens.corpus.HELD_OUT_TOKENS, or all if there are fewer


NOT_READ = HeldOutLoss(math.nan, 0, 0)


class HeldOut(Protocol):
    """Evaluation of the current fast weights. Owned by the training thread."""

    @property
    def guessing(self) -> float:
        """Loss of a uniform prediction in nats per token: ln(vocabulary)."""

    def loss(self) -> float:
        """Return the loss in nats per token on held-out text, without disturbing training."""


class StepResult(Protocol):
    """Result of one inner step."""

    @property
    def loss(self) -> float:
        """Mean loss in nats a token, before the step."""

    @property
    def tokens(self) -> int: ...


Opaque = Any
"""Value that the network only passes back: it neither knows nor reads its content."""


class EncodedPayload(Protocol):
    """This side's payload of an exchange."""

    @property
    def parts(self) -> Sequence[bytes]:
        """One part per fragment."""

    @property
    def size_bytes(self) -> int: ...


class PayloadDifference(Protocol):
    """Result of an exchange of payloads, as far as the protocol core judges it. The vectors are the learner's."""

    @property
    def distance(self) -> float:
        """Length of the difference over that of our weights."""

    @property
    def norm(self) -> float:
        """Length of our weights."""

    @property
    def fingerprint(self) -> bytes:
        """Digest of the partner's payload."""

    @property
    def sketched(self) -> float:
        """Estimate of ``distance`` from both sides' sketches, 0 without sketches."""


class ExchangePayloads(Protocol):
    """Numeric part of an exchange: snapshots to bytes, two payloads to a difference. Any thread may call it.

    The network knows fragments by number. A snapshot and an encoded payload are opaque to it.
    """

    def proposal_sizes(self, fragments: Sequence[int]) -> list[int]:
        """Return the bytes of each proposal, equal on both sides; empty if there are none."""

    def encoded_sizes(self, fragments: Sequence[int]) -> list[int]:
        """Return the most bytes of each fragment's part, equal on both sides; exact if there are no proposals."""

    def propose(self, fragments: Sequence[int]) -> tuple[Opaque, Sequence[bytes]]:
        """Return a snapshot of these fragments, with all committed displacements, and what to agree on before encoding
        it, one part per fragment. Raises ValueError.
        """

    def encode(
        self,
        fragments: Sequence[int],
        mine: Sequence[bytes],
        theirs: Sequence[bytes | bytearray],
        snapshot: Opaque,
    ) -> EncodedPayload:
        """Return these fragments of a snapshot as bytes, after both sides' proposals; None: of the weights as now.

        Raises ValueError if our own weights cannot be sent, RemoteError if the partner's proposals are invalid.
        """

    def difference(self, mine: Opaque, theirs: Sequence[bytes | bytearray]) -> PayloadDifference:
        """Return the difference to the partner's weights; ``mine`` is a result of ``encode``.

        Raises RemoteError, and MisfitError, a kind of it, if the payload does not fit the proposals.
        """


class DonorWeights(Protocol):
    """Slow weights for newcomers, and the check of a donor's. Any thread may call it."""

    def weight_sizes(self) -> list[int]:
        """Return the bytes of each fragment in fp32."""

    def slow(self) -> Opaque:
        """Return a snapshot of all slow weights; it is kept as long as a reference to it."""

    def piece(self, snapshot: Opaque, span: Span) -> bytes | memoryview:
        """Return these bytes of a snapshot, fp32."""

    def sketch(self, span: Span, seed: int) -> bytes:
        """Return the sketch of a piece of the current weights, to compare with another donor's."""

    def check_weights(self, parts: Opaque) -> None:
        """Raise RemoteError unless a donor's weights (``host.sketch.PieceStore.whole``) may replace ours."""


class LearnerPayloads(ExchangePayloads, DonorWeights, Protocol):
    """Everything that the network sends of a learner."""


class Deliveries(Protocol):
    """Queue from the network to a learner. Only the network's thread calls it."""

    def deliver(self, commit: Commit, difference: Opaque) -> None:
        """Queue the displacement of a committed exchange; ``difference`` is a result of ``ExchangePayloads``."""

    def proceed(self, step: int) -> None:
        """Let a trainer that waits at this outer step continue with what was delivered before."""

    def adopt(self, link: LinkId, step: int, progress: float, parts: Opaque, left_behind: bool = False) -> None:
        """Queue a donor's weights that ``DonorWeights.check_weights`` accepted."""


class NetworkedLearner(Protocol):
    """A learner as the network sees it."""

    peers: float
    """Number of peers that train, by which own tokens count; written by the network."""

    @property
    def payloads(self) -> LearnerPayloads: ...

    @property
    def inbox(self) -> Deliveries: ...


class Link(ABC):
    """Two-way stream of frames to one partner. Any call may raise NetworkError or RemoteError, nothing else.

    An implementation defines ``send``, ``receive`` and ``close``; the other methods have plain forms here.
    """

    peer: PeerId

    @abstractmethod
    async def send(self, kind: int, body: bytes | memoryview) -> None:
        """Send one frame; return when the transport has taken it (back-pressure)."""

    @abstractmethod
    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame's kind and body. Raises RemoteError on an invalid frame, NetworkError at the end."""

    @abstractmethod
    async def close(self) -> None:
        """Close both directions. Safe to call twice."""

    async def wait_for_frame(self) -> None:
        """Wait until the next frame begins, without consuming it. Plain form: do not wait."""
        return

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        """Receive a frame's body into the front of the buffer; return its kind and length. Plain form: with a copy.

        Raises RemoteError if the body does not fit.
        """
        kind, body = await self.receive()
        if len(body) > len(buffer):
            raise RemoteError(f"expected a frame of at most {len(buffer)} bytes, got {len(body)}")
        buffer[: len(body)] = body
        return kind, len(body)

    async def open_parallel(self, size_bytes: int) -> Sequence[Link]:
        """Return further streams for one payload of that size each way, in one order on both sides. Plain form: none.

        Both sides call this at the same point of the conversation; ``close`` closes the streams too.
        """
        return ()

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        """Record the size and time of a received payload. Plain form: do nothing."""
        return


class Transport(Protocol):
    """Opens outbound links and accepts inbound ones."""

    async def open(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        """Dial a peer. Raises NetworkError."""

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        """Call ``handler`` for every inbound link; the link is closed when the handler returns."""


class Directory(Protocol):
    """Directory of the run's live peers."""

    @property
    def size(self) -> int:
        """Estimated number of peers in the swarm; 0 before the first lookup."""

    async def announce(self, presence: Presence) -> None:
        """Publish this peer's signed presence record. Raises NetworkError."""

    async def lookup(self) -> list[Presence]:
        """Return live records with valid signatures: all in a small swarm, a new random sample in a large one.

        Raises NetworkError if no peer could be asked.
        """

    async def keep_finished(self, presence: Presence) -> None:
        """Keep the record of a peer that trained to the run's end for those who come late. Raises NetworkError."""

    async def finished(self) -> list[Presence]:
        """Return kept records with valid signatures, which are too old for a lookup. Raises NetworkError."""


class Notebook(Protocol):
    """Receiver of notes: terminal lines, the JSONL log and counters derive from it."""

    def note(self, kind: str, **fields: Any) -> None: ...


Clock = Callable[[], float]
"""Seconds on a monotonic clock with an arbitrary zero."""
