"""Inner optimization on one peer's share of the corpus: the implementation of ``ports.InnerTask``.

One inner step reads the sequences for (seed, peer id, own step counter), accumulates their mean gradient over as many
micro-batches as the device needs, clips it, and takes one step of AdamW or Muon (``optimizer``) at the learning rate
that the schedule gives for the swarm's progress. Weights and moments are always fp32; bf16 and fp16 are used only by
autocast, fp16 with dynamic loss scaling (``loss_scale``).

Weights, their gradient and both moments are flat tensors: parameters and optimizer state are views of them, so saving,
resetting and replacing them copies vectors, and no parameter names appear. A single peer computes bitwise the same as a
plain loop over a plain module, which a test checks.

Dimension letters: P parameters (padded), B sequences of an inner step, T tokens a sequence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2ptrain.base.errors import DeviceError
from p2ptrain.ports import GoesOn, HeldOutLoss
from p2ptrain.tokens.corpus import TokenSource
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import Placement
from p2ptrain.train.batches import Batches, CorpusReader
from p2ptrain.train.compiled_pass import CompiledPass, CompiledPassError, PassShape
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.loss_scale import LossScale
from p2ptrain.train.memory import CARD_MEMORY_FRACTION
from p2ptrain.train.model import FlatModel, recompute_activations, summed_loss
from p2ptrain.train.optimizer import FlatOptimizer, muon_parameters
from p2ptrain.train.schedule import learning_rate

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder, TrainingSection

logger = logging.getLogger(__name__)

SKIPS_TOLD = 10
"""Skipped steps in a row after which the owner gets one warning. Ten halvings reduce the initial loss scale to 64; a
gradient that is too large then has another cause than the search for the scale."""

CLIP_EPSILON = 1e-6
"""Added to the norm that divides; of torch.nn.utils.clip_grad_norm_."""

_KEEPS = "a compiled pass would keep activations, for which memory is short"
_PACKED = "passes are compiled for plain text, and this run's corpus has dialogues"
_SCALES = "the scale of the loss, which a compiled pass cannot change, is dynamic in fp16"


@dataclass(frozen=True, slots=True)
class InnerStep:
    """``ports.StepResult`` of a model on this machine."""

    loss: float  # in nats a token, before the step
    tokens: int


class LanguageModelTask:
    """Training of a language model's flat weights, in place. Owned by the trainer thread.

    Args:
        model: its ``theta`` is trained; may hold any weights.
        run_tokens: end of the schedule.
        reader: determines this peer's order of sequences.
        placement: types, initial micro-batch and recomputation; see ``autofit``.
        moments: memory of the optimizer's moments, [P] each on the device; None: new and zero.
    """

    def __init__(
        self,
        model: FlatModel,
        corpus: TokenSource,
        training: TrainingSection,
        run_tokens: int,
        reader: CorpusReader,
        placement: Placement,
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.micro_batch = min(placement.micro_batch, training.sequences_per_step)
        """Sequences computed at once; halved when the device runs out of memory."""
        self.step = 0
        """Inner steps ever made: this peer's position in the corpus, never reset."""
        self.learning_rate = 0.0
        """Learning rate of the last inner step that moved weights; 0 before."""
        self.compiled: CompiledPass | None = None
        """What computes micro-batches of its shape instead of the eager pass; see ``offer``."""
        self._on_compiled_failure: Callable[[str], None] = lambda why: None
        self.moving: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while the optimizer moves weights and moments."""
        self._corpus = corpus
        self._batches = Batches(corpus, reader, training.sequences_per_step, model.theta.device)
        self._predicted = training.tokens_per_step
        """Tokens that the current step predicts, over which its loss is a mean; all, unless dialogues are packed."""
        self._training = training
        self._run_tokens = run_tokens
        self.loss_scale = LossScale(placement.autocast is torch.float16)
        """Scale of the loss, 1 unless autocast computes in fp16, and the count of skipped steps."""
        self._autocast = placement.autocast
        self._recomputes = placement.recomputes
        recompute_activations(model.module, self._recomputes)
        self._parameters = list(model.module.parameters())
        self._rewarm_steps = 0  # length of the current warm-up after a reset
        self._rewarmed = 0  # steps of that warm-up already made, skipped ones too
        self._moments = moments or (torch.zeros_like(model.theta), torch.zeros_like(model.theta))
        self._gradient = torch.zeros_like(model.theta)
        for parameter, gradient in zip(self._parameters, model.layout.views(self._gradient).values(), strict=True):
            parameter.grad = gradient
        self._optimizer = FlatOptimizer(
            model.layout,
            training,
            muon_parameters(model.module, training),
            model.theta,
            self._gradient,
            *self._moments,
            placement.muon,
        )

    @property
    def theta(self) -> Tensor:
        """Fast weights, [P] fp32 on the training device; not a copy."""
        return self.model.theta

    @property
    def parameter_count(self) -> int:
        return self.model.layout.parameter_count

    @property
    def computes_in(self) -> str:
        return Placement(self._autocast, self.micro_batch).computes_in

    @property
    def skipped_steps(self) -> int:
        return self.loss_scale.skipped

    @property
    def coverage(self) -> float:
        """Fraction of the training set that this peer has read, 0 to 1."""
        return min(1.0, self.step * self._training.sequences_per_step / self._corpus.train_sequences)

    def inner_step(self, progress: float) -> InnerStep:
        """Make one step. Raises DeviceError if the model does not fit the device with one sequence at a time.

        A gradient that is not finite moves nothing (it would stay in the moments): the step is skipped. Its tokens
        count as trained all the same, so that the schedule and the run's end do not wait for them.

        A card still moves the weights when this returns, so that it has work while the host prepares the next step.
        """
        training = self._training
        batch = self._batches.at(self.step)
        self._predicted = max(1, batch.predicted)
        mean = self._backward(batch.sequences)
        norm = self._clip()
        loss, length = torch.stack([mean, norm.to(mean)]).tolist()
        rate = learning_rate(progress + training.tokens_per_step, training, self._run_tokens)
        rate *= self._rewarm_factor()
        is_finite = math.isfinite(length)
        if is_finite:
            with self.moving():
                self._optimizer.step(rate)
        self._rewarmed = min(self._rewarmed + 1, self._rewarm_steps)
        self.step += 1
        self._batches.prepare(self.step)
        self._count(is_finite, rate)
        return InnerStep(loss, training.tokens_per_step)

    def _clip(self) -> Tensor:
        """Shorten the gradient to the run's limit; return its norm before, on the device.

        The CPU takes the norm of the parameters' norms, as a plain loop does, bitwise; a card that of the flat vector,
        in one pass.
        """
        limit = self._training.gradient_clip
        if self.theta.device.type == "cpu":
            return torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        norm = torch.linalg.vector_norm(self._gradient)
        self._gradient.mul_((limit / (norm + CLIP_EPSILON)).clamp(max=1.0))
        return norm

    def _count(self, is_finite: bool, rate: float) -> None:
        self.loss_scale.update(is_finite)
        if is_finite:
            self.learning_rate = rate
        elif self.loss_scale.skipped_in_a_row % SKIPS_TOLD == 0:
            logger.warning(
                "%d inner steps in a row taught nothing: their gradients are not finite. If this goes on, the run's"
                " learning rate is too high or this device computes wrongly; try --device cpu.",
                self.loss_scale.skipped_in_a_row,
            )

    def tried_loss(self, most_tokens: int, patience_s: float) -> float:
        """Read a short held-out loss of the current weights in the type that training computes in."""
        return self.validation_loss(most_tokens, self._autocast, patience_s, lambda read, wanted: True).value

    def held_out_loss(self, most_tokens: int, patience_s: float, goes_on: GoesOn) -> HeldOutLoss:
        """Read the held-out loss of the current weights in fp32."""
        return self.validation_loss(most_tokens, None, patience_s, goes_on)

    def validation_loss(
        self, most_tokens: int, autocast: torch.dtype | None, patience_s: float, goes_on: GoesOn
    ) -> HeldOutLoss:
        """See ``evaluate.validation_loss``."""
        return validation_loss(self.model.module, self._corpus, most_tokens, autocast, patience_s, goes_on=goes_on)

    def pass_shape(self, description: Decoder) -> PassShape:
        """Return what a compiled pass would compute. Raises CompiledPassError if there is none for this device."""
        device = self.theta.device
        if device.type not in ("cpu", "cuda"):
            raise CompiledPassError(
                f"passes are compiled for the CPU and CUDA cards alone, and this one is on {device}"
            )
        if self._corpus.is_packed:
            raise CompiledPassError(_PACKED)
        if self.loss_scale.is_dynamic:
            raise CompiledPassError(_SCALES)
        if self._recomputes:
            raise CompiledPassError(_KEEPS)
        training = self._training
        sizes = self.micro_batch, training.sequence_length, training.tokens_per_step
        return PassShape.of(description, *sizes, self.computes_in, device)

    def offer(self, shape: PassShape, in_graphs: bool, failed: Callable[[str], None]) -> None:
        """Compute micro-batches by a compiled pass from the next inner step on; any thread.

        Args:
            in_graphs: whether it is compiled as a CUDA graph.
            failed: called once, with the reason, if it fails later; training then goes on eagerly.

        Raises CompiledPassError if memory became short.
        """
        if self._recomputes:
            raise CompiledPassError(_KEEPS)
        if in_graphs and not self.has_room_for_graph():  # what is compiled without was not tried
            raise CompiledPassError("the card's free memory is too small for the CUDA graph")
        self._on_compiled_failure = failed
        self.compiled = CompiledPass(self.model, self._gradient, shape, in_graphs)

    def _give_up_compiled(self, why: str) -> None:
        if self.compiled is not None:
            self.compiled = None
            self._on_compiled_failure(why)

    def has_room_for_graph(self) -> bool:
        """Return whether a card can hold the activations of a pass twice: a graph's memory is its own."""
        if self.theta.device.type != "cuda":
            return False
        free, peak = accelerator.free_bytes(self.theta.device), accelerator.peak_bytes(self.theta.device)
        state = 4 * self.theta.nbytes  # weights, gradient and two moments
        return free is not None and peak is not None and 2 * (peak - state) <= CARD_MEMORY_FRACTION * free

    def reset(self, warmup_steps: int) -> None:
        """Clear the moments and raise the learning rate linearly over the next ``warmup_steps`` steps."""
        for moment in self._moments:
            moment.zero_()
        self._optimizer.steps = 0
        self._rewarm_steps, self._rewarmed = warmup_steps, 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return moments [P] and counters, views of live memory as torch's own: copy them before the next step."""
        return {
            "first_moment": self._moments[0],
            "second_moment": self._moments[1],
            "counters": torch.tensor(self.counters(), dtype=torch.int64),
            "loss_scale": self.loss_scale.state(),
        }

    def counters(self) -> list[int]:
        """Return inner steps ever made, those of the optimizer, and length and steps made of the current warm-up."""
        return [self.step, self._optimizer.steps, self._rewarm_steps, self._rewarmed]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state_dict``. Raises KeyError or ValueError if it does not fit, before any change.

        A state of an older version has no loss scale; the scale then starts anew.
        """
        first, second, counters = state["first_moment"], state["second_moment"], state["counters"]
        if not first.shape == second.shape == self.theta.shape or counters.shape != (4,):
            raise ValueError(
                f"moments {list(first.shape)} and {list(second.shape)} with {list(counters.shape)} counters,"
                f" where {list(self.theta.shape)} and [4] belong"
            )
        if (scale := state.get("loss_scale")) is not None:
            self.loss_scale.load(scale)
        self._moments[0].copy_(first)
        self._moments[1].copy_(second)
        self.step, self._optimizer.steps, self._rewarm_steps, self._rewarmed = counters.tolist()

    def _backward(
        self,
        batch: Tensor,  # [B, T+1] or [B, 3, T]
    ) -> Tensor:
        """Leave the mean gradient in the parameters; return the mean loss, on the device.

        If memory is short, halve the micro-batch; at one sequence, recompute activations.
        """
        while True:
            try:
                return self._accumulate(batch)
            except CompiledPassError as error:  # the same step again, eagerly
                self._give_up_compiled(str(error))
                continue
            except (RuntimeError, MemoryError) as error:
                if not accelerator.is_out_of_memory(error):
                    raise
                if self.micro_batch == 1 and self._recomputes:
                    raise DeviceError(
                        f"The model does not fit {self.theta.device}: one sequence of"
                        f" {self._training.sequence_length} tokens runs out of memory.",
                        "Close other programs that use the device, or choose another: --device cpu is limited only by"
                        " the computer's memory.",
                    ) from error
            # Outside the handler, because its traceback keeps the failed attempt's tensors alive.
            self._recomputes |= self.micro_batch == 1
            recompute_activations(self.model.module, self._recomputes)
            self._give_up_compiled("memory is short")  # it takes larger micro-batches, or keeps activations
            self.micro_batch = max(1, self.micro_batch // 2)
            accelerator.empty_cache(self.theta.device)
            again = ", activations recomputed" if self._recomputes else ""
            logger.warning("out of memory: continuing with micro-batches of %d sequences%s", self.micro_batch, again)

    def _accumulate(
        self,
        batch: Tensor,  # [B, T+1]
    ) -> Tensor:
        total = torch.zeros((), device=self.theta.device)
        factor = self.loss_scale.factor
        compiled = None if self._recomputes else self.compiled  # one may have been offered when memory ran short
        self._gradient.zero_()
        for part in torch.split(batch, self.micro_batch):
            total += self._eager_pass(part) if compiled is None or not compiled.takes(part) else compiled.run(part)
        if self.loss_scale.is_dynamic:
            self._gradient.div_(factor)
        return total

    def _eager_pass(
        self,
        part: Tensor,  # [b, T+1]
    ) -> Tensor:
        """Add the gradient of the part's share of the mean loss; return that share."""
        tokens, factor = self._predicted, self.loss_scale.factor
        rounded_at = factor / tokens if self.loss_scale.is_dynamic else 1.0
        loss = summed_loss(self.model.module, part, self._autocast, rounded_at) / tokens
        torch.autograd.backward(loss, torch.full_like(loss, factor))
        return loss.detach()

    def _rewarm_factor(self) -> float:
        if self._rewarmed >= self._rewarm_steps:
            return 1.0
        return (self._rewarmed + 1) / self._rewarm_steps
