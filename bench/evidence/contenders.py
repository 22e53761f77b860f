"""The methods that compete, as data. Recipes are explained in docs/ALGORITHMS.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.evidence.cells import Contender
from p2ptrain.recipes import RECIPES

PAIRS: Mapping[str, Any] = {"topology": "random", "partners": 1}
TWO: Mapping[str, Any] = {"topology": "random", "partners": 2}
ONE_EXCHANGE: Mapping[str, Any] = {"exchanges_per_step": 1}
TWO_EXCHANGES: Mapping[str, Any] = {"exchanges_per_step": 2}

FP32: Mapping[str, Any] = {"name": "fp32"}
INT8: Mapping[str, Any] = {"name": "int8", "block_size": 1024}
INT4: Mapping[str, Any] = {"name": "int4", "block_size": 64}
MODULAR8: Mapping[str, Any] = {"name": "modular8"}
MODULAR4: Mapping[str, Any] = {"name": "modular4"}
TOP_K: Mapping[str, Any] = {"gradients": "topk"}
LOW_RANK: Mapping[str, Any] = {"gradients": "lowrank"}

BY_RANK: Mapping[str, Any] = {"policy": "rank"}

LOCAL = Contender(name="local", forms=("local",))
DDP = Contender(name="ddp", forms=("ddp",))
DPSGD = Contender(name="dpsgd", forms=("dpsgd",), outer=PAIRS)
AD_PSGD = Contender(name="ad_psgd", forms=("ad_psgd",), outer=ONE_EXCHANGE)

DILOCO = Contender(name="diloco", forms=("diloco",), tuned_as="diloco")
NOLOCO = Contender(name="noloco", forms=("noloco",), outer=PAIRS, tuned_as="noloco")
GASLOC = Contender(name="gasloc", forms=("gasloc_y", "gasloc_z"), outer=PAIRS, tuned_as="gasloc")
"""Its two accelerated forms; their points with mu = 0 are the paper's plain form."""
FACTORED = Contender(name="factored_gossip", forms=("factored_gossip",), outer=PAIRS, tuned_as="factored_gossip")
"""Both mixes local, as strangers can run it; R8 has the others."""
SWARM = Contender(name="swarm", forms=("swarm",), outer=ONE_EXCHANGE, tuned_as="swarm")
CONFIRMED = (DILOCO, NOLOCO, GASLOC, FACTORED, SWARM)
"""Run in all of R1's settings."""

SWARM_SLOW = Contender(name="swarm, slow", forms=("swarm_slow",), outer=ONE_EXCHANGE, tuned_as="swarm, slow")
"""The slow weights in place of the fast ones: against swarm it shows what mixing in mid-phase is worth."""
SWARM_BLOCKING = Contender(name="swarm, blocking", forms=("gasloc",), outer=PAIRS, tuned_as="swarm, blocking")
"""A local Nesterov step, then one planned pair, and the trainer waits for it: nobody's published method. Against
"swarm, slow" it shows what asynchrony costs."""
SWARM_GRADIENTS = Contender(name="swarm g", forms=("swarm_gradients",), outer=ONE_EXCHANGE, tuned_as="swarm g")
SWARM_BOTH = Contender(name="swarm x and g", forms=("swarm_both",), outer=ONE_EXCHANGE, tuned_as="swarm x and g")

STREAMING = Contender(
    name="streaming_diloco", forms=("streaming_diloco",), outer={"fragments": 4}, tuned_as="streaming_diloco"
)
EAGER = Contender(name="eager_diloco", forms=("eager_diloco",), tuned_as="eager_diloco")
DILOCOX = Contender(name="dilocox", forms=("dilocox",), codec=LOW_RANK, pace=BY_RANK, tuned_as="dilocox")
"""With adaptive compression: CODEC's rank and the setting's H are what it begins with, and never exceeds."""
SPARSELOCO = Contender(name="sparseloco", forms=("sparseloco",), codec=TOP_K, tuned_as="sparseloco")
"""Its "momentum" is the decay of error feedback, which has three decays of its own on the grid."""

ONE_CELL = (STREAMING, EAGER, DILOCOX, SPARSELOCO)
"""Tuned like the others, and then run at one cell."""

TUNED = (*CONFIRMED, SWARM_SLOW, SWARM_BLOCKING, SWARM_GRADIENTS, SWARM_BOTH, *ONE_CELL)
"""Every contender with an outer learning rate and momentum of its own."""

GASLOC_2 = replace(GASLOC, name="gasloc-2", outer=TWO)
SWARM_2 = replace(SWARM, name="swarm-2", outer=TWO_EXCHANGES)
SWARM_HALF = replace(SWARM, name="swarm half", outer={**ONE_EXCHANGE, "fragments": 2, "fragments_per_exchange": 1})
"""Half the parameters in each exchange: swarm makes about 2 exchanges an outer step, so it sends as many bytes as
methods that make one."""
SWARM_INT8 = replace(SWARM, name="swarm int8", codec=INT8)
SWARM_MODULAR4 = replace(SWARM, name="swarm modular4", codec=MODULAR4)
SWARM_2_MODULAR4 = replace(SWARM_2, name="swarm-2 modular4", codec=MODULAR4)
SWARM_2_HALF_MODULAR4 = replace(
    SWARM_2,
    name="swarm-2 half modular4",
    outer={**TWO_EXCHANGES, "fragments": 2, "fragments_per_exchange": 1},
    codec=MODULAR4,
)
"""The bits of "swarm modular4", in twice as many exchanges of half the parameters."""


def on(contender: Contender, topology: str, partners: int | None = None) -> Contender:
    """The contender on another topology, with its tuned numbers. A method that looks for partners by itself makes as
    many exchanges an outer step as it is to have partners."""
    outer = {**contender.outer, "topology": topology}
    if partners is not None:
        draws = RECIPES[contender.forms[0]].is_random
        outer["exchanges_per_step" if draws else "partners"] = partners
    label = {"random": f"{partners}-peer"}.get(topology, topology)
    return replace(contender, name=f"{contender.name} {label}", outer=outer)
