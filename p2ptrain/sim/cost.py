"""How much of their time a recipe's trainers compute, from closed formulas: no event, no tensor, no random number.

The simulator counts the same thing on a virtual clock for models that it can train. This is for those it cannot: 135M,
1.5B, 70B parameters. A method is a list of ``Traffic``; all of them are judged by the same three durations::

    ring all-reduce of N peers    2 (N-1)/N  P b / B  +  2 (N-1) latency     on the slowest link; everybody waits
    all-gather through a store    P b / up  +  (N-1) P b / down  +  2 latency    likewise; all download everyone's
    swap with k partners          k (P b / B  +  2 latency)                   both ways at once

and by what they may hide under (``Hiding``). What does not fit stalls the trainer, and utilization is seconds of
inner steps over all seconds.

**Rounds and stragglers.** Whoever waits for a partner of a numbered round waits, in the long run, for the slowest: a
peer that is late makes its partner late, which makes another one late in the round after. So a fixed H and one slow
line bring *all* blocking methods to the slow line's pace, pairs as well as rings. GASLoC's rule
(``p2ptrain.outer.policy``) frees the others by shortening the straggler's H. An asynchronous method waits for nobody:
what its line cannot carry is not sent, which shows as ``delivered`` below 1.

**Left out**: uneven computing speed, packet loss, congestion, the time to encode, and what a lower rate of exchanges
does to the loss. ``apply_s_per_parameter`` is the one cost on the trainer's own thread that is counted.

Legend: P parameters, b bits a parameter, B bit/s of a line's slower direction, N peers, H inner steps, t their seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from p2ptrain.outer.policy import straggler_inner_steps

Pattern = Literal["all_reduce", "all_gather", "pairs"]

Hiding = Literal["nothing", "phase", "steps", "asynchronous"]
"""Nothing: the trainer waits. Phase: beside one whole inner phase. Steps: each fragment beside ``overlap_steps`` inner
steps. Asynchronous: the trainer never waits; what does not fit is left out."""

A100_FLOP_PER_S = 312e12
"""Dense bf16, from NVIDIA's A100 data sheet."""

MODEL_FLOP_UTILIZATION = 0.4
"""Share of it that training reaches. A guess; 38 to 50 % is what reports on A100s give."""


def inner_step_seconds(
    parameters: float, tokens: float, flop_per_s: float = A100_FLOP_PER_S * MODEL_FLOP_UTILIZATION
) -> float:
    """Seconds of an inner step: 6 P T operations (Kaplan et al., arXiv 2001.08361) at the rate that is reached."""
    return 6.0 * parameters * tokens / flop_per_s


@dataclass(frozen=True, slots=True)
class Traffic:
    """One thing that peers send in an outer step."""

    pattern: Pattern
    bits: float
    """b > 0, per parameter that is sent, in one direction."""
    hiding: Hiding = "nothing"
    share: float = 1.0
    """Of the parameters, 0 < share <= 1."""
    partners: int = 1
    """k, for pairs: one swap with each, one after the other. Who looks for partners by itself is also found by others:
    one exchange asked for in an outer step is two swaps, since as many are asked for by partners."""


