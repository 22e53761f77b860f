"""Simulation of the recipes that average over all peers at once: lockstep steps, and their cost on a scenario's lines.

There are no messages. An outer step takes the time of the slowest computer's inner phase and of the average over the
narrowest line (``sim.lockstep.averages``): a ring all-reduce or, if messages do not add up to one, a gathering. An
average that fails is repeated until all peers have the exact one. Averages that are used late overlap with the next
phase as far as they fit, with all their attempts.

Legend: N peers, F elements of one fragment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from random import Random

import torch
from torch import Tensor

from p2ptrain.codec import Codec, CodecTerms, LowRankCodec, Matrices, is_decodable
from p2ptrain.codec.base import MagnitudeError
from p2ptrain.host.rules import codecs_of
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES, Stream
from sim.evaluation import Evaluation, finite
from sim.learner_pool import QuadraticLearnerPool
from sim.learning import LanguageModelLearner
from sim.lm.language import LanguageLearnerPool
from sim.lockstep.averages import Averages
from sim.lockstep.feedback import Feedback, compress
from sim.lockstep.lockstep import Lockstep, LockstepRules
from sim.report import REPORT_VERSION, Bytes, CurvePoint, GroupFigures, SimulationReport
from sim.scenario import Scenario
from sim.simulation import LEFT_OUT, RUN, Progress, cost
from sim.step_times import RankStepTimes


class Lossy:
    """View that others have of a stream: through a codec and back, with error feedback if the codec needs it.

    Args:
        matrices: matrices in each fragment; empty if unknown.
    """

    def __init__(self, scenario: Scenario, matrices: Sequence[Matrices] = ()) -> None:
        recipe = RECIPES[scenario.outer.recipe]
        slow, gradients = codecs_of(scenario.codec)
        self._codecs: dict[Stream, Codec] = {"slow": slow, "pseudo_gradient": gradients}
        self._decay = scenario.outer.momentum if recipe.feedback else 1.0
        self._matrices = tuple(matrices) or ((),) * scenario.outer.fragments
        self._feedback: dict[tuple[Stream, int, int], Feedback] = {}
        """Error feedback by stream, fragment and peer."""
        self.encoded: dict[Stream, int] = {}
        """Bytes of one peer's messages in total, by stream."""

    def __call__(self, stream: Stream, fragment: int, values: Tensor) -> Tensor:
        codec = self._codecs[stream]
        terms = CodecTerms(values.shape[1], matrices=self._matrices[fragment])
        self.encoded[stream] = self.encoded.get(stream, 0) + codec.encoded_size(terms)
        if codec.name == "fp32":
            return values
        assert is_decodable(codec), "the scenario rejects others"
        rows = []
        for place, row in enumerate(values.cpu().float()):
            if codec.needs_feedback:
                feedback = self._feedback.get((stream, fragment, place)) or Feedback.empty(len(row))
                message, feedback = compress(codec, row, feedback, terms, self._decay)
                self._feedback[stream, fragment, place] = feedback
            else:
                message = codec.encode(row.contiguous(), terms)
            rows.append(codec.decode(message, terms))
        return torch.stack(rows).to(values)

    def use_rank(self, rank: int) -> None:
        """Use this rank for pseudo-gradients from the next message on. Error feedback is kept."""
        self._codecs["pseudo_gradient"] = LowRankCodec(rank)


