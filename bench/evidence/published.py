"""R4's figures, from the cost model: first what others have published, then a table of our own.

What is printed, reported second-hand or inferred is said with each figure. Neither the full text of GASLoC nor that of
Factored Gossip DiLoCo could be had, so the circumstances behind their percentages are inferred: one setting from which
all of them come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bench.evidence.layout import Check, Entry
from p2ptrain.outer.policy import straggler_inner_steps
from p2ptrain.sim.cost import (
    A100_FLOP_PER_S,
    INT8_BITS,
    METHODS,
    MODEL_FLOP_UTILIZATION,
    MODULAR4_BITS,
    TOP_K_BITS,
    Method,
    Setting,
    at_bits,
    implied_inner_step_seconds,
    inner_step_seconds,
    utilization,
)

STEP_TOKENS = 65_536
"""Tokens of one peer's inner step. Inferred: with one A100 at 40 % it makes both of DiLoCo's percentages come out."""

SMALL_STEP_TOKENS = 16_384
"""The same for 135M parameters. A guess: small models are trained with small batches. Utilization depends on tokens a
step and on the device alone, since both computing and sending grow with the parameters."""

APPLY_S_PER_PARAMETER = 30.6e-3 / 15.5e6
"""A trainer stands still for 30.6 ms to apply an exchange of 15.5M parameters, by one thread (our measurement: "trainer
time blocked by exchanges" in docs/RESULTS.md). What else an exchange costs a trainer that shares its cores with the
network's thread, 364 ms in all on two cores, is left out: it is the machine's and not the method's."""


@dataclass(frozen=True, slots=True)
class Model:
    """A size, and on what one peer trains it."""

    parameters: float
    devices: int
    """A100 of 80 GB: the smallest power of two that holds 16 bytes a parameter. A guess at what a peer would be."""
    step_tokens: int = STEP_TOKENS

    @property
    def inner_step_s(self) -> float:
        flop_per_s = self.devices * A100_FLOP_PER_S * MODEL_FLOP_UTILIZATION
        return inner_step_seconds(self.parameters, self.step_tokens, flop_per_s)


MODELS: Mapping[str, Model] = {
    "135M": Model(135e6, 1, SMALL_STEP_TOKENS),
    "1.5B": Model(1.5e9, 1),
    "70B": Model(70e9, 16),
}
MEGABITS = (10, 100, 200, 1_000, 10_000)
STRAGGLERS = (1.0, 0.2)
INNER_STEPS = 30
"""GASLoC's H."""

HOME = "135M, 1 s steps, 100 / 20 Mbit/s"
"""The setting of the goal: a home line, down / up, and a small model on a small computer."""

IN_INT8 = ("diloco", "noloco", "gasloc-1", "gasloc-2", "factored_gossip")
CONTENDERS: tuple[Method, ...] = (
    *METHODS.values(),
    *(at_bits(METHODS[name], INT8_BITS, f"{name} int8") for name in IN_INT8),
    at_bits(METHODS["gasloc-1"], MODULAR4_BITS, "gasloc-1 modular4"),
    at_bits(METHODS["noloco"], MODULAR4_BITS + TOP_K_BITS, "noloco modular4, topk"),
    replace(
        METHODS["factored_gossip"],
        name="factored_gossip modular4, topk",
        traffic=(
            replace(METHODS["factored_gossip"].traffic[0], bits=MODULAR4_BITS),
            replace(METHODS["factored_gossip"].traffic[1], bits=TOP_K_BITS),
        ),
    ),
)
"""Those in int8 and in our codecs are nobody's published methods; they tell overlap and compression apart. Our codecs:
weights in modular4, pseudo-gradients in topk, so that every method of pairs has what swarm has."""


@dataclass(frozen=True, slots=True)
class Line:
    """A column of R4's tables."""

    model: str
    mbit_s: float
    straggler: float = 1.0

    def key(self) -> dict[str, Any]:
        """All fields but those at their defaults."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }


def setting_of(line: Line) -> Setting:
    """The cost model's setting: 8 peers, no latency, equal up and down, but for the home line of the goal."""
    if line.model == HOME:
        return Setting(
            135e6, 1.0, INNER_STEPS, 20e6, 100e6, latency_s=0.05, apply_s_per_parameter=APPLY_S_PER_PARAMETER
        )
    model = MODELS[line.model]
    bit_per_s = line.mbit_s * 1e6
    return Setting(
        model.parameters, model.inner_step_s, INNER_STEPS, bit_per_s, bit_per_s, straggler_share=line.straggler
    )


LINES = (
    *(Line(model, megabits, share) for share in STRAGGLERS for model in MODELS for megabits in MEGABITS),
    Line(HOME, 20),
)


def entries() -> list[Entry]:
    """Every method on every line."""
    made: list[Entry] = []
    for line in LINES:
        setting = setting_of(line)
        for method in CONTENDERS:
            found = utilization(method, setting)
            figures = {"utilization": found.others}
            if any(traffic.hiding == "asynchronous" for traffic in method.traffic):
                figures["delivered"] = found.delivered
            rounded = {name: round(number, 4) for name, number in figures.items()}
            made.append({"contender": method.name, "setting": line.key(), "headline": rounded})
    return made


def checks() -> list[Check]:
    """Published figures beside ours."""
    return [*_factored_gossip(), *_gasloc(), _dilocox()]


_SECOND_HAND = "second-hand (summaries of arXiv 2606.22768); setting inferred"


def reference(megabits: float) -> Setting:
    """The one setting behind Factored Gossip's percentages: 1.5B parameters, H = 100, fp32, 8 peers. H, the size and
    "8 to 16 workers" are reported; fp32, 8 and the inner step (one A100 at 40 %, 65,536 tokens) are inferred."""
    seconds = MODELS["1.5B"].inner_step_s
    return Setting(1.5e9, seconds, 100, megabits * 1e6, megabits * 1e6, peers=8)


def _factored_gossip() -> list[Check]:
    diloco, ddp, mixed = METHODS["diloco"], METHODS["ddp"], METHODS["factored_gossip_global_none"]

    def percent(method: Method, megabits: float) -> str:
        return f"{100 * utilization(method, reference(megabits)).others:.1f} %"

    def implied(megabits: float, share: float) -> float:
        return implied_inner_step_seconds(diloco, reference(megabits), share)

    weeks = 1e12 / (8 * STEP_TOKENS) * reference(200).inner_step_s / (7 * 86_400)
    busy = utilization(diloco, reference(200)).others
    return [
        Check("DiLoCo, 1.5B, 200 Mbit/s: utilization", "53 %", percent(diloco, 200), _SECOND_HAND),
        Check("DiLoCo, 1.5B, 100 Mbit/s: utilization", "36 %", percent(diloco, 100), _SECOND_HAND),
        Check(
            "the inner step that each of these two implies",
            "one and the same",
            f"{implied(200, 0.53):.2f} s and {implied(100, 0.36):.2f} s; "
            f"6 P T / (40 % of an A100) is {reference(200).inner_step_s:.2f} s",
            "solved from the two percentages: they fix t / bits alone, so 16 bits and half the tokens fit as well",
        ),
        Check("data parallel, 1.5B, 100 Mbit/s: utilization", "about 1 %", percent(ddp, 100), _SECOND_HAND),
        Check("Factored Gossip, Mix1 global, 1.5B, 200 Mbit/s", "100 %", percent(mixed, 200), _SECOND_HAND),
        Check("the same at 100 Mbit/s", "not known", percent(mixed, 100), "our model alone"),
        Check(
            "weeks for 10^12 tokens at 200 Mbit/s: Mix1 global, DiLoCo",
            "about 16, about 29",
            f"{weeks:.1f}, {weeks / busy:.1f}",
            f"{_SECOND_HAND}; not fitted, so a check of the inferred tokens per step",
        ),
    ]


def _gasloc() -> list[Check]:
    def ours(share: float) -> str:
        return ", ".join(str(straggler_inner_steps(30, partners, 5 / 3, share)) for partners in (1, 2))

    # Any model: only s / t = 5/3 matters. One parameter of one bit on a line of .6 bit/s with steps of 1 s.
    unit = Setting(1.0, 1.0, 30, 0.6, 0.6, peers=8, straggler_share=0.1)
    alone = replace(unit, straggler_share=1.0)
    gossip, diloco = at_bits(METHODS["gasloc-1"], 1), at_bits(METHODS["diloco"], 1)

    def percent(method: Method, setting: Setting) -> str:
        return f"{100 * utilization(method, setting).others:.1f} %"

    return [
        Check(
            "GASLoC's straggler at 10 %: H with 1 and 2 partners",
            "15, 1",
            ours(0.1),
            "reported; s / t = 5/3 at H = 30 is inferred from it",
        ),
        Check("the same at 20 %", "not known", ours(0.2), "our rule alone"),
        Check(
            "DiLoCo with that straggler at 10 %, and without",
            "not known",
            f"{percent(diloco, unit)}, {percent(diloco, alone)}",
            "our model alone; GASLoC's figures 3 and 9 could not be had",
        ),
        Check(
            "GASLoC, 1 partner, with that straggler and without",
            "the others are not slowed",
            f"{percent(gossip, unit)}, {percent(gossip, alone)}",
            "abstract and secondary sources; no number known",
        ),
    ]


def _dilocox() -> Check:
    """Two clusters, so that a ring moves each gradient once; 32-bit gradients over one line of 1 Gbit/s."""
    speedup = 357
    unknown = Setting(107e9, 1.0, 100, 1e9, 1e9, peers=2)
    ddp, dilocox = METHODS["ddp"], METHODS["dilocox"]
    seconds = implied_inner_step_seconds(ddp, unknown, 1 / speedup)
    found = replace(unknown, inner_step_s=seconds)
    ratio = utilization(dilocox, found).others / utilization(ddp, found).others
    return Check(
        "DiLoCoX, 107B, 1 Gbit/s, against all-reduce at every step",
        f"{speedup} x",
        f"{ratio:.0f} x if an inner step takes {seconds:.1f} s",
        "abstract of arXiv 2506.21263; solved for the inner step, two clusters and fp32 gradients assumed: the claim "
        "is consistent, which is less than reproduced",
    )