@dataclass(frozen=True, slots=True)
class Method:
    """How a recipe uses the line. ``METHODS`` has one for each."""

    name: str
    traffic: tuple[Traffic, ...]
    source: str
    """Where bits and overlap come from."""
    every_step: bool = False
    """It communicates after each inner step: H is 1 whatever the setting says."""
    overlap_steps: int = 0
    """Inner steps that a fragment may take (``Hiding`` "steps")."""
    fragments: int = 1
    shortens_straggler: bool = False
    """GASLoC's rule: the peer with the slow line does fewer inner steps, so that nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Computers and lines. All peers are alike but for at most one slow line."""

    parameters: float
    inner_step_s: float
    inner_steps: int
    """H."""
    up_bit_per_s: float
    down_bit_per_s: float
    peers: int = 8
    latency_s: float = 0.0
    """One way."""
    straggler_share: float = 1.0
    """Bandwidth of one peer as a share of the others', 0 < share <= 1; 1 means that there is no straggler."""
    apply_s_per_parameter: float = 0.0
    """Seconds per parameter that a trainer stands still for each average it applies."""

    def __post_init__(self) -> None:
        positive = (self.parameters, self.inner_step_s, self.up_bit_per_s, self.down_bit_per_s)
        if not all(0 < number < math.inf for number in positive) or self.inner_steps < 1 or self.peers < 2:
            raise ValueError(f"setting out of range: {self}")
        if not (self.latency_s >= 0 and 0 < self.straggler_share <= 1 and self.apply_s_per_parameter >= 0):
            raise ValueError(f"setting out of range: {self}")

    @property
    def bit_per_s(self) -> float:
        """B of a peer with full bandwidth."""
        return min(self.up_bit_per_s, self.down_bit_per_s)


@dataclass(frozen=True, slots=True)
class Utilization:
    """What comes out, between 0 and 1."""

    others: float
    """Share of their time that the peers with full bandwidth compute."""
    straggler: float
    """The same for the peer with the slow line; equal to ``others`` when there is none."""
    delivered: float
    """Exchanges that fit into the line of a peer with full bandwidth, of those that it asks for and is asked for. 1 for
    all who wait."""
    straggler_inner_steps: int
    """H of the peer with the slow line."""

    def mean(self, peers: int) -> float:
        """Over all peers, one of them the straggler."""
        return ((peers - 1) * self.others + self.straggler) / peers


def utilization(method: Method, setting: Setting) -> Utilization:
    """The share of time that a method's trainers compute."""
    steps = 1 if method.every_step else setting.inner_steps
    compute = steps * setting.inner_step_s
    averages = sum(_averages(each) * each.share for each in method.traffic)
    applied = setting.apply_s_per_parameter * setting.parameters * averages
    if method.shortens_straggler:
        return _shortened(method, setting, steps, applied)
    wait, delivered = applied, 1.0
    for traffic in method.traffic:
        if traffic.hiding == "asynchronous":
            delivered = min(delivered, compute / _typical_swap_s(traffic, setting))
        else:
            wait += _stall_s(method, traffic, setting, compute)
    share = compute / (compute + wait)
    return Utilization(share, share, min(1.0, delivered), steps)


def sent_bits(method: Method, peers: int) -> float:
    """Payload that a peer sends in an outer step, in bits for each parameter of the model, if all that it asks for and
    all that it is asked for fits into its line."""

    def times(traffic: Traffic) -> float:
        if traffic.pattern == "all_reduce":
            return 2 * (peers - 1) / peers
        return traffic.partners if traffic.pattern == "pairs" else 1

    return sum(times(traffic) * traffic.bits * traffic.share for traffic in method.traffic)


def implied_inner_step_seconds(method: Method, setting: Setting, share: float) -> float:
    """The inner step that makes a blocking method compute this share of its time: t = wait u / (H (1 - u)).

    Inverts ``utilization`` for methods that hide nothing; ValueError for others. ``setting.inner_step_s`` is not read.
    """
    if any(traffic.hiding != "nothing" for traffic in method.traffic) or not 0 < share < 1:
        raise ValueError(f"{method.name} at utilization {share} cannot be solved for the inner step")
    steps = 1 if method.every_step else setting.inner_steps
    wait = sum(duration_s(traffic, setting, setting.straggler_share) for traffic in method.traffic)
    return wait * share / (steps * (1.0 - share))


def duration_s(traffic: Traffic, setting: Setting, bandwidth_share: float = 1.0) -> float:
    """Seconds that one outer step's traffic takes when the slowest line in it has this share of the bandwidth."""
    bits = setting.parameters * traffic.share * traffic.bits
    if traffic.pattern == "all_reduce":
        hops = 2 * (setting.peers - 1)
        return hops / setting.peers * bits / (setting.bit_per_s * bandwidth_share) + hops * setting.latency_s
    if traffic.pattern == "all_gather":
        up, down = setting.up_bit_per_s * bandwidth_share, setting.down_bit_per_s * bandwidth_share
        return bits / up + (setting.peers - 1) * bits / down + 2 * setting.latency_s
    return traffic.partners * (bits / (setting.bit_per_s * bandwidth_share) + 2 * setting.latency_s)


