"""R8: outer learning rate and momentum (GASLoC, figures 7 and 8), and the two mixes of Factored Gossip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.evidence.cells import CENTRAL, TUNING_SEED, Cell, CellSetting, Choice, Contender, block
from bench.evidence.contenders import FACTORED, GASLOC, SWARM, SWARM_BLOCKING
from bench.evidence.layout import AVERAGED, BITS, DISAGREEMENT, LOSS, Experiment, ResultTable, TableRow
from bench.evidence.tuning import points

LARGE = CellSetting(peers=32)
FORMS: Mapping[str, Contender] = {
    "swarm": SWARM,
    "gasloc": SWARM_BLOCKING,
    "gasloc_y": GASLOC,
    "gasloc_z": GASLOC,
    "factored_gossip": FACTORED,
}
AT_32 = ("swarm", "gasloc_z")
MIXES = ("none", "local", "global")


def _name(choice: Choice) -> str:
    return f"{choice.recipe} mu={choice.momentum:g} eta={choice.learning_rate:g}"


def _grid(recipes: tuple[str, ...], setting: CellSetting) -> tuple[Cell, ...]:
    """Return single runs on the validation split; at N = 8 they are the runs of the tuning."""
    return tuple(
        cell
        for recipe in recipes
        for choice in points(recipe)
        for cell in block(
            "R8", (replace(FORMS[recipe], name=_name(choice)),), (setting,), seeds=(TUNING_SEED,), choice=choice
        )
    )


def _grid_table(recipes: tuple[str, ...], setting: CellSetting) -> ResultTable:
    lines = sorted((choice for recipe in recipes for choice in points(recipe)), key=lambda each: each.momentum)
    return ResultTable(
        f"Learning rate and momentum, N = {setting.peers}, H = 10 (one seed, validation split)",
        tuple(TableRow(_name(each)) for recipe in recipes for each in lines if each.recipe == recipe),
        (replace(LOSS, setting=setting, best=None), replace(DISAGREEMENT, setting=setting)),
        row_heading="recipe",
    )


def _mixed(mix1: str, mix2: str) -> Contender:
    recipe = "factored_gossip" if (mix1, mix2) == ("local", "local") else f"factored_gossip_{mix1}_{mix2}"
    return replace(FACTORED, name=f"Mix1 {mix1}, Mix2 {mix2}", forms=(recipe,))


HALF = replace(
    FACTORED,
    name="Mix1 local, Mix2 local on half of the parameters",
    forms=("factored_gossip_half",),
    outer={**FACTORED.outer, "fragments": 2, "fragments_per_exchange": 2},
)
MIXED = (*(_mixed(mix1, mix2) for mix1 in MIXES for mix2 in MIXES if (mix1, mix2) != ("none", "none")), HALF)

R8 = Experiment(
    id="R8",
    question="Outer optimizer: learning rate and momentum at 8 and 32 peers; Mix1 and Mix2",
    notes=(
        'gasloc is the recipe with a local Nesterov step ("swarm, blocking" in R1); gasloc_y and gasloc_z are two '
        "readings of GASLoC's acceleration. At mu = 0 all three are the paper's plain form.",
        "The grids are single runs and decide only the tuning.",
        "Mix1 and Mix2: N = 8, H = 10, test split, with the numbers tuned for factored_gossip.",
    ),
    cells=(*_grid(tuple(FORMS), CENTRAL), *block("R8", MIXED, (CENTRAL,)), *_grid(AT_32, LARGE)),
    tables=(
        ResultTable(
            "Mix1 and Mix2",
            tuple(TableRow(each.name) for each in MIXED),
            (LOSS, AVERAGED, DISAGREEMENT, BITS),
            row_heading="factored_gossip",
        ),
        _grid_table(tuple(FORMS), CENTRAL),
        _grid_table(AT_32, LARGE),
    ),
)
