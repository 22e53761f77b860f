"""Learner ``lm``: a real small language model for every simulated peer, all of them in one pool.

The pool holds the peers' weights as rows of one tensor and computes like ``train.inner.LanguageModelTask``: the same
sequences, schedule, clipping, optimizer and state, on the written-out model of ``sim.stacked``. What one peer computes
does not depend on who is computed with it: on the CPU peers are taken one by one, which is faster there, so results are
bitwise the same however steps are grouped; on CUDA they share batched kernels and agree to rounding.

Legend: N peers of the pool, M weight vectors, P parameters (padded), B sequences, T tokens a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.outer import FlatLayout, flatten_module
from p2ptrain.sim.stacked import StackedLlama
from p2ptrain.sim.text import Part, Share, Text
from p2ptrain.train.inner import InnerStepResult, learning_rate
from p2ptrain.train.model import build_module

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder, Training

CPU_PASS_TOKENS = 1024
"""Tokens computed at once on the CPU; more sequences are accumulated. Our measurement, T = 64: 13.6, 10.8 and 9.8 us a
token at 256, 512 and 1024."""

CUDA_PASS_TOKENS = 1 << 18
"""Tokens of all peers together computed at once on CUDA: about 4 GB with the default model. A guess."""


class LanguageModelPool:
    """The language models of all simulated peers.

    Args:
        description: the model, a Llama.
        training: the manifest's section. A simulated data-parallel "peer" of N computers is one with N times the
            sequences a step, N times the warm-up and N times ``tokens_per_peer``.
        tokens_per_peer: where the schedule ends.
        text: what is read.
        shares: one a peer.
        seed: of the initial weights, which all peers share.
        device: where all of it lives.
    """

    def __init__(
        self,
        description: Decoder,
        training: Training,
        tokens_per_peer: int,
        text: Text,
        shares: Sequence[Share],
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        module = build_module(description, seed)
        layout = FlatLayout.of(module)
        self.model = StackedLlama.of(description, layout)
        self.training = training
        self.tokens_per_peer = tokens_per_peer
        self.text = text
        self.device = torch.device(device)
        self.theta = flatten_module(module).detach().to(self.device).repeat(len(shares), 1)
        """[N, P] fp32 the fast weights of all peers."""
        self.gradient = torch.zeros_like(self.theta)
        self.first_moment = torch.zeros_like(self.theta)
        self.second_moment = torch.zeros_like(self.theta)
        self.decays, self.plain = _runs(layout)
        self._tokens = text.tokens.to(self.device)
        self._span = torch.arange(training.sequence_length + 1, device=self.device)
        self.tasks = tuple(PooledTask(self, row, share) for row, share in enumerate(shares))
        """One ``ports.InnerTask`` a peer."""

    def prepare(self, steps: Sequence[tuple[int, float]]) -> None:
        """Make the next inner step of some peers, each given with its progress, in as few kernels as pay.

        Their weights move here; the ``inner_step`` that must follow with the same progress only hands out the result.
        So displacements are applied before, not in between (there they would count as applied after the step).
        """
        for start in range(0, len(steps), self._rows_at_once):
            self._step(steps[start : start + self._rows_at_once])

    def evaluate(
        self,
        thetas: Tensor,  # [M, P] any weights of the model
        part: Part,
        sequences: int | None = None,  # evenly spaced; None: all
    ) -> Tensor:
        """[M] fp64 on the CPU: mean cross entropy in nats a token over held-out text."""
        starts = self.text.starts(part)
        count = len(starts) if sequences is None else max(1, min(sequences, len(starts)))
        chosen = torch.tensor([starts[place * len(starts) // count] for place in range(count)], device=self.device)
        totals = torch.zeros(len(thetas), dtype=torch.float64)
        rows, length = self._rows_at_once, self.training.sequence_length
        for first in range(0, len(thetas), rows):
            some = thetas[first : first + rows].to(self.device)
            for piece in chosen.split(self._sequences_at_once(len(some))):
                batch = self._batch(piece.expand(len(some), -1))
                totals[first : first + rows] += self.model.losses(some, batch).double().cpu()
        return totals / (count * length)

    def _step(self, steps: Sequence[tuple[int, float]]) -> None:
        tasks = [self.tasks[row] for row, _ in steps]
        rows = [row for row, _ in steps]
        low, high = min(rows), max(rows) + 1
        together = rows == list(range(low, high))
        index = torch.tensor(rows, device=self.device)
        theta = self.theta[low:high] if together else self.theta[index]
        gradient = torch.zeros_like(theta)
        starts = torch.tensor([task.next_starts() for task in tasks], device=self.device)  # [n, B]
        losses = torch.zeros(len(rows), device=self.device)
        tokens = self.training.tokens_per_step
        for piece in starts.split(self._sequences_at_once(len(rows)), dim=1):
            losses += self.model.accumulate(theta, self._batch(piece), gradient, 1 / tokens)
        norms = torch.linalg.vector_norm(gradient, dim=1)
        gradient.mul_((self.training.gradient_clip / (norms + 1e-6)).clamp_(max=1.0)[:, None])
        means, finite = (losses / tokens).tolist(), torch.isfinite(norms).tolist()
        for place, (task, (_, progress)) in enumerate(zip(tasks, steps, strict=True)):
            task.finish(gradient[place], means[place], finite[place], progress)

    def _batch(
        self,
        starts: Tensor,  # [n, B]
    ) -> Tensor:
        """[n, B, T+1] int64."""
        return self._tokens[starts[..., None] + self._span].long()

    @property
    def _rows_at_once(self) -> int:
        if self.device.type == "cpu":
            return 1
        return max(1, CUDA_PASS_TOKENS // self.training.tokens_per_step)

    def _sequences_at_once(self, rows: int) -> int:
        """Of each row."""
        most = CPU_PASS_TOKENS if self.device.type == "cpu" else CUDA_PASS_TOKENS
        return max(1, most // (rows * self.training.sequence_length))


class PooledTask:
    """One peer of the pool: a ``ports.InnerTask`` whose theta is a row of the pool's."""

    def __init__(self, pool: LanguageModelPool, row: int, share: Share) -> None:
        self.step = 0
        """Inner steps ever made: this peer's place in its text. Never reset."""
        self._pool = pool
        self._row = row
        self._share = share
        self._adam_steps = torch.zeros((), device=pool.device)
        self._rewarm_steps = 0
        self._rewarmed = 0
        self._prepared: tuple[float, InnerStepResult] | None = None

    @property
    def theta(self) -> Tensor:
        """[P] fp32, in place."""
        return self._pool.theta[self._row]

    def inner_step(self, progress: float) -> InnerStepResult:
        """One inner step, or the result of the one that the pool has prepared with this progress."""
        if self._prepared is None:
            self._pool.prepare([(self._row, progress)])
        assert self._prepared is not None
        prepared, result = self._prepared
        if prepared != progress:
            raise RuntimeError(f"peer {self._row} was prepared at progress {prepared}, not {progress}")
        self._prepared = None
        return result

    def reset(self, warmup_steps: int) -> None:
        """Forget the moments and let the rate rise linearly over the next ``warmup_steps`` steps."""
        self._pool.first_moment[self._row].zero_()
        self._pool.second_moment[self._row].zero_()
        self._adam_steps.zero_()
        self._rewarm_steps, self._rewarmed = warmup_steps, 0

    def state_dict(self) -> dict[str, Tensor]:
        """What ``LanguageModelTask.state_dict`` holds, under the same names. Views of live memory."""
        self._refuse_prepared()
        counters = (self.step, int(self._adam_steps), self._rewarm_steps, self._rewarmed)
        return {
            "first_moment": self._pool.first_moment[self._row],
            "second_moment": self._pool.second_moment[self._row],
            "counters": torch.tensor(counters, dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``; raises KeyError or ValueError where it does not fit, and then changes nothing."""
        self._refuse_prepared()
        first, second, counters = state["first_moment"], state["second_moment"], state["counters"]
        if not first.shape == second.shape == self.theta.shape or counters.shape != (4,):
            raise ValueError(
                f"moments {list(first.shape)} and {list(second.shape)} with {list(counters.shape)} counters,"
                f" where {list(self.theta.shape)} and [4] belong"
            )
        self._pool.first_moment[self._row].copy_(first)
        self._pool.second_moment[self._row].copy_(second)
        self.step, adam_steps, self._rewarm_steps, self._rewarmed = counters.tolist()
        self._adam_steps.fill_(adam_steps)

    # --- the pool's side ----------------------------------------------------------------------------------------------

    def next_starts(self) -> list[int]:
        """The first tokens of the sequences that the next step reads."""
        self._refuse_prepared()
        pool = self._pool
        return self._share.starts(pool.text.corpus.split, self.step, pool.training.sequences_per_step)

    def finish(
        self,
        gradient: Tensor,  # [P] clipped
        loss: float,
        finite: bool,
        progress: float,
    ) -> None:
        """One step of AdamW, unless the gradient is not finite; what ``inner_step`` will hand out."""
        training = self._pool.training
        if finite:
            rate = learning_rate(progress + training.tokens_per_step, training, self._pool.tokens_per_peer)
            if self._rewarmed < self._rewarm_steps:
                rate *= (self._rewarmed + 1) / self._rewarm_steps
            self._adamw(gradient, rate)
            self._rewarmed = min(self._rewarmed + 1, self._rewarm_steps)
        self.step += 1
        self._prepared = progress, InnerStepResult(loss, training.tokens_per_step)

    def _adamw(self, gradient: Tensor, rate: float) -> None:
        pool, training = self._pool, self._pool.training
        self._adam_steps += 1
        moments = pool.first_moment[self._row], pool.second_moment[self._row]
        for runs, decay in ((pool.decays, training.weight_decay), (pool.plain, 0.0)):
            theta, slope, first, second = ([flat[run] for run in runs] for flat in (self.theta, gradient, *moments))
            torch._fused_adamw_(
                theta,
                slope,
                first,
                second,
                [],
                [self._adam_steps] * len(runs),
                lr=rate,
                beta1=training.beta1,
                beta2=training.beta2,
                eps=training.epsilon,
                weight_decay=decay,
                amsgrad=False,
                maximize=False,
            )

    def _refuse_prepared(self) -> None:
        if self._prepared is not None:
            raise RuntimeError(f"peer {self._row} was prepared, and its inner step not taken")


def _runs(layout: FlatLayout) -> tuple[list[slice], list[slice]]:
    """The flat vector cut into runs of parameters that decay (matrices) and that do not (norms)."""
    runs: tuple[list[slice], list[slice]] = [], []
    ends = (*layout.offsets[1:], layout.total)
    for shape, start, end in zip(layout.shapes, layout.offsets, ends, strict=True):
        run = runs[0] if len(shape) >= 2 else runs[1]
        if run and run[-1].stop == start:
            run[-1] = slice(run[-1].start, end)
        else:
            run.append(slice(start, end))
    return runs
