"""R2: how much sooner more peers reach the loss of one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.cost import INT8_BITS, METHODS, CostSetting, Method, at_bits, utilization
from bench.evidence.cells import ALONE, FINAL_SEEDS, TOKENS, Cell, CellSetting, Contender, block
from bench.evidence.contenders import (
    DDP,
    DDP_ADAMW,
    DILOCO,
    DILOCO_ADAMW,
    LOCAL,
    LOCAL_ADAMW,
    SWARM_ADAMW_MODULAR4,
    SWARM_MODULAR4,
)
from bench.evidence.layout import Column, Entry, Experiment, PlotPanel, PlotPoint, ResultTable, TableRow, columns, rows
from bench.evidence.published import APPLY_S_PER_PARAMETER
from bench.evidence.scenario import STEP_S, tokens_per_step

PEERS = (2, 4, 8, 16, 32, 64)
BUDGETS = (1, 2, 4)
"""Tokens of all peers over those of the one. At equal tokens many peers end above its loss."""
MOST_FEW = 4
"""Largest number of peers for which the last budget is not run: fewer tokens suffice."""
FIRST_SEED = FINAL_SEEDS[:1]
BUDGETS_OF_SWARM = {2: (1, 2), 4: (1, 2), 8: (1, 2), 16: (1, 2), 32: (1, 2, 4)}
"""Budgets by number of peers that more than one seed of swarm-2 needs to come to the loss of one."""

METHODS_OF: dict[str, Method] = {
    SWARM_MODULAR4.name: METHODS["swarm-2 modular4"],
    DILOCO.name: at_bits(METHODS["diloco"], INT8_BITS, "diloco int8"),
    DDP.name: METHODS["ddp"],
}
"""Cost model of each method's traffic. DiLoCo's loss is simulated in fp32 and its time computed in int8, as OpenDiLoCo
sends it, which is to its advantage."""

HOME_PARAMETERS, HOME_STEP_S = 15.5e6, 2.0
"""Model and inner step on home lines: 4,096 tokens at 190 GFLOP/s (6 P T). At two seconds all four exchanges of swarm-2
fit into ten steps, so that its loss does not depend on the line."""

MUON = (SWARM_MODULAR4, DILOCO, DDP)
ADAMW = (SWARM_ADAMW_MODULAR4, DILOCO_ADAMW, DDP_ADAMW)


def setting(contender: Contender, peers: int, budget: int = 1) -> CellSetting:
    """Return the setting of a point of the curve."""
    return CellSetting(peers=peers, inner_steps=1 if contender.forms == ("ddp",) else 10, tokens=budget * TOKENS)


def _cells(contender: Contender, budgets: Sequence[int] = BUDGETS[:1]) -> tuple[Cell, ...]:
    chosen = [setting(contender, n, b) for n in PEERS for b in budgets if n > MOST_FEW or b < BUDGETS[-1]]
    return block("R2", (contender,), chosen, seeds=FIRST_SEED)


def seconds(peers: int, tokens: float) -> float:
    """Return the time in which peers compute so many tokens together."""
    return tokens / (peers * tokens_per_step(ALONE)) * STEP_S


def tokens_to(loss: float, runs: Sequence[tuple[int, float]]) -> float | None:
    """Return the budget that ends at a loss, between runs of (tokens, final loss); None if none ends as low.

    Losses are interpolated linearly in the logarithm of the tokens. If the smallest budget ends lower, it is returned.
    """
    before: tuple[int, float] | None = None
    for tokens, found in sorted(runs):
        if found <= loss:
            if before is None:
                return tokens
            share = (before[1] - loss) / (before[1] - found)
            return math.exp((1 - share) * math.log(before[0]) + share * math.log(tokens))
        before = tokens, found
    return None


def at_home(contender: str, peers: int) -> float:
    """Return the share of their time that peers on home lines compute."""
    line = CostSetting(
        HOME_PARAMETERS,
        HOME_STEP_S,
        10,
        up_bit_per_s=20e6,
        down_bit_per_s=100e6,
        peers=peers,
        latency_s=0.05,
        apply_s_per_parameter=APPLY_S_PER_PARAMETER,
    )
    return utilization(METHODS_OF[contender], line).others


def _sooner(entries: Sequence[Entry]) -> list[Entry]:
    """Add ``sooner`` and ``sooner_home`` to the runs with one budget: one peer's time over the peers' to its loss."""
    alone = {
        each["seed"]: each["headline"]["loss"]
        for each in entries
        if each["contender"] == LOCAL.name and "loss" in each["headline"]
    }
    runs: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for each in entries:
        if "loss" in each["headline"]:
            place = each["contender"], each["setting"].get("peers", 8), each["seed"]
            runs.setdefault(place, []).append((each["setting"].get("tokens", TOKENS), each["headline"]["loss"]))
    made: list[Entry] = []
    for each in entries:
        name, peers, seed = each["contender"], each["setting"].get("peers", 8), each["seed"]
        more: dict[str, float] = {}
        if name in METHODS_OF and "tokens" not in each["setting"] and seed in alone:
            tokens = tokens_to(alone[seed], runs.get((name, peers, seed), ()))
            if tokens is not None:
                more["sooner"] = seconds(1, TOKENS) / seconds(peers, tokens)
                more["sooner_home"] = more["sooner"] * at_home(name, peers)
        made.append({**each, "headline": {**each["headline"], **more}})
    return made


def _row(contender: Contender, peers: int = 0) -> TableRow:
    changes = {"peers": peers} if peers else {}
    return TableRow(contender.name, changes | ({"inner_steps": 1} if contender.forms == ("ddp",) else {}))


def _by_peers(figure: str, digits: int, budget: int = 1, peers: Sequence[int] = PEERS) -> tuple[Column, ...]:
    settings = {f"N = {n}": CellSetting(peers=n, tokens=budget * TOKENS) for n in peers}
    return columns(figure, settings, digits=digits)


def _panel(title: str, figure: str) -> PlotPanel:
    return PlotPanel(
        title,
        "peers",
        "times as soon as one peer",
        {
            each.name: (
                PlotPoint(LOCAL.name, ALONE, 1, 1),
                *(PlotPoint(each.name, setting(each, n), n, figure) for n in PEERS),
            )
            for each in MUON
        },
        logarithmic=True,
    )


R2 = Experiment(
    id="R2",
    question="More peers, sooner: 1 to 64 peers with one budget of tokens",
    notes=(
        "Loss at equal tokens of all peers together; one peer alone makes all steps itself. Inner rates are tuned at "
        "each number of peers (64: as 32), outer numbers at N = 8. swarm-2 sends modular4, the default.",
        "Times as soon: one peer's time to the end of its budget over the time in which N peers end at the same loss. "
        "Many peers need more tokens for it: their budget is interpolated between runs with 1, 2 and 4 times the "
        "tokens, each with its own schedule. Without a figure, 4 times are not enough. If they end lower "
        "with the tokens of one, the figure is N.",
        "Free lines: time is that of computing alone. Lines of 100 / 20 Mbit/s: the same runs, times the share of "
        "computing from the formulas of R4 for 15.5M parameters and steps of 2 s, at which everything that swarm-2 "
        "sends fits, so that the loss does not depend on the line. diloco sends int8 there and ddp fp32.",
        "Three seeds of swarm-2 from 2 to 32 peers, one of the other methods (three at N = 8 without more tokens). "
        "AdamW: one seed, inner rates of N = 8.",
    ),
    cells=(
        *block("R2", (LOCAL,), (ALONE,)),
        # A curve is drawn before other seeds are finished.
        *(cell for each in MUON for cell in _cells(each)),
        *(cell for each in MUON for cell in _cells(each, BUDGETS[1:])),
        *block(
            "R2",
            (SWARM_MODULAR4,),
            (setting(SWARM_MODULAR4, n, b) for n, budgets in BUDGETS_OF_SWARM.items() for b in budgets),
            seeds=FINAL_SEEDS[1:],
        ),
        *block("R2", (DILOCO,), (setting(DILOCO, 8),), seeds=FINAL_SEEDS[1:]),
        *block("R2", (DDP,), (setting(DDP, 8),), seeds=FINAL_SEEDS[1:]),
        *block("R2", (LOCAL_ADAMW,), (ALONE,), seeds=FIRST_SEED),
        *(cell for each in ADAMW for cell in _cells(each)),
    ),
    derive=_sooner,
    tables=(
        ResultTable("Times as soon as one peer, free lines", tuple(map(_row, MUON)), _by_peers("sooner", 1)),
        ResultTable("Times as soon as one peer, 100 / 20 Mbit/s", tuple(map(_row, MUON)), _by_peers("sooner_home", 2)),
        ResultTable("One peer", rows(LOCAL, LOCAL_ADAMW), (Column("loss", "loss", ALONE),)),
        ResultTable("Loss at equal tokens", tuple(map(_row, (*MUON, *ADAMW))), _by_peers("loss", 3)),
        ResultTable("Loss with twice the tokens", tuple(map(_row, MUON)), _by_peers("loss", 3, 2)),
        ResultTable(
            "Loss with four times the tokens",
            tuple(map(_row, MUON)),
            _by_peers("loss", 3, 4, tuple(n for n in PEERS if n > MOST_FEW)),
        ),
    ),
    panels=(_panel("free lines", "sooner"), _panel("100 / 20 Mbit/s, 15.5M parameters", "sooner_home")),
)