class EnsembleSimulation:
    """All peers of a scenario in lockstep, from its start to its report."""

    def __init__(self, scenario: Scenario, device: str = "cpu") -> None:
        self.scenario = scenario
        self._recipe = RECIPES[scenario.outer.recipe]
        self._together = self._recipe.gradients
        self._pool = (
            LanguageLearnerPool(scenario, device, self._together)
            if isinstance(scenario.learner, LanguageModelLearner)
            else QuadraticLearnerPool(scenario)
        )
        self._tasks = self._pool.tasks
        self._send = Lossy(scenario, self._pool.matrices)
        self._averages = Averages(scenario, Random(f"{scenario.run.seed}/conditions"))
        self._lockstep = self._make_lockstep()
        self._rank_pace = None
        if scenario.pace.policy == "rank":
            self._rank_pace = RankStepTimes(scenario.codec.rank, scenario.outer.inner_steps, self._pool.matrices[0])
        outer_steps = -(-scenario.run_tokens // (scenario.tokens_per_outer_step * scenario.total_peers))
        self._inner_steps = outer_steps * scenario.outer.inner_steps
        """Inner steps of each peer in the whole run: whole phases of the scenario's H."""
        self._look_every = max(1, outer_steps // scenario.run.points) * scenario.outer.inner_steps
        """Inner steps between two points of the curve."""
        self._curve: list[CurvePoint] = []
        self._made = 0
        """Inner steps made by each peer."""
        self._has_diverged = False
        """Whether losses, averages or messages are no longer finite, which ends the simulation."""
        self._now = self._sent = self._received = 0.0
        self._began = 0.0, 0.0

    def run(self, progress: Progress | None = None) -> None:
        self._began = time.perf_counter(), time.process_time()
        while not (self._has_diverged or self._is_done or self._now >= (self.scenario.run.seconds or inf)):
            self._step()
            if progress is not None:
                progress(self._made / self._inner_steps)
        self._look(final=True)

    def report(self, title: str) -> SimulationReport:
        scenario = self.scenario
        everybody = self._figures(scenario.total_peers, max(group.step_s for group in scenario.peers))
        return SimulationReport(
            version=REPORT_VERSION,
            title=title,
            scenario=scenario.model_dump(),
            simulated_s=self._now,
            ending=self._ending,
            events=self._lockstep.step,
            overall=everybody,
            groups={name: self._figures(group.count, group.step_s) for name, group in scenario.named()},
            curve=self._curve,
            notes=self._averages.notes() | (self._rank_pace.notes() if self._rank_pace is not None else {}),
            left_out=[
                "messages: the average of all peers is exact and costs a ring all-reduce over the narrowest line or"
                " of gathering all messages through a store",
                *LEFT_OUT,
            ],
            cost=cost(self._began, self._lockstep.step),
        )

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        before, inner_steps = dict(self._send.encoded), self.scenario.outer.inner_steps
        if self._rank_pace is not None:  # no more tokens than with a fixed H: the last phase may be cut short
            inner_steps = min(self._rank_pace.inner_steps, self._inner_steps - self._made)
            self._send.use_rank(self._rank_pace.rank)
        try:
            self._lockstep.outer_step(inner_steps)
        except MagnitudeError:
            self._has_diverged = True
            return
        average = self._lockstep.average
        if not (isfinite(self._lockstep.loss) and average.isfinite().all()):
            self._has_diverged = True
        elif self._rank_pace is not None:
            self._rank_pace.follow(average, inner_steps)
        encoded = {stream: total - before.get(stream, 0) for stream, total in self._send.encoded.items()}
        self._pass_time(encoded, inner_steps)
        looks, self._made = self._made // self._look_every, self._made + inner_steps
        if self._made // self._look_every > looks and not self._is_done:
            self._look(final=False)

    @property
    def _ending(self) -> str:
        return "all of them diverged" if self._has_diverged else "all peers are done"

    @property
    def _is_done(self) -> bool:
        return self._made >= self._inner_steps

    @property
    def _loss(self) -> float | None:
        return None if self._has_diverged else finite(self._lockstep.loss)

    def _make_lockstep(self) -> Lockstep:
        scenario, outer = self.scenario, self.scenario.outer
        rules = LockstepRules(
            recipe=RECIPES["local"] if self._together else self._recipe,
            outer=OuterRule(outer.learning_rate, 0.0 if self._recipe.feedback else outer.momentum, outer.nesterov),
            inner_steps=outer.inner_steps,
            topology=outer.topology,
            partners=outer.partners,
            fragments=self._pool.fragments,
            seed=RUN,
        )
        return Lockstep(
            self._tasks,
            rules,
            advance=lambda progress: [task.inner_step(progress).loss for task in self._tasks],
            tokens_per_step=scenario.learner.tokens_per_step * scenario.total_peers,
            send=self._send,
            reach=self._reaches,
        )

    def _reaches(self, step: int, one: int, other: int) -> bool:
        """Draw from the pair and the step, so that every call and both sides get one result."""
        run = self.scenario.run
        if not run.failed_exchanges:
            return True
        pair = f"{min(one, other)}/{max(one, other)}"
        return Random(f"{run.seed}/conditions/{step}/{pair}").random() >= run.failed_exchanges

    def _look(self, final: bool) -> None:
        lockstep, peers = self._lockstep, self.scenario.total_peers
        evaluation = self._pool.evaluate_weights(lockstep.slow, final)
        losses = evaluation.losses or ()
        mean = finite(sum(losses) / len(losses))
        if self._has_diverged:  # weights from before the last phase may still look good
            mean, evaluation = None, Evaluation(None, None, None)
        self._curve.append(
            CurvePoint(
                time_s=self._now,
                outer_steps=float(lockstep.step),
                tokens=lockstep.progress / peers,
                loss=self._loss,
                validation=mean,
                validation_of_mean=finite(evaluation.loss_of_mean),
                disagreement=finite(evaluation.disagreement),
                groups={name: mean for name, _ in self.scenario.named()},
            )
        )

    # --- time and bytes -----------------------------------------------------------------------------------------------

    def _pass_time(self, encoded: Mapping[Stream, int], inner_steps: int) -> None:
        """Advance time and bytes by one outer step: the inner phase, and the averages after or during it.

        Args:
            encoded: bytes of one peer's messages in the step.
            inner_steps: inner steps of the step.
        """
        seconds = {"blocking": 0.0, "overlapped": 0.0}
        for mix in self._recipe.mixes:
            message = 4 * self.scenario.learner.parameters if self._together else encoded.get(mix.stream, 0)
            average_cost = self._averages.cost(mix, message)
            self._sent += average_cost.up_bytes
            self._received += average_cost.down_bytes
            seconds[mix.when] += average_cost.seconds
        slowest = max(group.step_s for group in self.scenario.peers) * inner_steps
        self._now += max(slowest, seconds["overlapped"]) + seconds["blocking"]

    def _figures(self, peers: int, step_s: float) -> GroupFigures:
        steps = self._lockstep.step
        bits = 8 * self._sent / (self.scenario.learner.parameters * steps) if steps else None
        up, down = (Bytes(payload=passed, total=passed) for passed in (self._sent, self._received))
        tokens = self._lockstep.progress / self.scenario.total_peers
        return GroupFigures(
            peers=peers,
            outer_steps=steps * peers,
            tokens=round(tokens) * peers,
            loss=self._loss,
            utilization=min(self._made * step_s / self._now, 1.0) if self._now else None,
            up=up,
            down=down,
            bits_per_parameter=bits,
            payload_bits_per_parameter=bits,
            solo_share=0.0,
            endings={self._ending: peers},
        )
