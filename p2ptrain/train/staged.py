"""Inner optimization on several devices: each rank trains a stage of the model, or all of it, on a share of the step.

``torch.distributed.pipelining`` runs the schedule, 1F1B. Each rank has an optimizer of its own for its stage's flat
vector. Sums over replicas and the norm over stages are all-reduces, so that the result differs from one process's by
rounding.

Dimension letters: B sequences of an inner step, b of a micro-batch, T tokens a sequence, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from p2ptrain.ports import GoesOn, HeldOutLoss
from p2ptrain.tokens.corpus import TokenSource
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.inner import CLIP_EPSILON, LanguageModelTask
from p2ptrain.train.model import autocast_to
from p2ptrain.train.ranks import Ranks
from p2ptrain.train.sequence_parts import parts_of, predicted
from p2ptrain.train.stages import StageModel

if TYPE_CHECKING:
    from p2ptrain.manifest import TrainingSection

HOST = torch.device("cpu")


class StageModule(nn.Module):
    """Forward pass of one stage.

    Args:
        model: the stage.
        autocast: compute type of matrix products; None: the weights' own.
    """

    def __init__(self, model: StageModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.base = model.flat.module.base_model
        self.autocast = autocast
        self._name = "input_ids" if model.stage.is_first else "inputs_embeds"
        self._device = model.flat.theta.device

    def forward(
        self,
        given: Tensor,  # [b, T] int64 on the first stage, activations [b, T, D] on the others
        position_ids: Tensor | None = None,  # [b, T] int64, of packed dialogues
    ) -> Tensor:
        """Return activations [b, T, D]."""
        arguments = {self._name: given} if position_ids is None else {self._name: given, "position_ids": position_ids}
        with autocast_to(self._device, self.autocast):
            hidden: Tensor = self.base(**arguments, use_cache=False).last_hidden_state
        return hidden.float()


class StagedTask(LanguageModelTask):
    """Training of one rank's flat weights; every method is a collective of all ranks.

    Args:
        model: this rank's stage.
        ranks: all ranks.
        corpus: rank 0's as for LanguageModelTask, and the others' read from it; see ``RankCorpus``.
        training, run_tokens, reader: as for LanguageModelTask, the same on all ranks.
        placement: the same autocast type and micro-batch on all ranks; ``fitting_micro_batch`` chooses it.
        counts: micro-batches of an inner step that each replica computes.
        moments: as for LanguageModelTask.
    """

    def __init__(
        self,
        model: StageModel,
        ranks: Ranks,
        corpus: TokenSource,
        training: TrainingSection,
        run_tokens: int,
        reader: CorpusReader,
        placement: Placement,
        counts: Sequence[int],
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(model.flat, corpus, training, run_tokens, reader, placement, moments)
        self._batches.reads_ahead = all(ranks.gather(self._batches.copies))  # reading is a collective
        self.stage_model = model
        self.ranks = ranks
        stage, micro_batch = model.stage, placement.micro_batch
        begin, count = sum(counts[: ranks.replica]), counts[ranks.replica]
        self._own = slice(begin * micro_batch, (begin + count) * micro_batch)
        """Sequences of an inner step that this replica computes."""
        self._module = StageModule(model, placement.autocast)
        tokens = micro_batch, training.sequence_length
        activations = torch.empty(*tokens, model.flat.module.config.hidden_size, device="meta", requires_grad=True)
        given = torch.empty(tokens, dtype=torch.int64, device="meta") if stage.is_first else activations
        place = PipelineStage(
            self._module,
            stage.index,
            stage.count,
            self.theta.device,
            input_args=given,  # else the stages exchange pickles of their shapes
            output_args=activations,
            group=ranks.pipeline,
        )
        self._schedule = Schedule1F1B(place, count, self._loss_of, scale_grads=False)
        self._mean = torch.zeros((), device=self.theta.device)
        """Mean loss of the current step, on the last stage."""
        self._norm = torch.zeros((), device=self.theta.device)
        """Norm of the current step's gradient over all stages."""

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""
        return self.stage_model.whole.parameter_count

    def _backward(self, batch: Tensor) -> Tensor:
        """Leave the mean gradient in the parameters; return the mean loss, the same on all ranks."""
        self._refresh_guest()
        self._gradient.zero_()
        self._mean.zero_()
        parts, stage = parts_of(batch[self._own]), self.stage_model.stage
        given = (parts.inputs,) if stage.is_first else ()
        target = parts.labels.contiguous() if stage.is_last else None
        losses, arguments = list[Tensor](), dict[str, Any](parts.arguments)
        self._schedule.step(*given, target=target, losses=losses, return_outputs=False, **arguments)
        self._sum_tied_gradients()
        self.ranks.sum_replicas(self._gradient)
        if self.loss_scale.is_dynamic:
            self._gradient.div_(self.loss_scale.factor)
        return self._all_reduce()

    def _clip(self) -> Tensor:
        """Clip the gradient in place by its norm over all stages, which it returns."""
        self._gradient.mul_((self._training.gradient_clip / (self._norm + CLIP_EPSILON)).clamp(max=1.0))
        return self._norm

    def _loss_of(
        self,
        hidden: Tensor,  # [b, T, D]
        labels: Tensor,  # [b, T]
    ) -> Tensor:
        """Return a micro-batch's share of the mean loss, times the loss scale."""
        tokens, factor = self._predicted, self.loss_scale.factor
        rounded_at = factor / tokens if self.loss_scale.is_dynamic else 1.0
        states, wanted = predicted(hidden, labels, self._corpus.is_packed)
        loss = summed_cross_entropy(states, self.stage_model.output, wanted, self._autocast, rounded_at) / tokens
        self._mean += loss.detach()
        return loss * factor

    def _refresh_guest(self) -> None:
        """Copy the tied embedding from the first to the last stage."""
        model = self.stage_model
        if not model.is_tied:
            return
        if model.stage.is_first:
            self.ranks.send(model.embedding.detach().to(HOST), model.stage.count - 1)
        elif model.guest is not None:
            model.guest.data.copy_(self.ranks.receive(torch.empty(model.guest.shape), 0))

    def _sum_tied_gradients(self) -> None:
        """Add the gradient of the last stage's copy of the embedding to the first stage's."""
        model = self.stage_model
        if not model.is_tied:
            return
        if model.stage.is_first:
            gradient = model.embedding.grad
            assert gradient is not None  # a view of the flat gradient
            gradient += self.ranks.receive(torch.empty(gradient.shape), model.stage.count - 1).to(gradient.device)
        elif model.guest is not None and model.guest.grad is not None:
            self.ranks.send(model.guest.grad.to(HOST), 0)
            model.guest.grad = None

    def _all_reduce(self) -> Tensor:
        """Return the mean loss, on the device, and keep the norm of the whole gradient."""
        self.ranks.sum_replicas(self._mean)
        own = torch.stack([self._mean.double(), torch.linalg.vector_norm(self._gradient).double().square()])
        loss, square = self.ranks.sum(own.to(HOST)).to(torch.float32).to(self.theta.device)
        self._norm = square.sqrt()
        return loss

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def validation_loss(
        self,
        most_tokens: int,
        autocast: torch.dtype | None,
        patience_s: float,
        goes_on: GoesOn,
    ) -> HeldOutLoss:
        """Return what ``evaluate.validation_loss`` returns for the whole model in one process, a collective.

        The first stage's time limit and ``goes_on`` decide.
        """
        self._refresh_guest()
        return validation_loss(
            self.model.module,
            self._corpus,
            most_tokens,
            autocast,
            patience_s,
            goes_on=goes_on if self.stage_model.stage.is_first else lambda read, wanted: True,
            loss_of=lambda batch: self._summed_loss(batch, autocast),
            agreed=self._agreed,
        )

    def _summed_loss(
        self,
        batch: Tensor,  # [B, T+1] or [B, 3, T]
        autocast: torch.dtype | None,
    ) -> float:
        """Pass a batch through this stage; return its summed loss on the last one, 0 on the others."""
        stage, device = self.stage_model.stage, self.theta.device
        parts = parts_of(batch.to(device))
        given = parts.inputs
        if not stage.is_first:
            width = self.model.module.config.hidden_size
            given = self.ranks.receive(torch.empty(parts.sequences, parts.tokens, width), stage.index - 1).to(device)
        before, self._module.autocast = self._module.autocast, autocast
        try:
            hidden = self._module(given, parts.positions)
        finally:
            self._module.autocast = before
        if not stage.is_last:
            self.ranks.send(hidden.to(HOST), stage.index + 1)
            return 0.0
        states, targets = predicted(hidden, parts.labels, parts.positions is not None)
        return float(summed_cross_entropy(states, self.stage_model.output, targets, autocast))

    def _agreed(self, total: float, *first: float) -> list[float]:
        """Return the last stage's total and the first stage's numbers, on all stages of this replica."""
        stage = self.stage_model.stage
        mine = [total if stage.is_last else 0.0, *(number if stage.is_first else 0.0 for number in first)]
        return self.ranks.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
