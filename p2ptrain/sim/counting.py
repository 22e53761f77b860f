"""A learner without weights: it counts steps, tokens and bytes, in microseconds, so that thousands of peers fit.

It stands where ``train.Learner`` stands and does what that does to the protocol: the same events at the same steps, the
same sizes, displacements applied between two inner steps. What it leaves out is everything that weights would say:
there is no loss, no inner phase is ever discarded, and every exchange measures the one disagreement that the scenario
gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from p2ptrain.errors import RemoteError
from p2ptrain.ids import LinkId
from p2ptrain.swarm import Terms
from p2ptrain.swarm.events import Adopted, Applied, Event, OuterStepDone, TrainingEnded


@dataclass(frozen=True, slots=True)
class Blank:
    """Bytes of which only the number is known, and whether a liar made them up."""

    size: int
    garbage: bool = False

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class BlankPayload:
    """``train.learner.Encoded`` without content."""

    fragments: tuple[int, ...]
    parts: tuple[Blank, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlankDifference:
    """``train.learner.Difference`` without content."""

    distance: float


@dataclass(frozen=True, slots=True)
class CountingRules:
    """What all counting learners of a simulation share."""

    inner_steps: int
    """H."""
    tokens_per_peer: float
    tokens_per_step: int
    fragments: tuple[Blank, ...]
    """Encoded."""
    weights: tuple[Blank, ...]
    """Each fragment in fp32."""
    disagreement: float
    """What every exchange measures."""


class CountingLearner:
    """See the module. The methods are those of ``train.Learner``."""

    __slots__ = ("_inbox", "_inner", "_rules", "ended", "loss", "progress", "step", "tokens")

    def __init__(self, rules: CountingRules) -> None:
        self.step = 0
        self.progress = 0.0
        self.tokens = 0
        self.loss = nan
        self.ended = False
        self._rules = rules
        self._inner = 0
        self._inbox: list[tuple[LinkId, int | None, float]] = []
        """What exchanges and donors brought: link, the donor's step (None for an exchange), progress."""

    def steps_ahead(self) -> int:
        """How many inner steps there are up to the next that has something to say."""
        return 1 if self._inbox else self._rules.inner_steps - self._inner

    def advance(self) -> list[Event]:
        events = self.settle() if self._inbox else []
        if self.ended:
            return events
        rules = self._rules
        self.tokens += rules.tokens_per_step
        self.progress += rules.tokens_per_step
        self._inner += 1
        if self._inner == rules.inner_steps:
            self._inner = 0
            self.step += 1
            events.append(OuterStepDone(self.step, self.progress))
            if self.progress >= rules.tokens_per_peer:
                self.ended = True
                events.append(TrainingEnded(self.step, self.progress))
        return events

    def settle(self) -> list[Event]:
        events: list[Event] = []
        inbox, self._inbox = self._inbox, []
        while inbox:
            link, step, progress = inbox.pop(0)
            if step is None:
                self.progress += progress
                events.append(Applied(link, self.progress))
                continue
            self.step, self.progress, self._inner = step, progress, 0
            self.ended = progress >= self._rules.tokens_per_peer
            events += [Applied(stale, progress) for stale, its_step, _ in inbox if its_step is None]
            events.append(Adopted(link, step, progress))
            events += [TrainingEnded(step, progress)] if self.ended else []
            inbox.clear()
        return events

    def encode(self, fragments: Sequence[int]) -> BlankPayload:
        parts = tuple(self._rules.fragments[fragment] for fragment in fragments)
        return BlankPayload(tuple(fragments), parts, sum(map(len, parts)))

    def difference(self, mine: BlankPayload, theirs: Sequence[Blank]) -> BlankDifference:
        if any(part.garbage for part in theirs):
            raise RemoteError("its weights are not finite")
        return BlankDifference(self._rules.disagreement)

    def deliver(self, link: LinkId, difference: BlankDifference, mine: Terms, theirs: Terms, progress: float) -> None:
        self._inbox.append((link, None, progress))

    def weights(self) -> list[Blank]:
        return list(self._rules.weights)

    def adopt(self, link: LinkId, step: int, progress: float, parts: Sequence[Blank]) -> None:
        self._inbox.append((link, step, progress))

    def encoded_sizes(self, fragments: Sequence[int]) -> list[int]:
        return [self._rules.fragments[fragment].size for fragment in fragments]

    def weight_sizes(self) -> list[int]:
        return [part.size for part in self._rules.weights]