def _stall_s(method: Method, traffic: Traffic, setting: Setting, compute: float) -> float:
    """Seconds of an outer step that the trainers stand still for this traffic."""
    if method.every_step and traffic.pattern == "pairs" and traffic.hiding == "phase":
        # AD-PSGD knows no rounds: whom a slow peer makes late is late once, not for ever.
        return max(0.0, _typical_swap_s(traffic, setting) - compute)
    busy = duration_s(traffic, setting, setting.straggler_share)
    if traffic.hiding == "nothing":
        return busy
    if traffic.hiding == "phase":
        return max(0.0, busy - compute)
    late = busy / method.fragments - method.overlap_steps * setting.inner_step_s
    return max(0.0, method.fragments * late, busy - compute)


def _typical_swap_s(traffic: Traffic, setting: Setting) -> float:
    """Mean seconds of a full-bandwidth peer's swaps with partners drawn at random, one of N - 1 the straggler."""
    full, slow = duration_s(traffic, setting), duration_s(traffic, setting, setting.straggler_share)
    return full + (slow - full) / (setting.peers - 1)


def _shortened(method: Method, setting: Setting, steps: int, applied: float) -> Utilization:
    """With GASLoC's rule for the straggler; nothing is hidden."""
    partners = sum(traffic.partners for traffic in method.traffic)
    swaps = sum(duration_s(traffic, setting) for traffic in method.traffic)
    slow_swaps = sum(duration_s(traffic, setting, setting.straggler_share) for traffic in method.traffic)
    exchange_steps = swaps / partners / setting.inner_step_s
    own = straggler_inner_steps(steps, partners, exchange_steps, setting.straggler_share)
    cycle = applied + max(steps * setting.inner_step_s + swaps, own * setting.inner_step_s + slow_swaps)
    return Utilization(steps * setting.inner_step_s / cycle, own * setting.inner_step_s / cycle, 1.0, own)


def _averages(traffic: Traffic) -> int:
    return traffic.partners if traffic.pattern == "pairs" else 1


def at_bits(method: Method, bits: float, name: str | None = None) -> Method:
    """The same method with everything that it sends at another number of bits a parameter."""
    return replace(method, name=name or method.name, traffic=tuple(replace(each, bits=bits) for each in method.traffic))


INT8_BITS = 8 + 16 / 1024
"""Codec int8 with a bf16 scale per 1,024 elements (p2ptrain/codec/int8.py)."""

MODULAR4_BITS = 4 + 24 / 1024
"""Codec modular4: four bits, and three bytes per 1,024 elements (p2ptrain/codec/modular.py)."""

SPARSELOCO_BITS = 64 * (2 + 12) / 4096
"""Of 4,096 entries 64, each with 2 bits of value and 12 of index (arXiv 2508.15706): .219."""

DILOCOX_BITS = 4 * 0.5
"""int4 on the factors of rank n/4 of an n x n matrix, 2 r n / n^2 = 1/2 of its elements. Inferred, not printed."""

TOP_K_BITS = 0.23
"""Codec topk (p2ptrain/codec/topk.py)."""


def _swarm(bits: float, exchanges: int = 1, share: float = 1.0) -> Traffic:
    """So many exchanges asked for in an outer step, and on average as many answered; nobody waits."""
    return Traffic("pairs", bits, hiding="asynchronous", share=share, partners=2 * exchanges)


