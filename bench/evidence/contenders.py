"""Competing methods, as data. docs/ALGORITHMS.md explains the recipes."""

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
MODULAR3: Mapping[str, Any] = {"name": "modular3"}
MODULAR2: Mapping[str, Any] = {"name": "modular2"}
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
"""Two readings of the accelerated form; mu = 0 is the plain form of the paper."""
FACTORED = Contender(name="factored_gossip", forms=("factored_gossip",), outer=PAIRS, tuned_as="factored_gossip")
"""Both mixes in pairs, as peers on the internet can run it; R8 has the global mixes."""
SWARM = Contender(name="swarm", forms=("swarm",), outer=ONE_EXCHANGE, tuned_as="swarm")
CONFIRMED = (DILOCO, NOLOCO, GASLOC, FACTORED, SWARM)
"""Methods in the decisive settings of R1."""

SWARM_SLOW = Contender(name="swarm, slow", forms=("swarm_slow",), outer=ONE_EXCHANGE, tuned_as="swarm, slow")
"""Mixes slow weights instead of fast ones: shows what mixing in mid-phase is worth."""
SWARM_BLOCKING = Contender(name="swarm, blocking", forms=("gasloc",), outer=PAIRS, tuned_as="swarm, blocking")
"""Local Nesterov step, then one planned pair that the trainer waits for. Not a published method; shows what asynchrony
costs."""
SWARM_GRADIENTS = Contender(name="swarm g", forms=("swarm_gradients",), outer=ONE_EXCHANGE, tuned_as="swarm g")
SWARM_BOTH = Contender(name="swarm x and g", forms=("swarm_both",), outer=ONE_EXCHANGE, tuned_as="swarm x and g")

STREAMING = Contender(
    name="streaming_diloco", forms=("streaming_diloco",), outer={"fragments": 4}, tuned_as="streaming_diloco"
)
EAGER = Contender(name="eager_diloco", forms=("eager_diloco",), tuned_as="eager_diloco")
DILOCOX = Contender(name="dilocox", forms=("dilocox",), codec=LOW_RANK, pace=BY_RANK, tuned_as="dilocox")
"""With adaptive compression; the rank of ``scenario.CODEC`` and H are initial values and upper bounds."""
SPARSELOCO = Contender(name="sparseloco", forms=("sparseloco",), codec=TOP_K, tuned_as="sparseloco")
"""The momentum is the decay of error feedback, so the grid has other values for it."""

ONE_CELL = (STREAMING, EAGER, DILOCOX, SPARSELOCO)
"""Methods that are tuned like the others and run in one setting."""

TUNED = (*CONFIRMED, SWARM_SLOW, SWARM_BLOCKING, SWARM_GRADIENTS, SWARM_BOTH, *ONE_CELL)
"""Contenders that are tuned themselves."""

GASLOC_2 = replace(GASLOC, name="gasloc-2", outer=TWO)
SWARM_2 = replace(SWARM, name="swarm-2", outer=TWO_EXCHANGES)
SWARM_HALF = replace(SWARM, name="swarm half", outer={**ONE_EXCHANGE, "fragments": 2, "fragments_per_exchange": 1})
"""Half of the parameters in each exchange. Swarm makes about two exchanges per outer step, so this sends as many bytes
as a method that makes one."""
SWARM_INT8 = replace(SWARM, name="swarm int8", codec=INT8)
SWARM_MODULAR4 = replace(SWARM, name="swarm modular4", codec=MODULAR4)
SWARM_2_MODULAR4 = replace(SWARM_2, name="swarm-2 modular4", codec=MODULAR4)
SWARM_2_HALF_MODULAR4 = replace(
    SWARM_2,
    name="swarm-2 half modular4",
    outer={**TWO_EXCHANGES, "fragments": 2, "fragments_per_exchange": 1},
    codec=MODULAR4,
)
"""As many bits as "swarm modular4", in twice as many exchanges of half of the parameters."""


def on(contender: Contender, topology: str, partners: int | None = None) -> Contender:
    """Return the contender on another topology, with the same tuning.

    For recipes that choose partners themselves, ``partners`` is the number of exchanges per outer step.
    """
    outer = {**contender.outer, "topology": topology}
    if partners is not None:
        draws = RECIPES[contender.forms[0]].is_random
        outer["exchanges_per_step" if draws else "partners"] = partners
    label = {"random": f"{partners}-peer"}.get(topology, topology)
    return replace(contender, name=f"{contender.name} {label}", outer=outer)
