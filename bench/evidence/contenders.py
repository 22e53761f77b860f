"""Competing methods, as data. docs/ALGORITHMS.md explains the recipes.

Without a word on the learner a method has Muon inside; " adamw" in its name means AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.evidence.cells import ADAMW, MUON, Contender

PAIRS: Mapping[str, Any] = {"topology": "random", "partners": 1}

MODULAR4: Mapping[str, Any] = {"name": "modular4"}

LOCAL = Contender(name="local", forms=("local",), tuned_as="local")
DDP = Contender(name="ddp", forms=("ddp",), tuned_as="ddp")
DILOCO = Contender(name="diloco", forms=("diloco",), tuned_as="diloco")
NOLOCO = Contender(name="noloco", forms=("noloco",), outer=PAIRS, tuned_as="noloco")
GASLOC = Contender(name="gasloc", forms=("gasloc_z", "gasloc_y"), outer=PAIRS, tuned_as="gasloc")
"""Two readings of the accelerated form; mu = 0 is the plain form of the paper."""
FACTORED = Contender(name="factored_gossip", forms=("factored_gossip",), outer=PAIRS, tuned_as="factored_gossip")
"""Both mixes in pairs, as peers on the internet can run it."""
SWARM_2 = Contender(
    name="swarm-2", forms=("swarm",), outer={"exchanges_per_step": 2, "weights": "work"}, tuned_as="swarm-2"
)
"""What the presets use, in fp32."""


def with_adamw(contender: Contender) -> Contender:
    """Return the contender with AdamW inside, tuned for it."""
    return replace(contender, name=f"{contender.name} adamw", learner=ADAMW, tuned_as=f"{contender.tuned_as} adamw")


LOCAL_ADAMW, DDP_ADAMW = with_adamw(LOCAL), with_adamw(DDP)
DILOCO_ADAMW, SWARM_ADAMW = with_adamw(DILOCO), with_adamw(SWARM_2)

RIVALS = (DILOCO, NOLOCO, GASLOC, FACTORED, SWARM_2)
"""Methods with an outer optimizer, with Muon inside."""
TUNED = (*RIVALS, DDP, LOCAL, SWARM_ADAMW, DILOCO_ADAMW, DDP_ADAMW, LOCAL_ADAMW)
"""Contenders that are tuned themselves."""

SWARM_MODULAR4 = replace(SWARM_2, name="swarm-2 modular4", codec=MODULAR4)
SWARM_ADAMW_MODULAR4 = replace(SWARM_ADAMW, name="swarm-2 adamw modular4", codec=MODULAR4)
SWARM_WSD = replace(SWARM_2, name="swarm-2 wsd", learner={**MUON, "schedule": "wsd"})
SWARM_EQUAL = replace(SWARM_2, name="swarm-2 equal", outer={**SWARM_2.outer, "weights": "equal"})
"""Averages in which both sides count the same, however much each has trained."""
SWARM_BY_SPEED = replace(SWARM_2, name="swarm-2, H by speed", pace={"policy": "by_speed"})
