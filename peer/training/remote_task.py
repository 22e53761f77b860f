"""The inner task of a trainer in a process of its own, as its node sees it; a trainer that dies is replaced.

The trainer's thread of the node asks. While there is no trainer, ``inner_step`` and the readings raise
TrainerAwayError at once, and everything else works: weights and moments are the node's own memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.errors import DeviceError, TrainerAwayError, UserError
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.ports import NOT_READ, GoesOn, HeldOutLoss, Notebook
from p2ptrain.trainer.host_vector import HostVector
from p2ptrain.trainer.process import OnNote, TrainerDiedError, TrainerHandle
from peer.training.plan import TrainerPlan

PYTHON = (sys.executable, "-P", "-m")
LASTING_S = 20 * PAUSE_S[1]
"""Seconds of training after which a trainer's death has the first pause again: pauses then take at most a twentieth."""
FIRST_TRIES = 3
"""Trainers that may die before the first one is ready; what kills so many needs the owner."""


@dataclass(slots=True)
class RemoteStep:
    """``StepResult`` whose loss may still be on its way."""

    tokens: int
    _task: RemoteTask
    _loss: float | None = None

    @property
    def loss(self) -> float:
        if self._loss is None:
            self._task.read_losses()
        return math.nan if self._loss is None else self._loss  # NaN: its trainer died first


