"""The inner task as the peer application sees it: figures, held-out loss and sample text besides training.

The application does not reach into the model, which may lie on several devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from p2ptrain.host.loop import LoopLearner
from p2ptrain.ports import Deliveries, GoesOn, HeldOutLoss, NetworkedLearner

if TYPE_CHECKING:
    from p2ptrain.ports import Saved


T = TypeVar("T")


class WakingInbox(Deliveries, Protocol):
    """Inbox whose waiting trainer any thread may wake."""

    def wake(self) -> None: ...


class PeerLearner(LoopLearner, NetworkedLearner, Protocol):
    """``Learner`` or ``Keeper`` as the application sees it. Any thread may read its numbers."""

    @property
    def inbox(self) -> WakingInbox: ...

    @property
    def tokens(self) -> int: ...

    @property
    def loss(self) -> float: ...

    @property
    def changes(self) -> int: ...

    @property
    def progress_displacement(self) -> float: ...

    @property
    def blocked_s(self) -> float: ...

    @property
    def longest_blocked_s(self) -> float: ...

    @property
    def inner_step_s(self) -> float: ...

    def state_dict(self) -> tuple[dict[str, Saved], dict[str, Any]]: ...

    def at_slow(self, tell: Callable[[], T]) -> T:
        """Return the result of ``tell`` with the slow weights, which exports hold, as the current ones."""


class PeerTask(Protocol):
    """Inner task of a peer, such as ``train.inner.LanguageModelTask``.

    Its methods belong to the training thread; any thread may read its figures.
    """

    @property
    def device_name(self) -> str:
        """Device that trains, as torch writes it."""

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""

    @property
    def computes_in(self) -> str:
        """Type of the matrix products: fp32, bfloat16 or float16."""

    @property
    def skipped_steps(self) -> int:
        """Inner steps that moved nothing, because the gradient was not finite."""

    @property
    def coverage(self) -> float:
        """Fraction of the training set that this peer has read, 0 to 1."""

    @property
    def micro_batch(self) -> int:
        """Sequences computed at once."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last inner step that moved weights."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of other processes that train for this one."""

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss of the current weights in fp32.

        Args:
            most_tokens: held-out tokens to read at most.
            patience_s: approximate time limit.
            goes_on: stops the reading.
        """

    def sample(self, new_tokens: int) -> str:
        """Return a text of up to so many tokens that the current weights write; empty if this task writes none."""
