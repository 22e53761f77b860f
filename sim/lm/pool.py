"""Learner ``lm``: a real small language model for every simulated peer, all of them in one pool.

The pool holds the peers' weights as rows of one tensor and computes like ``train.inner.LanguageModelTask``: with the
same sequences, schedule, clipping, optimizer and state, on the written-out model of ``sim.lm.stacked``. A peer's result
does not depend on the grouping of steps: on the CPU peers are computed one by one, which is faster there (a peer's
activations stay in the second-level cache), by ``sim.lm.native`` if possible, and results are bitwise equal; on CUDA
peers share batched kernels, and results agree up to rounding.

Legend: N peers of the pool, n some of them, M weight vectors, P parameters (padded), B sequences, T tokens a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.outer.flat import FlatLayout, flatten_module
from p2ptrain.train.model import build_module
from p2ptrain.train.optimizer import FlatOptimizer, muon_parameters
from p2ptrain.train.schedule import learning_rate
from sim.learners import InnerStepResult
from sim.lm.native import NativeLlama
from sim.lm.stacked import StackedLlama
from sim.lm.text import Part, Text, TextShare

if TYPE_CHECKING:
    from p2ptrain.manifest import TrainingSection
    from p2ptrain.manifest.model import Llama

CPU_PASS_TOKENS = 2048
"""Tokens that torch computes at once on the CPU; further sequences are accumulated. Measured at T = 64 with 123
thousand weights: 10.9, 9.4, 9.2 and 8.5 us a token at 256, 512, 1024 and 2048."""

CUDA_PASS_TOKENS = 1 << 18
"""Tokens of all peers computed at once on CUDA: about 4 GB with 123 thousand weights. Guess: the time per token by
pass size on CUDA would settle it."""

KEPT_BYTES = 31 << 20
"""Size of the block freed by ``_keep_freed_memory``."""


class LanguageModelPool:
    """The language models of all simulated peers.

    Args:
        description: the model, a Llama.
        training: the manifest's section. A simulated data-parallel "peer" of N computers is one with N times the
            sequences a step.
        run_tokens: tokens of all peers at which the schedule ends.
        text: the text, cut into the manifest's sequence length.
        shares: one a peer.
        seed: seed of the initial weights, which all peers share.
        device: device of all tensors.
    """

    def __init__(
        self,
        description: Llama,
        training: TrainingSection,
        run_tokens: int,
        text: Text,
        shares: Sequence[TextShare],
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        _keep_freed_memory()
        module = build_module(description, seed)
        self.layout = FlatLayout.of(module)
        self.model = StackedLlama.of(description, self.layout)
        self.hidden = muon_parameters(module, training)
        """Parameters that Muon updates."""
        self.training = training
        self.run_tokens = run_tokens
        self.text = text
        self.device = torch.device(device)
        self.native = NativeLlama.of(self.model, training.sequence_length) if self.device.type == "cpu" else None
        """The compiled model; None where ``model`` computes."""
        self.theta = flatten_module(module).detach().to(self.device).repeat(len(shares), 1)
        """[N, P] fp32 the fast weights of all peers."""
        self.gradient, self.first_moment, self.second_moment = (torch.zeros_like(self.theta) for _ in range(3))
        self._tokens = text.tokens.to(self.device)
        self._span = torch.arange(training.sequence_length + 1, device=self.device)
        self.tasks = tuple(PooledTask(self, row, share) for row, share in enumerate(shares))
        """One ``ports.InnerTask`` a peer."""

    def prepare(self, steps: Sequence[tuple[int, float]]) -> None:
        """Make the next inner step of some peers, each given with its progress, in as few kernels as is efficient.

        Weights change here; the ``inner_step`` that must follow with equal progress only returns the result.
        Displacements are therefore applied before this call, not between the two (they would count as applied after the
        step).
        """
        for start in range(0, len(steps), self._rows_at_once):
            self._step(steps[start : start + self._rows_at_once])

    def evaluate(
        self,
        thetas: Tensor,  # [M, P] any weights of the model
        part: Part,
        sequences: int | None = None,  # evenly spaced; None for all
    ) -> Tensor:
        """Return the [M] fp64 mean cross entropy over held-out text, in nats per token, on the CPU."""
        starts = self.text.starts(part)
        count = len(starts) if sequences is None else max(1, min(sequences, len(starts)))
        chosen = torch.tensor([starts[place * len(starts) // count] for place in range(count)], device=self.device)
        totals = torch.zeros(len(thetas), dtype=torch.float64)
        for place, theta in enumerate(thetas.to(self.device)):
            model = self.model.parameters(theta)
            for piece in chosen.split(self._sequences_at_once(1)):
                batch = self._batch(piece)
                if self.native is None:
                    totals[place] += self.model.losses(model, batch).double().cpu()
                else:
                    totals[place] += self.native.loss(theta, batch)
        return totals / (count * self.training.sequence_length)

    def _step(self, steps: Sequence[tuple[int, float]]) -> None:
        tasks = [self.tasks[row] for row, _ in steps]
        starts = [task.next_starts() for task in tasks]
        losses = self._gradients(tasks, torch.tensor(starts, device=self.device)) / self.training.tokens_per_step
        for task, loss, (_, progress) in zip(tasks, losses.tolist(), steps, strict=True):
            task.finish(loss, progress)

    def _gradients(
        self,
        tasks: Sequence[PooledTask],
        starts: Tensor,  # [n, B] first tokens of each task's sequences
    ) -> Tensor:
        """Return the [n] summed losses; leave the mean gradients in the tasks' rows of ``gradient``."""
        pieces = starts.split(self._sequences_at_once(len(tasks)), dim=1)
        weight = 1 / self.training.tokens_per_step
        if len(tasks) == 1:
            task = tasks[0]
            task.gradient.zero_()
            losses = [self._accumulate(task, self._batch(piece[0]), weight) for piece in pieces]
            return torch.stack(losses).sum()[None]
        rows = torch.tensor([task.row for task in tasks], device=self.device)
        gradient = torch.zeros_like(self.theta[: len(tasks)])
        model, grads = self.model.parameters(self.theta[rows]), self.model.parameters(gradient)
        losses = [self.model.accumulate(model, grads, self._batch(piece), weight) for piece in pieces]
        self.gradient[rows] = gradient
        return torch.stack(losses).sum(0)

    def _accumulate(self, task: PooledTask, batch: Tensor, weight: float) -> Tensor:
        """Add the gradient of one peer's sequences; return their summed loss."""
        if self.native is None:
            return self.model.accumulate(task.model, task.grads, batch, weight)
        return torch.tensor(self.native.accumulate(task.theta, task.gradient, batch, weight))

    def _batch(
        self,
        starts: Tensor,  # [n, B]
    ) -> Tensor:
        """Return the sequences and their targets, [n, B, T+1] int64."""
        return self._tokens[starts[..., None] + self._span].long()

    @property
    def _rows_at_once(self) -> int:
        if self.device.type == "cpu":
            return 1
        return max(1, CUDA_PASS_TOKENS // self.training.tokens_per_step)

    def _sequences_at_once(self, rows: int) -> int:
        most = CPU_PASS_TOKENS if self.device.type == "cpu" else CUDA_PASS_TOKENS
        return max(1, most // (rows * self.training.sequence_length))


class PooledTask:
    """One peer of the pool: a ``ports.InnerTask`` whose theta is a row of the pool's."""

    def __init__(self, pool: LanguageModelPool, row: int, share: TextShare) -> None:
        self.row = row
        self.step = 0
        """Inner steps ever made, this peer's position in its text. Never reset."""
        self.theta = pool.theta[row]
        """[P] fp32 weights, updated in place."""
        self.gradient = pool.gradient[row]
        self.model, self.grads = pool.model.parameters(self.theta), pool.model.parameters(self.gradient)
        self._pool = pool
        self._share = share
        self._moments = pool.first_moment[row], pool.second_moment[row]
        self._optimizer = FlatOptimizer(
            pool.layout, pool.training, pool.hidden, self.theta, self.gradient, *self._moments
        )
        self._rewarm_steps = 0  # length of the current re-warming
        self._rewarmed = 0  # steps of it that are done
        self._prepared: tuple[float, InnerStepResult] | None = None

    def inner_step(self, progress: float) -> InnerStepResult:
        """Make one inner step, or return the result of the one that the pool has prepared at this progress."""
        if self._prepared is None:
            self._pool.prepare([(self.row, progress)])
        assert self._prepared is not None
        prepared, result = self._prepared
        assert prepared == progress
        self._prepared = None
        return result

    def reset(self, warmup_steps: int) -> None:
        """Reset the moments and let the learning rate rise linearly over the next ``warmup_steps`` steps."""
        for moment in self._moments:
            moment.zero_()
        self._optimizer.steps = 0
        self._rewarm_steps, self._rewarmed = warmup_steps, 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state under the names of ``LanguageModelTask.state_dict``, as views of live memory."""
        counters = (self.step, self._optimizer.steps, self._rewarm_steps, self._rewarmed)
        return {
            "first_moment": self._moments[0],
            "second_moment": self._moments[1],
            "counters": torch.tensor(counters, dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._moments[0].copy_(state["first_moment"])
        self._moments[1].copy_(state["second_moment"])
        self.step, self._optimizer.steps, self._rewarm_steps, self._rewarmed = state["counters"].tolist()

    # --- used by the pool ---------------------------------------------------------------------------------------------

    def next_starts(self) -> list[int]:
        """Return the first tokens of the sequences of the next step."""
        assert self._prepared is None, "the prepared inner step was not taken"
        pool = self._pool
        return self._share.starts(self.step, pool.training.sequences_per_step)

    def finish(self, loss: float, progress: float) -> None:
        """Clip the gradient, step the optimizer unless the gradient is not finite, and keep the result.

        Clipping is that of ``torch.nn.utils.clip_grad_norm_``. ``inner_step`` returns the result.
        """
        training = self._pool.training
        norm = float(torch.linalg.vector_norm(self.gradient))
        if math.isfinite(norm):
            if norm + 1e-6 > training.gradient_clip:
                self.gradient.mul_(training.gradient_clip / (norm + 1e-6))
            rate = learning_rate(progress + training.tokens_per_step, training, self._pool.run_tokens)
            if self._rewarmed < self._rewarm_steps:
                rate *= (self._rewarmed + 1) / self._rewarm_steps
            self._optimizer.step(rate)
        self._rewarmed = min(self._rewarmed + 1, self._rewarm_steps)
        self.step += 1
        self._prepared = progress, InnerStepResult(loss, training.tokens_per_step)


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, once per process; harmless with other C libraries.

    glibc returns large blocks to the system at once and maps them again page by page until a large block has been
    freed: from then on it keeps blocks of up to that size, and twice as much at the end of its heap. It learns at most
    32 MB. (Measured: steps of 1024 and 2048 tokens take 9.2 and 8.5 us a token instead of 10.9 and 12.8.)
    """
    torch.empty(KEPT_BYTES, dtype=torch.uint8)
