"""A training loop of anybody's own beside a node: a plain torch model and optimizer, between whose steps it answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from p2ptrain.outer.flat import FlatLayout
from p2ptrain.trainer.attached import Attachment
from p2ptrain.trainer.line import LineClosedError

MOMENTS = 2
"""Vectors of the optimizer's state that the host vector has; AdamW needs both."""


class TrainingLoop:
    """A trainer's place at the node that has started it; the block that it opens is the training loop.

    ::

        with TrainingLoop(model, optimizer, units_per_step=batch * length) as training:
            for batch in batches:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if training.step(loss):
                    break

    On the CPU the fp32 parameters become views of the host vector; other weights are copied when the node asks. If the
    program dies, the next one goes on with the weights and with what the optimizer keeps in each parameter's shape, up
    to two tensors of it, and the count of its steps; all else of the optimizer begins anew.

    Args:
        model: its parameters may hold any values; they become the swarm's.
        optimizer: of all parameters; one that needs no closure.
        units_per_step: what a step counts for in the run, such as tokens.
        evaluate: returns the current weights' loss on held-out data; None: a donor's weights are taken untried.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        units_per_step: int,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self.steps = 0
        """Steps ever made, by this program and those before it: the place in the data."""
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._units = units_per_step
        self._evaluate = evaluate
        self._optimizer_steps = 0
        self._attachment = Attachment.of_environment()
        self.plan = self._attachment.plan()
        layout = FlatLayout.of(model)
        self._host, is_new = self._attachment.host_vector(layout, 2 + MOMENTS)
        vectors = [self._host.vector(number) for number in range(2 + MOMENTS)]
        self._weights, *self._moments, self._passing = (layout.views(each) for each in vectors)
        self._flat_passing = vectors[-1]
        self._shares = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self._parameters.values())
        self._is_kept = False
        """Whether the optimizer's state has its place in the host vector."""
        self._has_ended = False
        """Whether the node ended before it wanted a step."""
        self._answers = {
            name: getattr(self, f"_{name}")
            for name in ("restore", "load", "store", "add", "losses", "tried", "held_out", "sample")
        }
        for name, parameter in self._parameters.items():
            if is_new:
                self._weights[name].copy_(parameter.detach())
            if self._shares:
                parameter.data = self._weights[name]
            else:
                parameter.data.copy_(self._weights[name])
        if self._shares:
            optimizer.register_step_pre_hook(self._count)
            optimizer.register_step_post_hook(self._count)

    def __enter__(self) -> Self:
        guessing = {"guessing": math.inf, "shares": self._shares}
        self._has_ended = self._answered({**guessing, **self._state()}) or self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, LineClosedError)

    def step(self, loss: Tensor | float) -> bool:
        """Tell the node of an optimizer step, whose gradient had this loss; return whether training ends.

        It waits until the node wants another step. In the meantime weights may change.
        """
        self.steps += 1
        self._optimizer_steps += 1
        if self._shares:
            self._keep_state()
        answer = {"losses": [torch.as_tensor(loss).item()], "tokens": self._units, **self._state()}
        return self._has_ended or self._answered(answer) or self._wait()

    def _count(self, *_: Any) -> None:
        """Count that the optimizer begins to move the weights, or has ended (``HostVector.is_torn``)."""
        self._host.moves[0] += 1

    def _answered(self, answer: dict[str, Any]) -> bool:
        """Answer; return whether nobody hears it."""
        try:
            self._attachment.answer(answer)
        except LineClosedError:
            return True
        return False

    def _wait(self) -> bool:
        """Answer questions until a step is wanted; return whether none ever will be."""
        while True:
            try:
                question = self._attachment.question()
            except LineClosedError:
                return True
            if (name := question.pop("ask")) == "step":
                return False
            with torch.no_grad():
                answer = self._answers[name](**question)
            if self._answered(answer):
                return True

    # --- answers ------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        first = next(iter(self._parameters.values()))
        return {
            "figures": {
                "device_name": str(first.device),
                "parameter_count": sum(p.numel() for p in self._parameters.values()),
                "computes_in": str(first.dtype).removeprefix("torch."),
                "skipped_steps": 0,
                "coverage": 0.0,
                "micro_batch": 1,
                "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
                "cpu_s": time.process_time(),
                "compiler": "off",
            },
            "counters": [self.steps, self._optimizer_steps, 0, 0],
            "loss_scale": [],
        }

    def _restore(self, counters: list[int], loss_scale: list[float]) -> dict[str, Any]:
        self._load()
        self.steps, self._optimizer_steps = counters[:2]
        self._optimizer.state.clear()
        self._is_kept = False
        if self._optimizer_steps:
            self._load_moments()
        return self._state()

    def _load(self) -> dict[str, Any]:
        for name, parameter in self._parameters.items():
            if not self._shares:
                parameter.data.copy_(self._weights[name])
        return {}

    def _store(self, moments: bool) -> dict[str, Any]:
        for name, parameter in self._parameters.items():
            self._passing[name].copy_(parameter.detach())
            if moments:
                for number, key in enumerate(self._keys(parameter)):
                    self._moments[number][name].copy_(self._optimizer.state[parameter][key])
        return self._state()

    def _add(self, start: int, stop: int) -> dict[str, Any]:
        self._flat_passing[:start].zero_()
        self._flat_passing[stop:].zero_()
        for name, parameter in self._parameters.items():
            parameter.data.add_(self._passing[name].to(parameter))
        return {}

    def _losses(self) -> dict[str, Any]:
        return {"losses": []}

    def _tried(self) -> dict[str, Any]:
        return {"loss": self._evaluate() if self._evaluate is not None else 0.0}

    def _held_out(self, most_tokens: int, patience_s: float | None) -> dict[str, Any]:
        value = self._evaluate() if self._evaluate is not None else math.nan
        return {"value": value if math.isfinite(value) else None, "tokens": 0, "of": 0}

    def _sample(self, new_tokens: int) -> dict[str, Any]:
        return {"text": ""}

    # --- the optimizer's state ----------------------------------------------------------------------------------------

    def _keys(self, parameter: nn.Parameter) -> list[str]:
        """Return the names of what the optimizer keeps in the parameter's shape and the host vector has place for."""
        state = self._optimizer.state.get(parameter, {})
        found = [
            key
            for key, value in state.items()
            if isinstance(value, Tensor) and key != "step" and value.shape == parameter.shape
        ]
        return found[:MOMENTS]

    def _keep_state(self) -> None:
        """Move the optimizer's state to the host vector, once there is some."""
        if self._is_kept:
            return
        self._is_kept = True
        for name, parameter in self._parameters.items():
            for number, key in enumerate(self._keys(parameter)):
                place = self._moments[number][name]
                self._optimizer.state[parameter][key] = place.copy_(self._optimizer.state[parameter][key])

    def _load_moments(self) -> None:
        """Let the optimizer make its state by a step of copies of the weights, then take it from the host vector."""
        weights = [parameter.data for parameter in self._parameters.values()]
        for parameter in self._parameters.values():
            parameter.data = parameter.data.clone()
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for (name, parameter), data in zip(self._parameters.items(), weights, strict=True):
            parameter.data = data
            state = self._optimizer.state.get(parameter, {})
            for number, key in enumerate(self._keys(parameter)):
                state[key].copy_(self._moments[number][name])
            if "step" in state:
                state["step"] = torch.full_like(state["step"], self._optimizer_steps)
        if self._shares:
            self._keep_state()
