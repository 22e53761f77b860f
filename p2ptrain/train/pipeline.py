"""Inner optimization by a team: each rank trains one stage of the model, and an inner step is one pipeline schedule.

A rank is a ``LanguageModelTask`` over its stage's shorter flat vector. It differs in two places: the gradient comes
from a 1F1B schedule (``pipeline_schedule``), and the clip needs the norm over all ranks. Every rank reads the same
batch, named by (seed, peer, step); only activations and their gradients travel, through the host.

One all-reduce concludes the backward pass: each rank puts the norms of its gradients at their parameters' places, the
last rank the loss. The norm of that vector is bitwise the one that torch's ``clip_grad_norm_`` computes in one process,
so a team in fp32 trains bitwise as one process with the same micro-batch. Tied embeddings are the exception: their two
gradients are summed in another order.

Dimension letters: B sequences of an inner step, b of a micro-batch, T tokens a sequence, D width, N parameters of the
whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.base.errors import DeviceError, TeamMemoryError
from p2ptrain.data.corpus import Corpus
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import CorpusReader
from p2ptrain.train.boundary import EXACT, Boundary
from p2ptrain.train.compiled_pass import CompiledPassError, PassShape
from p2ptrain.train.compiled_stage import CompiledStage
from p2ptrain.train.cross_entropy import summed_cross_entropy
from p2ptrain.train.evaluate import GoesOn, HeldOutLoss
from p2ptrain.train.inner import CLIP_EPSILON, COMPILED, ArrivingStepResult, LanguageModelTask
from p2ptrain.train.micro_batches import CompiledMicroBatches, MicroBatches
from p2ptrain.train.pace import Pace
from p2ptrain.train.pass_choice import StageChoice
from p2ptrain.train.pipeline_schedule import run_schedule
from p2ptrain.train.sequence_parts import predicted
from p2ptrain.train.staged_evaluation import StagedHeldOut, staged_validation_loss
from p2ptrain.train.stages import StageModel, StagePass, fitting_micro_batch
from p2ptrain.train.team_group import TeamGroup

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder, TrainingSection
    from p2ptrain.train.replicas import Replicas

HOST = torch.device("cpu")


class PipelineTask(LanguageModelTask):
    """Training of one stage's flat weights, in step with the other ranks of the team. Owned by the trainer thread.

    ``inner_step`` is a collective: all ranks call it with the same progress. It raises TeamError if another rank fails,
    and TeamMemoryError if this one runs out of memory; then ranks resume from a checkpoint in a new group.

    Args:
        model: this rank's stage.
        group: the team; its ranks are the stages, in order.
        corpus, training, run_tokens, reader: as for LanguageModelTask, the same on all ranks.
        placement: the same autocast type and micro-batch on all ranks. The micro-batch is lowered to one that divides
            the step's sequences into at least as many as stages. Raises DeviceError if there are fewer sequences.
        boundary: form of the activations between stages.
        is_eager: whether the schedule keeps more micro-batches (``pipeline_schedule.warm_up``).
        replicas: this stage's ranks, if there are several pipelines; ``group`` is this one's.
    """

    def __init__(
        self,
        model: StageModel,
        group: TeamGroup,
        corpus: Corpus,
        training: TrainingSection,
        run_tokens: int,
        reader: CorpusReader,
        placement: Placement,
        boundary: Boundary = EXACT,
        is_eager: bool = True,
        replicas: Replicas | None = None,
    ) -> None:
        stage, sequences = model.stage, training.sequences_per_step
        micro_batch = fitting_micro_batch(sequences, placement.micro_batch, stage.count)
        if micro_batch is None:
            raise DeviceError(
                f"The run has {sequences} sequences per inner step, too few for a pipeline of {stage.count} devices.",
                f"Use at most {sequences} devices.",
            )
        super().__init__(model.flat, corpus, training, run_tokens, reader, replace(placement, micro_batch=micro_batch))
        self.stage_model = model
        self.forward_pass = StagePass(model, placement.autocast, boundary)
        self.group = group
        self.is_eager = is_eager
        self.replicas = replicas
        own = range(sequences // micro_batch) if replicas is None else replicas.own
        self._own = slice(own.start * micro_batch, own.stop * micro_batch)
        """Sequences of an inner step that this pipeline computes."""
        self.announce_reading: Callable[[int], object] = lambda tokens: None
        """Called with the most tokens before the held-out loss is read; the leader's lets the other ranks read, too."""
        self._mean = torch.zeros((), device=self.theta.device)
        """Mean loss of the current step, on the last stage."""
        self.pace = Pace(run_tokens)
        """Times of the inner steps."""
        self.compiled: CompiledMicroBatches | None = None
        """Libraries beside the eager pass; see ``offer``."""
        self._norm = torch.zeros(())
        """Norm of the current step's gradient over all ranks."""

    def inner_step(self, progress: float) -> ArrivingStepResult:
        with self.pace.step(progress):
            return super().inner_step(progress)

    @property
    def autocast(self) -> torch.dtype | None:
        """Compute type of matrix products; None: the weights' own."""
        return self._autocast

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""
        return self.stage_model.whole.parameter_count

    def held_out(self, most_tokens: int, patience_s: float) -> StagedHeldOut:
        """Return the evaluation of the whole model's current weights, a collective."""
        return StagedHeldOut(self, self._corpus, most_tokens, patience_s)

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss of the whole model's current weights in fp32, a collective.

        All ranks pass the same ``most_tokens``; the first one's time limit and ``goes_on`` decide. Raises TeamError.
        """
        self.announce_reading(most_tokens)
        exact = StagePass(self.stage_model, None, EXACT)
        return staged_validation_loss(self, exact, self._corpus, most_tokens, patience_s, goes_on=goes_on)

    def sample(self, new_tokens: int) -> str:
        """Return no text: stages generate none."""
        return ""

    def pass_shape(self, description: Decoder) -> PassShape:
        """Return what this stage's libraries would compute. Raises CompiledPassError if there are none."""
        shape, stage = super().pass_shape(description), self.stage_model.stage
        return replace(
            shape,
            stages=stage.count,
            stage=stage.index,
            first_block=stage.blocks.start,
            end_block=stage.blocks.stop,
        )

    def offer(
        self,
        library: Path,
        shape: PassShape,
        decided: Callable[[str, float | None], None],
        failed: Callable[[str], None],
    ) -> None:
        """Compare the stage's libraries with the eager pass from now on, then use the faster; any thread.

        Raises CompiledPassError if they cannot be loaded. ``StageChoice`` explains the callbacks.
        """
        libraries = CompiledStage(library, self.stage_model, self._mean, shape)
        self.compiled = CompiledMicroBatches(libraries, StageChoice(COMPILED, decided, failed), library)

    def offer_graph(self, decided: Callable[[str, float | None], None], failed: Callable[[str], None]) -> None:
        """Raise CompiledPassError: all micro-batches of a CUDA graph share its memory, and several are in flight."""
        raise CompiledPassError("CUDA graphs have no memory for several micro-batches at once")

    def refresh_guest(self) -> None:
        """Copy the tied embedding from the first to the last stage, a collective of the two."""
        model, group = self.stage_model, self.group
        if not model.is_tied:
            return
        name = f"inner step {self.step}: copy of the tied embedding"
        if model.stage.is_first:
            group.send(name, model.embedding.detach().to(HOST), group.size - 1)
        elif model.guest is not None:
            received = torch.empty(model.guest.shape)
            model.guest.data.copy_(group.receive(name, received, 0))

    def _backward(self, batch: Tensor) -> Tensor:
        """Leave the mean gradient in the parameters; return the mean loss, the same on all ranks."""
        self.refresh_guest()
        self._gradient.zero_()
        self._mean.zero_()
        self._run_schedule(batch[self._own])
        self._sum_tied_gradients()
        if self.replicas is not None:
            self.replicas.sum(f"inner step {self.step}: gradient", self._gradient)
        if self.loss_scale.is_dynamic:
            self._gradient.div_(self.loss_scale.factor)
        loss, self._norm = self._all_reduce()
        return loss

    def _clip(self) -> Tensor:
        """Clip the gradient in place by its norm over all ranks, which it returns."""
        norm = self._norm
        self._gradient.mul_((self._training.gradient_clip / (norm + CLIP_EPSILON)).clamp(max=1.0))
        return norm

    def _run_schedule(
        self,
        batch: Tensor,  # [B, T+1]
    ) -> None:
        name = f"inner step {self.step}: pipeline schedule"
        try:
            parts = torch.split(batch, self.micro_batch)
            with self.group.named(name), self._micro_batches(parts) as micro_batches:
                run_schedule(name, self.group, len(parts), micro_batches, self.is_eager)
        except CompiledPassError as error:  # without memory on a card, which libraries do not say
            raise TeamMemoryError(name, f"the compiled code failed on {self.theta.device}: {error}") from error
        except (RuntimeError, MemoryError) as error:
            if not accelerator.is_out_of_memory(error):
                raise
            raise TeamMemoryError(
                name, f"{self.theta.device} ran out of memory with micro-batches of {self.micro_batch} sequences"
            ) from error

    def _micro_batches(self, parts: Sequence[Tensor]) -> contextlib.closing[MicroBatches]:
        device = self.theta.device
        return contextlib.closing(MicroBatches(parts, self.forward_pass, self.loss_of, self.compiled, device))

    def loss_of(
        self,
        hidden: Tensor,  # [b, T, D] on the device
        targets: Tensor,  # [b, T] on the device
    ) -> Tensor:
        """Return a micro-batch's share of the mean loss, times the loss scale: where the backward pass begins."""
        tokens, factor = self._predicted, self.loss_scale.factor
        rounded_at = factor / tokens if self.loss_scale.is_dynamic else 1.0
        states, wanted = predicted(hidden, targets, self._corpus.is_packed)
        total = summed_cross_entropy(states, self.stage_model.output, wanted, self._autocast, rounded_at)
        loss = total / tokens
        self._mean += loss.detach()
        return loss * factor

    def _sum_tied_gradients(self) -> None:
        """Add the gradient of the last stage's copy of the embedding to the first stage's."""
        model, group = self.stage_model, self.group
        if not model.is_tied:
            return
        name = f"inner step {self.step}: gradient of the tied embedding"
        if model.stage.is_first:
            gradient = model.embedding.grad
            assert gradient is not None  # a view of the flat gradient
            gradient += group.receive(name, torch.empty(gradient.shape), group.size - 1).to(gradient.device)
        elif model.guest is not None and model.guest.grad is not None:
            group.send(name, model.guest.grad.to(HOST), 0)
            model.guest.grad = None

    def _all_reduce(self) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the norm of the whole gradient, on the device."""
        model = self.stage_model
        values = torch.zeros(len(model.whole.names) + 1)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        begin = model.first_parameter
        values[begin : begin + len(norms)] = norms.to(HOST)
        if model.stage.is_last:
            if self.replicas is not None:
                self.replicas.sum(f"inner step {self.step}: loss", self._mean.view(1))
            values[-1] = self._mean
        self.group.sum(f"inner step {self.step}: gradient norms and loss", values)
        device = self.theta.device
        return values[-1].to(device), torch.linalg.vector_norm(values[:-1]).to(device)
