"""The inner task of a trainer in a process of its own, as its node sees it.

While there is no trainer, ``inner_step`` and the readings raise TrainerAwayError at once, or the UserError with which
the last one ended, and everything else works: weights and moments are the node's own memory.

What a death costs, besides the pause and the start:

=============================================  =========================================================================
the trainer died                               lost
=============================================  =========================================================================
between two steps, or within a step            that step
while its optimizer moved the host vector      the inner phase and the moments: ``inner_step`` says that it is torn
within a step on a card                        what it trained since the weights were last shown, and the moments since
                                               the last checkpoint
=============================================  =========================================================================
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from p2ptrain.base.errors import TrainerAwayError, UserError
from p2ptrain.host.learner import REWARM_STEPS
from p2ptrain.host.tasks import TaskFigures
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import NOT_READ, GoesOn, HeldOutLoss, Notebook
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.process import OnNote, TrainerDiedError, TrainerHandle
from peer.training import answers
from peer.training.answers import Begun, State, Stepped, TrainerAnswer, checked
from peer.training.plan import VECTORS, TrainerPlan
from peer.training.trainer_supervisor import TrainerSupervisor

Kind = TypeVar("Kind", bound=TrainerAnswer)


class RemoteTask:
    """``ports.RemoteInnerTask``, ``ports.HeldOut`` and ``host.tasks.PeerTask`` of a trainer's process.

    Args:
        plan: what to train.
        tokens_per_step: of the run.
        notebook: receives a note when a trainer dies, and when it has been replaced.
        is_stopping: whether the owner stops the peer; nobody waits for a trainer then.
        command: the trainer's program and its arguments; None: the language model's.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        tokens_per_step: int,
        notebook: Notebook,
        is_stopping: Callable[[], bool],
        command: Sequence[str] | None = None,
    ) -> None:
        self.layout: FlatLayout
        self.theta: Tensor
        self.has_ended: Callable[[], bool] = lambda: False
        """Returns whether the run has ended, so that ranks on other computers need not wait for another trainer."""
        self.remaining_s: Callable[[], float | None] = lambda: None
        """Returns the seconds of training that probably remain, or None."""
        self.is_supplied: Callable[[int], bool] = lambda step: True
        """Returns whether the text of an inner step is here; if not, ``inner_step`` raises TrainerAwayError."""
        self._plan = plan
        self._command = command
        self._notebook = notebook
        self._is_stopping = is_stopping
        self._host: HostVector | None = None
        self.is_ahead = False
        """Whether the trainer makes a step that ``inner_step`` has not returned."""
        self.tokens_per_step = tokens_per_step
        self._next_progress: float | None = None
        self._state: State | None = None
        self._stored_counters: list[int] | None = None
        """Counters of a card's trainer when it stored its moments; None: the host vector has none of one step."""
        self._spent_s = 0.0
        """CPU seconds of trainers that have ended."""
        self._supervisor = TrainerSupervisor(
            self._new, self._attach, self._adopt, self._shrink, notebook, gives_up=not plan.others
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first trainer and wait until it is ready. Raises UserError."""
        self._supervisor.start()

    def close(self) -> None:
        """End the trainer and whatever starts another one. The vectors stay."""
        if self._plan.others and (trainer := self._supervisor.current) is not None and self.has_ended():
            with contextlib.suppress(TrainerDiedError, UserError):
                trainer.ask("finish")
        self._supervisor.close()
        if self._host is not None:
            self._host.close()
            self._host = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a trainer. Raises the UserError with which the last one ended."""
        return self._supervisor.is_ready

    @property
    def pid(self) -> int | None:
        return None if (trainer := self._supervisor.current) is None else trainer.pid

    def on_return(self, call: Callable[[], object]) -> None:
        """Let another thread call this when a trainer has been replaced."""
        self._supervisor.on_return = call

    def _new(self) -> TrainerHandle:
        plan = self._plan
        if plan.at is not None:
            self._notebook.note("waiting for ranks", ranks=plan.others, leader=plan.at)
        waits = None if plan.at is None else lambda: not self._supervisor.is_closing
        return TrainerHandle(self._command or plan.command, self._notebook, plan.own_ranks, waits)

    def _attach(self, trainer: TrainerHandle) -> dict[str, Any]:
        return trainer.attach(self._plan.model_dump(mode="json"), self._memory)

    def _adopt(self, trainer: TrainerHandle, first: dict[str, Any]) -> None:
        """Let a trainer go on where the last one was. Raises TrainerDiedError."""
        begun = checked(trainer, Begun, first)
        if (before := self._state) is not None:
            restored = trainer.ask("restore", counters=before.counters, loss_scale=before.loss_scale)
            self._state = checked(trainer, State, restored)
        else:
            self._state = begun
        self._guessing, self.shares = begun.guessing, begun.shares
        self._plan = self._plan.model_copy(update={"begins": False})

    def _memory(self, layout: FlatLayout, vectors: int) -> tuple[HostVector, bool]:
        """Return the host vector. Raises ValueError if it is another trainer's."""
        if vectors != len(VECTORS) or (self._host is not None and layout != self.layout):
            raise ValueError(f"{vectors} vectors of {layout.total} elements")
        if self._host is not None:
            self._host.moves.zero_()
            return self._host, False
        self.layout, self._host = layout, HostVector.create(layout.total, vectors)
        self.theta, *moments, self._passing = (self._host.vector(number) for number in range(vectors))
        self._moments = moments[0], moments[1]
        return self._host, True

    def _shrink(self) -> int:
        """Let the next trainer compute half as much at once."""
        now = self._plan.most_sequences if self._state is None else self._state.figures.micro_batch
        self._plan = self._plan.model_copy(update={"most_sequences": max(1, now // 2)})
        return self._plan.most_sequences

    def _lose(self, died: TrainerDiedError) -> TrainerAwayError:
        """Let a trainer that has died be replaced; return the error to raise."""
        is_torn = self._host is not None and self._host.is_torn(self._plan.own_ranks)
        if (state := self._state) is not None:
            self._spent_s += state.figures.cpu_s
            self._state = state.model_copy(update={"figures": state.figures.model_copy(update={"cpu_s": 0.0})})
            if not self.shares:
                self._forget()
        self._supervisor.replace(died)
        return TrainerAwayError(is_torn)

    def _forget(self) -> None:
        """Go back to the moments that the host vector has of a trainer's card: the last stored ones, or none."""
        assert self._state is not None
        if (kept := self._stored_counters) is None:
            self._clear_moments()
            kept = [0, 0, REWARM_STEPS, 0]
        self._state = self._state.model_copy(update={"counters": [self._state.counters[0], *kept[1:]]})

    def _ask(self, name: str, kind: type[Kind], on_note: OnNote = lambda note: True, **arguments: Any) -> Kind:
        """Ask the trainer. Raises TrainerAwayError, and UserError."""
        assert not self.is_ahead, "the weights are not at rest"
        trainer = self._present()
        with self._noticing_its_end():
            return checked(trainer, kind, trainer.ask(name, on_note, **arguments))

    @contextlib.contextmanager
    def _noticing_its_end(self) -> Iterator[None]:
        try:
            yield
        except TrainerDiedError as died:
            raise self._lose(died) from died
        except UserError as error:
            self._supervisor.fail(error)
            raise

    def _present(self) -> TrainerHandle:
        """Return the trainer. Raises TrainerAwayError, and UserError."""
        if not self.is_ready:
            raise TrainerAwayError
        assert self._supervisor.current is not None
        return self._supervisor.current

    # --- ports.InnerTask ----------------------------------------------------------------------------------------------

    def inner_step(self, progress: float) -> Stepped:
        """Make one step. Raises TrainerAwayError, and DeviceError as ``LanguageModelTask.inner_step``."""
        is_begun, self.is_ahead = self.is_ahead, False
        next_progress, self._next_progress = self._next_progress, None
        trainer = self._present()
        assert self._state is not None
        number = self._state.counters[0]
        if not is_begun and not self.is_supplied(number):
            raise TrainerAwayError
        if next_progress is not None and not self.is_supplied(number + 1):
            next_progress = None
        left_s = self.remaining_s()
        with self._noticing_its_end():
            if not is_begun:
                trainer.post("step", progress=progress, remaining_s=left_s)
            if next_progress is not None:
                trainer.post("step", progress=next_progress, remaining_s=left_s)
            answer = checked(trainer, Stepped, trainer.answer())
        self.is_ahead, self._state = next_progress is not None, answer
        return answer

    def follow_with(self, progress: float | None) -> None:
        """Let the next ``inner_step`` begin another step after its own (``ports.RemoteInnerTask``)."""
        self._next_progress = progress

    def reset(self, warmup_steps: int) -> None:
        """Clear the moments and warm up again, as ``LanguageModelTask.reset``."""
        self.store()  # what ``restore`` loads
        self._clear_moments()
        assert self._state is not None
        self._restore([self._state.counters[0], 0, warmup_steps, 0], self._state.loss_scale)

    def store(self, moments: bool = False) -> None:
        """Copy the weights, and perhaps the moments, from the trainer; without one, the last copy stays."""
        if self.shares:
            return
        if moments:
            self._stored_counters = None  # until all have arrived
        with contextlib.suppress(TrainerAwayError, UserError):
            self._state = self._ask("store", State, moments=moments)
            self.theta.copy_(self._passing)
            if moments:
                self._stored_counters = self._state.counters

    def load(self) -> None:
        """Copy the weights to the trainer; the next one gets them if there is none."""
        if not self.shares:
            with contextlib.suppress(TrainerAwayError, UserError):
                self._ask("load", answers.Nothing)

    def add(
        self,
        piece: slice,
        displacement: Tensor,  # [stop - start]
    ) -> None:
        """Add a displacement to a piece of the trainer's weights."""
        if self.shares:
            self.theta[piece].add_(displacement)
            return
        self._passing[piece].copy_(displacement)
        try:
            self._ask("add", answers.Nothing, start=piece.start, stop=piece.stop)
        except (TrainerAwayError, UserError):
            self.theta[piece].add_(displacement)

    def state_dict(self) -> dict[str, Tensor]:
        """Return moments [P], views of live memory, and counters."""
        self.store(moments=True)
        assert self._state is not None
        return {
            "first_moment": self._moments[0],
            "second_moment": self._moments[1],
            "counters": torch.tensor(self._state.counters, dtype=torch.int64),
            "loss_scale": torch.tensor(self._state.loss_scale, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit, before any change."""
        first, second, counters = state["first_moment"], state["second_moment"], state["counters"]
        if not first.shape == second.shape == self.theta.shape or counters.shape != (4,):
            raise ValueError(
                f"moments {list(first.shape)} and {list(second.shape)} with {list(counters.shape)} counters,"
                f" where {list(self.theta.shape)} and [4] belong"
            )
        for moment, saved in zip(self._moments, (first, second), strict=True):
            moment.copy_(saved)
        scale = state.get("loss_scale")
        assert self._state is not None
        self._restore(counters.tolist(), self._state.loss_scale if scale is None else scale.tolist())

    def _restore(self, counters: list[int], loss_scale: list[float]) -> None:
        assert self._state is not None
        self._state = self._state.model_copy(update={"counters": counters, "loss_scale": loss_scale})
        self._stored_counters = counters
        with contextlib.suppress(TrainerAwayError, UserError):  # the next one gets them
            self._state = self._ask("restore", State, counters=counters, loss_scale=loss_scale)

    def _clear_moments(self) -> None:
        for moment in self._moments:
            moment.zero_()

    # --- ports.HeldOut and PeerTask -----------------------------------------------------------------------------------

    @property
    def guessing(self) -> float:
        return self._guessing

    def loss(self) -> float:
        """Return a short held-out loss of the current weights. Raises TrainerAwayError, also if its text is away."""
        if (found := self._ask("tried", answers.Tried).loss) is None:
            raise TrainerAwayError
        return found

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss; wait for a trainer, unless the owner stops the peer."""

        def on_note(note: Mapping[str, Any]) -> bool:
            read, wanted = note.get("read"), note.get("wanted")
            return not isinstance(read, int) or not isinstance(wanted, int) or goes_on(read, wanted)

        patience = patience_s if math.isfinite(patience_s) else None
        while True:
            try:
                found = self._ask("held_out", answers.Read, on_note, most_tokens=most_tokens, patience_s=patience)
            except TrainerAwayError:
                if self._is_stopping():
                    return NOT_READ
                self._supervisor.wait(1.0)
            else:
                return HeldOutLoss(math.nan if found.value is None else found.value, found.tokens, found.of)

    def sample(self, new_tokens: int) -> str:
        """Return a text that the current weights write. Raises TrainerAwayError."""
        return self._ask("sample", answers.WrittenText, new_tokens=new_tokens).text

    @property
    def figures(self) -> TaskFigures:
        """What the node shows, with the CPU seconds of all trainers so far."""
        assert self._state is not None
        figures = self._state.figures
        return figures.model_copy(update={"cpu_s": self._spent_s + figures.cpu_s})