class RemoteTask:
    """``ports.RemoteInnerTask``, ``ports.HeldOut`` and ``host.tasks.PeerTask`` of a trainer's process.

    Args:
        plan: what to train.
        tokens_per_step: of the run.
        notebook: receives a note when a trainer dies, and when it has been replaced.
        is_stopping: whether the owner stops the peer; nobody waits for a trainer then.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        tokens_per_step: int,
        notebook: Notebook,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.layout: FlatLayout
        self.theta: Tensor
        self.on_return: Callable[[], object] = lambda: None
        """Called, by another thread, when a trainer has been replaced."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Returns whether the run has ended, so that ranks on other computers need not wait for another trainer."""
        self.remaining_s: Callable[[], float | None] = lambda: None
        """Returns the seconds of training that probably remain, or None."""
        self._plan = plan
        self._notebook = notebook
        self._is_stopping = is_stopping
        self._host: HostVector | None = None
        self.cards: list[str] = []
        """Names of this computer's cards that train, as nvidia-smi knows them."""
        self.is_ahead = False
        """Whether the trainer makes a step that ``inner_step`` has not returned."""
        self.tokens_per_step = tokens_per_step
        self._next_progress: float | None = None
        self._state: dict[str, Any] = {}
        self._steps: deque[RemoteStep] = deque()
        """Steps whose losses have not arrived."""
        self._trainer: TrainerHandle | None = None
        self._replacement: tuple[TrainerHandle, dict[str, Any]] | None = None
        """A trainer that is ready to go on, and its first answer: from the thread that started it."""
        self._spent_s = 0.0
        """CPU seconds of trainers that have ended."""
        self._pauses_s = backoff(*PAUSE_S)
        self._began_at = self._died_at = 0.0
        self._closing = threading.Event()
        self._starter: threading.Thread | None = None
        self._fault: BaseException | None = None
        """What ended the thread that replaces a trainer."""
        self._oom_kills = _oom_kills()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first trainer and wait until it is ready. Raises UserError."""
        for tries in itertools.count():
            try:
                self._adopt(*self._started())
            except TrainerDiedError as died:
                pause_s = self._mourn(died)
                if self._closing.wait(pause_s if self._plan.others else 0.0):
                    raise TrainerAwayError from died
                if tries == FIRST_TRIES - 1 and not self._plan.others:  # another computer may return
                    raise DeviceError(
                        f"The trainer cannot start: {died}.",
                        "Its output is above. Try another --device; if it goes on, please report it.",
                    ) from died
            else:
                return

    def close(self) -> None:
        """End the trainer and whatever starts another one."""
        self._closing.set()
        if self._plan.others and self._trainer is not None and self.has_ended():
            with contextlib.suppress(TrainerDiedError, UserError):
                self._trainer.ask("finish")
        if self._starter is not None:
            self._starter.join()
        replacement, self._replacement = self._replacement, None
        for each in (self._trainer, None if replacement is None else replacement[0]):
            if each is not None:
                each.close()
        self._trainer = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a trainer. Raises the UserError with which the last one ended."""
        if self._fault is not None:
            raise self._fault
        replacement, self._replacement = self._replacement, None
        if replacement is not None:
            try:
                self._adopt(*replacement)
            except TrainerDiedError as died:
                self._replace(died)
            else:
                self._notebook.note("trainer returned", seconds=time.monotonic() - self._died_at)
        return self._trainer is not None

    @property
    def pid(self) -> int | None:
        return None if (trainer := self._trainer) is None else trainer.pid

    def _started(self) -> tuple[TrainerHandle, dict[str, Any]]:
        """Return a trainer and its first answer. Raises TrainerDiedError and UserError."""
        plan, others = self._plan, self._plan.others
        ranks = len(plan.devices) - others
        if plan.at is not None:
            self._notebook.note("waiting for ranks", ranks=others, leader=plan.at)
            program = ("peer.training.launch", str(ranks), plan.at, str(1 + others), "0")
            trainer = TrainerHandle((*PYTHON, *program), self._notebook, ranks, lambda: not self._closing.is_set())
        elif ranks > 1:
            trainer = TrainerHandle((*PYTHON, "peer.training.launch", str(ranks)), self._notebook, ranks)
        else:
            trainer = TrainerHandle((*PYTHON, "peer.training.language_trainer"), self._notebook)
        try:
            return trainer, trainer.attach(self._plan.model_dump(mode="json"), self._memory)
        except BaseException:
            trainer.kill()
            raise

    def _adopt(self, trainer: TrainerHandle, first: dict[str, Any]) -> None:
        """Let a trainer go on where the last one was. Raises TrainerDiedError."""
        self._guessing, self.shares = float(first["guessing"]), bool(first["shares"])
        self.cards = [str(each) for each in first["cards"]]
        if self._state:
            first = trainer.ask("restore", counters=self._state["counters"], loss_scale=self._state["loss_scale"])
        self._take(first)
        self._plan = self._plan.model_copy(update={"begins": False})
        self._began_at, self._trainer = time.monotonic(), trainer

    def _replace(self, died: TrainerDiedError) -> None:
        """Start another trainer after a pause, in a thread of its own, and leave it to ``is_ready``."""
        self._trainer, self._died_at = None, time.monotonic()
        self._steps.clear()
        pause_s = self._mourn(died)
        self._starter = threading.Thread(target=self._start_another, args=(pause_s,), name="trainer start", daemon=True)
        self._starter.start()

    def _start_another(self, pause_s: float) -> None:
        while not self._closing.wait(pause_s):
            try:
                self._replacement = self._started()
            except TrainerDiedError as died:
                pause_s = self._mourn(died)
            except BaseException as error:  # raised in the trainer's thread by ``is_ready``
                self._fault = error
                break
            else:
                break
        self.on_return()

    def _memory(self, layout: FlatLayout, vectors: int) -> tuple[HostVector, bool]:
        if self._host is not None:
            return self._host, False
        self.layout, self._host = layout, HostVector.create(layout.total, vectors)
        self.theta, *moments, self._displacement = (self._host.vector(number) for number in range(vectors))
        self._moments = moments[0], moments[1]
        return self._host, True

    def _mourn(self, died: TrainerDiedError) -> float:
        """Note a trainer's death; return the pause before the next one."""
        if time.monotonic() - self._began_at >= LASTING_S:
            self._pauses_s = backoff(*PAUSE_S)
        pause_s, kills = next(self._pauses_s), _oom_kills()
        is_memory = died.kind == "memory" or (died.was_killed and kills > self._oom_kills)
        self._oom_kills = kills
        if is_memory and (now := self._state.get("figures", {}).get("micro_batch", self._plan.most_sequences)) > 1:
            self._plan = self._plan.model_copy(update={"most_sequences": now // 2})
        self._spent_s += self._state.get("figures", {}).get("cpu_s", 0.0)
        self._state.get("figures", {}).pop("cpu_s", None)
        smaller = self._plan.most_sequences if is_memory else None
        self._notebook.note("trainer died", why=str(died), seconds=pause_s, micro_batch=smaller)
        return pause_s

    def _ask(self, name: str, on_note: OnNote = lambda note: True, **arguments: Any) -> Any:
        """Ask the trainer. Raises TrainerAwayError, and UserError."""
        assert not self.is_ahead, "the weights are not at rest"
        if not self.is_ready:
            raise TrainerAwayError
        assert self._trainer is not None
        try:
            return self._trainer.ask(name, on_note, **arguments)
        except TrainerDiedError as died:
            self._replace(died)
            raise TrainerAwayError from died

    # --- ports.InnerTask ----------------------------------------------------------------------------------------------

    def inner_step(self, progress: float) -> RemoteStep:
        """Make one step. Raises TrainerAwayError, and DeviceError as ``LanguageModelTask.inner_step``."""
        if not self.is_ready:
            raise TrainerAwayError
        assert self._trainer is not None
        is_begun, self.is_ahead = self.is_ahead, False
        next_progress, self._next_progress = self._next_progress, None
        left_s = self.remaining_s()
        try:
            if not is_begun:
                self._trainer.post("step", progress=progress, remaining_s=left_s)
            if next_progress is not None:
                self._trainer.post("step", progress=next_progress, remaining_s=left_s)
            answer = self._trainer.answer()
        except TrainerDiedError as died:
            self._replace(died)
            raise TrainerAwayError from died
        self.is_ahead = next_progress is not None
        step = RemoteStep(int(answer["tokens"]), self)
        self._steps.append(step)
        self._take(answer)
        self._take_losses(answer)
        return step

    def follow_with(self, progress: float | None) -> None:
        """Let the next ``inner_step`` begin another step after its own (``ports.RemoteInnerTask``)."""
        self._next_progress = progress

    def read_losses(self) -> None:
        """Wait for the losses of all steps."""
        self._take_losses(self._ask("losses"))

    def reset(self, warmup_steps: int) -> None:
        """Clear the moments and warm up again, as ``LanguageModelTask.reset``."""
        steps = self._state["counters"][0]
        self.store()  # what ``restore`` loads
        for moment in self._moments:
            moment.zero_()
        self._restore([steps, 0, warmup_steps, 0], self._state["loss_scale"])

    def store(self, moments: bool = False) -> None:
        """Copy the weights, and perhaps the moments, from the trainer; without one, the last copy stays."""
        if not self.shares:
            with contextlib.suppress(TrainerAwayError):
                self._take(self._ask("store", moments=moments))

    def load(self) -> None:
        """Copy the weights to the trainer; the next one gets them if there is none."""
        if not self.shares:
            with contextlib.suppress(TrainerAwayError):
                self._ask("load")

    def add(
        self,
        piece: slice,
        displacement: Tensor,  # [stop - start]
    ) -> None:
        """Add a displacement to a piece of the trainer's weights."""
        if self.shares:
            self.theta[piece].add_(displacement)
            return
        self._displacement[piece].copy_(displacement)
        try:
            self._ask("add", start=piece.start, stop=piece.stop)
        except TrainerAwayError:
            self.theta[piece].add_(displacement)

    def state_dict(self) -> dict[str, Tensor]:
        """Return moments [P], views of live memory, and counters."""
        self.store(moments=True)
        return {
            "first_moment": self._moments[0],
            "second_moment": self._moments[1],
            "counters": torch.tensor(self._state["counters"], dtype=torch.int64),
            "loss_scale": torch.tensor(self._state["loss_scale"], dtype=torch.float64),
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
        self._restore(counters.tolist(), self._state["loss_scale"] if scale is None else scale.tolist())

    def _restore(self, counters: list[int], loss_scale: list[float]) -> None:
        self._state |= {"counters": counters, "loss_scale": loss_scale}
        with contextlib.suppress(TrainerAwayError):  # the next one gets them
            self._take(self._ask("restore", counters=counters, loss_scale=loss_scale))

    def _take(self, answer: Mapping[str, Any]) -> None:
        self._state = {name: answer[name] for name in ("figures", "counters", "loss_scale")}

    def _take_losses(self, answer: Mapping[str, Any]) -> None:
        for loss in answer["losses"]:
            self._steps.popleft()._loss = float(loss)

    # --- ports.HeldOut and PeerTask -----------------------------------------------------------------------------------

    @property
    def guessing(self) -> float:
        return self._guessing

    def loss(self) -> float:
        """Return a short held-out loss of the current weights. Raises TrainerAwayError."""
        return float(self._ask("tried")["loss"])

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss; wait for a trainer, unless the owner stops the peer."""

        def on_note(note: Mapping[str, Any]) -> bool:
            return goes_on(int(note["read"]), int(note["wanted"]))

        patience = patience_s if math.isfinite(patience_s) else None
        while True:
            try:
                found = self._ask("held_out", on_note, most_tokens=most_tokens, patience_s=patience)
            except TrainerAwayError:
                if self._is_stopping():
                    return NOT_READ
                assert self._starter is not None
                self._starter.join(1.0)
            else:
                value = math.nan if found["value"] is None else float(found["value"])
                return HeldOutLoss(value, int(found["tokens"]), int(found["of"]))

    def sample(self, new_tokens: int) -> str:
        """Return a text that the current weights write. Raises TrainerAwayError."""
        return str(self._ask("sample", new_tokens=new_tokens)["text"])

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all trainers so far."""
        return self._spent_s + cast("float", self._figure("cpu_s", 0.0))

    @property
    def state(self) -> str:
        """What the trainer's compiler does (``peer.session_recorder.CompilerView``)."""
        return cast("str", self._figure("compiler"))

    @property
    def device_name(self) -> str:
        return cast("str", self._figure("device_name"))

    @property
    def parameter_count(self) -> int:
        return cast("int", self._figure("parameter_count"))

    @property
    def computes_in(self) -> str:
        return cast("str", self._figure("computes_in"))

    @property
    def skipped_steps(self) -> int:
        return cast("int", self._figure("skipped_steps"))

    @property
    def coverage(self) -> float:
        return cast("float", self._figure("coverage"))

    @property
    def micro_batch(self) -> int:
        return cast("int", self._figure("micro_batch"))

    @property
    def learning_rate(self) -> float:
        return cast("float", self._figure("learning_rate"))

    def _figure(self, name: str, default: object = None) -> object:
        return self._state["figures"].get(name, default)


def _oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Return how often this system has killed a process for memory; 0 where it does not say."""
    try:
        fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