_ALL = (
    Method("ddp", (Traffic("all_reduce", 32),), "gradients in fp32, every inner step, no overlap", every_step=True),
    Method(
        "dpsgd", (Traffic("pairs", 32, partners=2),), "arXiv 1705.09056: both neighbours of a ring", every_step=True
    ),
    Method(
        "ad_psgd",
        (Traffic("pairs", 32, hiding="phase"),),
        "arXiv 1710.06952: one random peer, beside the next gradient",
        every_step=True,
    ),
    Method("diloco", (Traffic("all_reduce", 32),), "arXiv 2311.08105: fp32, blocking"),
    Method(
        "streaming_diloco",
        (Traffic("all_reduce", 4, hiding="steps"),),
        "arXiv 2501.18512: fp4, one fragment after the other, each tau = 5 inner steps late; 8 fragments",
        overlap_steps=5,
        fragments=8,
    ),
    Method("eager_diloco", (Traffic("all_reduce", 4, hiding="phase"),), "arXiv 2502.12996: fp4, one inner phase late"),
    Method("noloco", (Traffic("pairs", 64),), "arXiv 2506.10911: x and d of one random pair, fp32, blocking"),
    Method(
        "gasloc-1",
        (Traffic("pairs", 32),),
        "arXiv 2606.11081: one partner, fp32, blocking; straggler rule inferred",
        shortens_straggler=True,
    ),
    Method(
        "gasloc-2",
        (Traffic("pairs", 32, partners=2),),
        "arXiv 2606.11081: two partners, fp32, blocking; straggler rule inferred",
        shortens_straggler=True,
    ),
    Method(
        "factored_gossip_global_none",
        (Traffic("all_reduce", 32, hiding="phase"),),
        "arXiv 2606.22768: Mix1 global under the phase, no Mix2",
    ),
    Method(
        "factored_gossip_global_local",
        (Traffic("all_reduce", 32, hiding="phase"), Traffic("pairs", 32, share=0.43)),
        "arXiv 2606.22768: Mix1 global under the phase, Mix2 in pairs on 43 % of the parameters",
    ),
    Method(
        "factored_gossip",
        (Traffic("pairs", 32, hiding="phase"), Traffic("pairs", 32, share=0.43)),
        "arXiv 2606.22768: Mix1 in pairs under the phase, Mix2 in pairs on 43 % of the parameters",
    ),
    Method(
        "dilocox",
        (Traffic("all_reduce", DILOCOX_BITS, hiding="phase"),),
        "arXiv 2506.21263: one phase late; bits inferred",
    ),
    Method("sparseloco", (Traffic("all_gather", SPARSELOCO_BITS),), "arXiv 2508.15706: top-k, 2 bits, gathered by all"),
    Method("swarm", (_swarm(32),), "ours: fp32; one exchange asked for in an outer step, and one answered"),
    Method("swarm int8", (_swarm(INT8_BITS),), "ours: codec int8"),
    Method("swarm modular4", (_swarm(MODULAR4_BITS),), "ours: codec modular with 4 bits"),
    Method(
        "swarm modular4, one swap",
        (_swarm(MODULAR4_BITS, share=0.5),),
        "ours: codec modular with 4 bits, half the parameters in each exchange: the bytes of one swap",
    ),
    Method(
        "swarm-2 modular4",
        (_swarm(MODULAR4_BITS, exchanges=2),),
        "ours: two exchanges asked for, codec modular, 4 bits",
    ),
    Method(
        "swarm x and g modular4",
        (_swarm(MODULAR4_BITS), _swarm(TOP_K_BITS)),
        "ours: weights in codec modular with 4 bits, and pseudo-gradients in codec topk",
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})
"""Every recipe as its authors run it, by name."""

__all__ = [
    "A100_FLOP_PER_S",
    "DILOCOX_BITS",
    "INT8_BITS",
    "METHODS",
    "MODEL_FLOP_UTILIZATION",
    "MODULAR4_BITS",
    "SPARSELOCO_BITS",
    "TOP_K_BITS",
    "Hiding",
    "Method",
    "Pattern",
    "Setting",
    "Traffic",
    "Utilization",
    "at_bits",
    "duration_s",
    "implied_inner_step_seconds",
    "inner_step_seconds",
    "sent_bits",
    "utilization",
]
