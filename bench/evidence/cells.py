"""What is run: a contender in a setting with a seed. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Split = Literal["validation", "test"]
"""Validation for tuning, test for final numbers."""

TUNING_SEED = 0
FINAL_SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method as it enters: a row of a table."""

    name: str
    """In tables."""

    forms: tuple[str, ...]
    """Recipes that the method may stand for. Each is tuned on the whole grid, and the best one is the method."""

    outer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest's section ``outer`` beside recipe, H, learning rate and momentum."""

    codec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest's section ``codec`` beside fp32 for everything."""

    pace: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the scenario's section ``pace``; none: H for all."""

    tuned_as: str | None = None
    """Whose tuning it uses; None for a method without outer learning rate and momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Under which circumstances: a column of a table. The defaults are the central setting."""

    peers: int = 8
    inner_steps: int = 10
    """H."""
    steps: int = 3_200
    """Inner steps of each peer, all told."""
    data: Literal["iid", "shards"] = "iid"
    """Shards, that is non-IID: each peer reads its own stretch of the corpus and no other."""
    learner: Literal["lm", "quadratic", "bytes"] = "lm"
    points: int = 1
    """Of the curve; each is an evaluation of all peers, the last on the whole split."""
    exchange_steps: float = 0.05
    """s / t: seconds that all parameters take in fp32 over one line, in inner steps of time. .05: traffic is cheap.
    Learner bytes does not read it: its peers are at home."""
    straggler: float = 1.0
    """Bandwidth of one peer as a share of the others'."""
    failures: float = 0.0
    """Share of the exchanges that fail half-way."""
    comings_and_goings: bool = False
    """A quarter of the peers leaves at half time, and as many come at a third of it."""
    speed_ratio: float = 1.0
    """How much faster one peer computes than the others."""
    liars: int = 0
    """So many of the peers ..."""
    lie: str = ""
    """... tell this lie (``p2ptrain.sim.scenario.Lie``)."""

    def key(self) -> dict[str, Any]:
        """What differs from the central setting: how files and tables name it."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }


CENTRAL = Setting()


@dataclass(frozen=True, slots=True)
class Choice:
    """The numbers that the tuning chose, or that a cell of a grid prescribes."""

    recipe: str
    learning_rate: float
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    experiment: str
    contender: Contender
    setting: Setting
    seed: int
    split: Split = "test"
    choice: Choice | None = None
    """Prescribed numbers; None: the contender's tuned ones."""
    tier: int = 3
    """Cells of a lower tier come first: 0 tuning of who takes part in 1, R1's two decisive settings; 2 the other
    centres, 3 to 5 the other questions, 6 and on what time allows."""
    quick: bool = False
    """Whether ``make results-quick`` has it."""
    shorter: int = 1
    """By what its steps are divided, for ``make results-quick``."""

    @property
    def steps(self) -> int:
        """Inner steps of each peer: the setting's, but for quick cells, which still make ten outer steps."""
        setting = self.setting
        if self.shorter == 1 or setting.learner == "bytes":
            return setting.steps
        return max(setting.steps // self.shorter, 10 * setting.inner_steps)

    @property
    def name(self) -> str:
        """For people and for files: what differs from the central setting."""
        parts = [self.contender.name, *(f"{key}={value}" for key, value in self.setting.key().items())]
        if self.choice is not None:
            parts.append(f"{self.choice.recipe} eta={self.choice.learning_rate:g} mu={self.choice.momentum:g}")
        return f"{self.experiment} {' '.join(parts)} seed={self.seed}"
