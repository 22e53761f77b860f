"""A learner without weights: it counts steps, tokens and bytes in microseconds, so that thousands of peers fit.

``CountingLearner`` replaces ``train.Learner`` and has the same effect on the protocol: the same events at the same
steps, the same sizes, displacements applied between two inner steps. Everything that depends on weights is left out:
there is no loss, no inner phase is ever discarded, and every exchange measures the scenario's disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import LinkId
from p2ptrain.host.inbox import RoundFinished
from p2ptrain.swarm.events import (
    Adopted,
    Applied,
    Commit,
    Event,
    ExchangeDue,
    OuterStepDone,
    PhaseDone,
    TrainingEnded,
    Unfit,
)


@dataclass(frozen=True, slots=True)
class Blank:
    """Bytes of which only the number is known, and whether an adversarial peer made them up."""

    size: int
    garbage: bool = False

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class BlankPayload:
    """``host.payloads.Encoded`` without content."""

    parts: tuple[Blank, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlankDifference:
    """``host.payloads.Difference`` without content."""

    distance: float
    norm: float = 0.0
    fingerprint: bytes = b""
    sketched: float = 0.0


class _CountedAdoption(NamedTuple):
    link: LinkId
    step: int
    progress: float
    left_behind: bool


_Delivery = Commit | RoundFinished | _CountedAdoption


@dataclass(frozen=True, slots=True)
class CountingRules:
    """Rules that all counting learners of a simulation share."""

    inner_steps: int
    """Inner steps per outer step, H."""
    run_tokens: float
    tokens_per_step: int
    blocks: bool
    """Whether the recipe waits for partners between two inner phases."""
    streams: int
    """Tensors of each fragment that partners may have."""
    fragments: tuple[Blank, ...]
    """Encoded fragments of all streams."""
    proposals: tuple[Blank, ...]
    """Proposal sent before each fragment; empty if the codec needs no negotiation."""
    weights: tuple[Blank, ...]
    """Fragments in fp32."""
    disagreement: float
    """Disagreement that every exchange measures."""
    due: tuple[int, ...]
    """Inner steps of a phase after which an exchange falls due, in order."""


class CountingLearner:
    """A learner without weights (see the module), with the methods of ``train.Learner``."""

    def __init__(self, rules: CountingRules) -> None:
        self.step = 0
        self.progress = 0.0
        self.peers = 1.0
        self.tokens = 0
        self.loss = nan
        self.ended = False
        self.is_waiting = False
        self._rules = rules
        self._inner = 0
        self._phase_tokens = 0
        self._inbox: list[_Delivery] = []

    def steps_ahead(self) -> int:
        """Return the number of inner steps up to and including the next one that has an event."""
        if self._inbox:
            return 1
        for due in self._rules.due:
            if due > self._inner:
                return due - self._inner
        return self._rules.inner_steps - self._inner

    def count(self, steps: int) -> None:
        tokens = self._rules.tokens_per_step
        self.tokens += steps * tokens
        self._phase_tokens += steps * tokens
        for _ in range(steps):  # added one by one, for bitwise equal sums
            self.progress += tokens * self.peers
        self._inner += steps

    def advance(self) -> list[Event]:
        events = self.settle() if self._inbox else []
        if self.ended or self.is_waiting:
            return events
        rules = self._rules
        self.count(1)
        due = [ExchangeDue()] * rules.due.count(self._inner) if rules.due else []
        if self._inner == rules.inner_steps:
            self._inner = 0
            if rules.blocks:
                self.is_waiting = True
                events.append(PhaseDone(self.step + 1, self.progress))
            else:
                events += self._end_step()
        return events + due

    def settle(self) -> list[Event]:
        events: list[Event] = []
        inbox, self._inbox = self._inbox, []
        for place, ready in enumerate(inbox):
            match ready:
                case Commit():
                    self.progress += ready.progress_displacement
                    events.append(Applied(ready.link, self.progress))
                case RoundFinished():
                    if self.is_waiting and ready.step == self.step + 1:
                        self.is_waiting = False
                        events += self._end_step()
                case _CountedAdoption() if self.ended:
                    events.append(Unfit(ready.link, "the run's end came first"))
                case _CountedAdoption():
                    return events + self._adopt(ready, inbox[place + 1 :])
        return events

    def _end_step(self) -> list[Event]:
        self.step += 1
        events: list[Event] = [OuterStepDone(self.step, self.progress, self._phase_tokens)]
        self._phase_tokens = 0
        if self.progress >= self._rules.run_tokens:
            self.ended = True
            events.append(TrainingEnded(self.step, self.progress))
        return events

    def _adopt(self, ready: _CountedAdoption, later: Sequence[_Delivery]) -> list[Event]:
        """Take over a donor's position in the run; everything queued behind it is stale."""
        self.step = ready.step
        self.progress = ready.progress
        self._inner = self._phase_tokens = 0
        self.is_waiting = False
        self.ended = self.progress >= self._rules.run_tokens
        stale = [Applied(each.link, self.progress) for each in later if isinstance(each, Commit)]
        ended = [TrainingEnded(self.step, self.progress)] if self.ended else []
        return [*stale, Adopted(ready.link, self.step, self.progress), *ended]

    @property
    def payloads(self) -> CountingLearner:
        """The learner itself, which also serves as its inbox."""
        return self

    inbox = payloads

    def propose(self, fragments: Sequence[int]) -> tuple[None, list[Blank]]:
        """Return the snapshot for partners, which is none, and the proposals."""
        return None, [self._rules.proposals[fragment] for fragment in fragments] if self._rules.proposals else []

    def proposal_sizes(self, fragments: Sequence[int]) -> list[int]:
        return [proposal.size for proposal in self.propose(fragments)[1]]

    def encode(
        self, fragments: Sequence[int], mine: Sequence[Blank], theirs: Sequence[Blank], snapshot: None
    ) -> BlankPayload:
        parts = [self._rules.fragments[fragment] for fragment in fragments]
        return BlankPayload(tuple(parts), sum([part.size for part in parts]))

    def difference(self, mine: BlankPayload, theirs: Sequence[Blank]) -> BlankDifference:
        if any(part.garbage for part in theirs):
            raise RemoteError("its weights are not finite")
        return BlankDifference(self._rules.disagreement)

    def deliver(self, commit: Commit, difference: BlankDifference) -> None:
        self._inbox.append(commit)

    def proceed(self, step: int) -> None:
        self._inbox.append(RoundFinished(step))

    def weights(self) -> list[Blank]:
        return list(self._rules.weights)

    def adopt(
        self, link: LinkId, step: int, progress: float, parts: Sequence[Blank], left_behind: bool = False
    ) -> None:
        self._inbox.append(_CountedAdoption(link, step, progress, left_behind))

    @property
    def streams(self) -> int:
        return self._rules.streams

    def encoded_sizes(self, fragments: Sequence[int]) -> list[int]:
        return [self._rules.fragments[fragment].size for fragment in fragments]

    @property
    def are_zero(self) -> bool:
        return True  # there are no weights

    def weight_sizes(self) -> list[int]:
        return [part.size for part in self._rules.weights]
