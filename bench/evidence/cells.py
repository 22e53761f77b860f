"""Cells: one contender in one setting with one seed. Data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

TUNING_SEED = 0
FINAL_SEEDS = (1, 2, 3)


TOKENS = 2_457_600
"""Tokens of all peers together: 20 for each of 123,000 parameters (Hoffmann et al., arXiv 2203.15556), in whole outer
steps of 10 to 30 inner steps for 1 to 64 peers."""

MUON: Mapping[str, Any] = {"optimizer": "muon"}
ADAMW: Mapping[str, Any] = {"optimizer": "adamw"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Method with its numbers, learner and codec: a row of a table."""

    name: str
    forms: tuple[str, ...]
    """Recipes that the method may stand for. Each is tuned on the whole grid; the best one represents the method."""
    tuned_as: str
    """Contender whose tuning is used."""
    learner: Mapping[str, Any] = field(default_factory=lambda: MUON)
    """Scenario section ``learner``, except model, data and learning rate."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Manifest section ``outer``, except recipe, H, learning rate and momentum."""
    codec: Mapping[str, Any] = field(default_factory=dict)
    """Manifest section ``codec``; the default is fp32."""
    pace: Mapping[str, Any] = field(default_factory=dict)
    """Scenario section ``pace``; the default is the same H for all peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSetting:
    """Circumstances of a run: a column of a table. The defaults are the central setting."""

    peers: int = 8
    inner_steps: int = 10
    """H."""
    tokens: int = TOKENS
    """Tokens of all peers together at which the run ends; of each one if the recipe exchanges nothing."""
    model: Literal["small", "large"] = "small"
    """Names in ``scenario.MODELS``."""
    data: Literal["iid", "shards"] = "iid"
    """Shards (non-IID): each peer reads only its own stretch of the corpus."""
    points: int = 1
    """Evaluations along the run; the last one uses the whole split."""
    exchange_steps: float = 0.05
    """Time to send all parameters in fp32 over one line, in inner steps."""
    straggler: float = 1.0
    """Bandwidth of one peer as a share of the others'."""
    failures: float = 0.0
    """Share of exchanges that fail half-way."""
    comings_and_goings: bool = False
    """A quarter of the peers leaves at half time, and as many arrive after a third of it."""
    speeds: tuple[float, ...] = ()
    """Computing speed of each peer in ascending order, the slowest 1; empty if all are equal."""
    liars: int = 0
    """Number of adversarial peers among ``peers``."""
    lie: str = ""
    """What they do (``sim.scenario.Lie``)."""

    def key(self) -> dict[str, Any]:
        """Fields that differ from the central setting, as files and tables name the setting."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }


CENTRAL = CellSetting()
ALONE = CellSetting(peers=1)
"""One computer with the budget of the whole swarm."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Recipe and tuned numbers of a run."""

    recipe: str
    learning_rate: float
    momentum: float
    inner_rate: float | None = None
    """Peak of the inner learning rate; None: the tuned one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    experiment: str
    contender: Contender
    setting: CellSetting
    seed: int
    choice: Choice | None = None
    """Prescribed numbers; None: the tuned ones."""
    inner_rate: float | None = None
    """Prescribed inner rate beside tuned outer numbers; None: the tuned one."""
    quick: bool = False
    """Part of ``make results-quick``."""
    shorter: int = 1
    """Divisor of the tokens, for ``make results-quick``."""

    @property
    def split(self) -> Literal["validation", "test"]:
        """Validation for the tuning seed, test for final numbers."""
        return "validation" if self.seed == TUNING_SEED else "test"

    @property
    def name(self) -> str:
        """Description for messages."""
        differing = [f"{key}={value}" for key, value in self.setting.key().items()]
        if self.choice is not None:
            numbers = {"eta": self.choice.learning_rate, "mu": self.choice.momentum, "inner": self.choice.inner_rate}
            differing += [f"{name}={number:g}" for name, number in numbers.items() if number is not None]
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
