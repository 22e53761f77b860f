"""Cells: one contender in one setting with one seed. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

TUNING_SEED = 0
FINAL_SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Method with its numbers and codec: a row of a table."""

    name: str
    forms: tuple[str, ...]
    """Recipes that the method may stand for. Each is tuned on the whole grid; the best one represents the method."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Manifest section ``outer``, except recipe, H, learning rate and momentum."""
    codec: Mapping[str, Any] = field(default_factory=dict)
    """Manifest section ``codec``; the default is fp32."""
    pace: Mapping[str, Any] = field(default_factory=dict)
    """Scenario section ``pace``; the default is the same H for all peers."""
    tuned_as: str | None = None
    """Contender whose tuning is used; None for methods without outer learning rate and momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSetting:
    """Circumstances of a run: a column of a table. The defaults are the central setting."""

    peers: int = 8
    inner_steps: int = 10
    """H."""
    steps: int = 3_200
    """Inner steps of each honest peer; the run ends at their tokens, whichever peers make them."""
    data: Literal["iid", "shards"] = "iid"
    """Shards (non-IID): each peer reads only its own stretch of the corpus."""
    learner: Literal["lm", "quadratic", "bytes"] = "lm"
    points: int = 1
    """Evaluations along the run; the last one uses the whole split."""
    exchange_steps: float = 0.05
    """Time to send all parameters in fp32 over one line, in inner steps. Learner bytes ignores it."""
    straggler: float = 1.0
    """Bandwidth of one peer as a share of the others'."""
    failures: float = 0.0
    """Share of exchanges that fail half-way."""
    comings_and_goings: bool = False
    """A quarter of the peers leaves at half time, and as many arrive after a third of it."""
    speed_ratio: float = 1.0
    """Computing speed of one peer over the others'."""
    liars: int = 0
    """Number of adversarial peers among ``peers``."""
    lie: str = ""
    """What they do (``p2ptrain.sim.scenario.Lie``)."""

    def key(self) -> dict[str, Any]:
        """Fields that differ from the central setting, as files and tables name the setting."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }


CENTRAL = CellSetting()


@dataclass(frozen=True, slots=True)
class Choice:
    """Recipe, outer learning rate and momentum of a run."""

    recipe: str
    learning_rate: float
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    experiment: str
    contender: Contender
    setting: CellSetting
    seed: int
    choice: Choice | None = None
    """Prescribed numbers; None: the tuned ones."""
    quick: bool = False
    """Part of ``make results-quick``."""
    shorter: int = 1
    """Divisor of the steps, for ``make results-quick``."""

    @property
    def split(self) -> Literal["validation", "test"]:
        """Validation for the tuning seed, test for final numbers."""
        return "validation" if self.seed == TUNING_SEED else "test"

    @property
    def steps(self) -> int:
        """Inner steps of each peer. A shortened cell still makes at least ten outer steps."""
        if self.shorter == 1 or self.setting.learner == "bytes":
            return self.setting.steps
        return max(self.setting.steps // self.shorter, 10 * self.setting.inner_steps)

    @property
    def name(self) -> str:
        """Description for messages."""
        differing = (f"{key}={value}" for key, value in self.setting.key().items())
        return " ".join([self.experiment, self.contender.name, *differing, f"seed={self.seed}"])


def block(
    experiment: str,
    contenders: Iterable[Contender],
    settings: Iterable[CellSetting],
    *,
    seeds: Iterable[int] = FINAL_SEEDS,
    choice: Choice | None = None,
    quick: Iterable[Contender] = (),
) -> tuple[Cell, ...]:
    """Return the cells of all combinations; the first seed of the contenders in ``quick`` is in the quick part."""
    seeds, contenders, quick = tuple(seeds), tuple(contenders), tuple(quick)
    return tuple(
        Cell(
            experiment=experiment,
            contender=contender,
            setting=setting,
            seed=seed,
            choice=choice,
            quick=contender in quick and seed == seeds[0],
        )
        for setting in settings
        for seed in seeds
        for contender in contenders
    )
