"""Compute utilization by closed formulas, for models too large to simulate: 135M, 1.5B and 70B parameters.

A method is a list of ``CostTraffic``: what a peer sends in an outer step. Each takes d seconds of the slowest line::

    ring all-reduce of N peers    d = 2 (N-1)/N  P b / B  +  2 (N-1) latency
    all-gather through a store    d = P b / up  +  (N-1) P b / down  +  2 latency
    k swaps, one after the other  d = k (P b / B  +  2 latency)                    both directions at once

A trainer waits for the part of d that its inner steps do not hide (``Hiding``)::

    utilization = H t / (H t + a + sum of waits)
    wait        = d  (nothing hidden),   max(0, d - H t)  (a phase hidden),   0  (asynchronous)

with P parameters, b bits per parameter, B bit/s of the slower direction of a line, N peers, H inner steps of t seconds
each, and a seconds for applying averages. An asynchronous method drops what does not fit: it delivers H t / d.

In rounds a late peer delays its partner, which delays another peer in the next round. One slow line therefore slows all
peers of a blocking method down to its own speed, in pairs as in a ring (``Straggler`` has the exceptions).

Not modelled: different computing speeds, packet loss, congestion, time to encode, effects of rarer exchanges on loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from sim.straggler import straggler_inner_steps

Pattern = Literal["all_reduce", "all_gather", "pairs"]

Hiding = Literal["nothing", "phase", "asynchronous"]
"""Inner steps that run during the traffic: none, those of one phase (H), or all (the trainer never waits)."""

Straggler = Literal["delays everybody", "delays its partner", "trains less"]
"""Effect of one slow line. Without rounds it delays only its current partner. By GASLoC's rule
(``sim.straggler``) the straggler makes fewer inner steps, so that no peer waits for it."""

A100_FLOP_PER_S = 312e12
"""Peak rate in dense bf16, from NVIDIA's A100 data sheet."""

MODEL_FLOP_UTILIZATION = 0.4
"""Share of the peak rate that training reaches. Guess: a training run on an A100 would settle it; reports give 38 to
50 %."""

INT8_BITS = 8 + 16 / 1024
"""Codec int8: a bf16 scale per 1,024 elements (p2ptrain/codec/int8.py)."""

MODULAR4_BITS = 4 + 8 / 1024
"""Codec modular4: one byte of its proposal per 1,024 elements (p2ptrain/codec/steps.py)."""

TOP_K_BITS = 0.23
"""Codec topk (p2ptrain/codec/topk.py)."""

SPARSELOCO_BITS = 64 * (2 + 12) / 4096
"""64 of 4,096 entries, each with 2 bits of value and 12 of index (arXiv 2508.15706)."""

DILOCOX_BITS = 4 * 0.5
"""int4 factors of rank n/4: 2 r n / n^2 = 1/2 of the elements of an n x n matrix. Inferred; the paper does not say."""


@dataclass(frozen=True, slots=True)
class CostTraffic:
    """One kind of traffic in an outer step."""

    pattern: Pattern
    bits: float
    """Bits per parameter sent, b, in one direction."""
    hiding: Hiding = "nothing"
    share: float = 1.0
    """Share of the parameters that is sent."""
    swaps: int = 1
    """Swaps, k, for pairs. An exchange that each peer initiates is two swaps: others initiate as many with it."""

    def sent_bits(self, peers: int) -> float:
        """Return the payload that a peer sends in an outer step, in bits per parameter of the model."""
        times = {"all_reduce": 2 * (peers - 1) / peers, "all_gather": 1, "pairs": self.swaps}[self.pattern]
        return times * self.bits * self.share


@dataclass(frozen=True, slots=True)
class Method:
    """A recipe's use of the line."""

    name: str
    traffic: tuple[CostTraffic, ...]
    every_step: bool = False
    """Whether it communicates after each inner step, so that H is 1 whatever the setting says."""
    straggler: Straggler = "delays everybody"


@dataclass(frozen=True, slots=True)
class CostSetting:
    """Computers and lines; all peers are equal except for at most one slow line."""

    parameters: float
    inner_step_s: float
    inner_steps: int
    up_bit_per_s: float
    down_bit_per_s: float
    peers: int = 8
    latency_s: float = 0.0
    """One-way latency."""
    straggler_share: float = 1.0
    """Bandwidth of one peer as a share of the others'; 1 for no straggler."""
    apply_s_per_parameter: float = 0.0
    """Seconds per parameter for which a trainer stops to apply one average."""


@dataclass(frozen=True, slots=True)
class Utilization:
    """Result for a peer with full bandwidth; both numbers are between 0 and 1."""

    others: float
    """Share of the time that is spent on computing."""
    delivered: float
    """Share of the exchanges that fit into the line; 1 for methods that wait."""


def inner_step_seconds(
    parameters: float, tokens: float, flop_per_s: float = A100_FLOP_PER_S * MODEL_FLOP_UTILIZATION
) -> float:
    """Return seconds of an inner step: 6 P T operations (Kaplan et al., arXiv 2001.08361) at ``flop_per_s``."""
    return 6.0 * parameters * tokens / flop_per_s


def duration_s(traffic: CostTraffic, setting: CostSetting, bandwidth_share: float = 1.0) -> float:
    """Return d, if the slowest line has ``bandwidth_share`` of the full bandwidth."""
    sent = setting.parameters * traffic.sent_bits(setting.peers)
    up, down = setting.up_bit_per_s * bandwidth_share, setting.down_bit_per_s * bandwidth_share
    if traffic.pattern == "all_gather":
        return sent / up + (setting.peers - 1) * sent / down + 2 * setting.latency_s
    messages = setting.peers - 1 if traffic.pattern == "all_reduce" else traffic.swaps
    return sent / min(up, down) + 2 * messages * setting.latency_s


def utilization(method: Method, setting: CostSetting) -> Utilization:
    """Compute the utilization of a method on these computers and lines."""
    steps = 1 if method.every_step else setting.inner_steps
    compute = steps * setting.inner_step_s
    wait, delivered = 0.0, 1.0
    for traffic in method.traffic:
        averages = traffic.share * (traffic.swaps if traffic.pattern == "pairs" else 1)
        wait += setting.apply_s_per_parameter * setting.parameters * averages
        full, slow = duration_s(traffic, setting), duration_s(traffic, setting, setting.straggler_share)
        busy = slow
        if method.straggler == "delays its partner":  # the straggler is one of N - 1 possible partners
            busy = full + (slow - full) / (setting.peers - 1)
        elif method.straggler == "trains less":
            swap_steps = full / traffic.swaps / setting.inner_step_s
            fewer = straggler_inner_steps(steps, traffic.swaps, swap_steps, setting.straggler_share)
            busy = max(full, slow - (steps - fewer) * setting.inner_step_s)
        if traffic.hiding == "asynchronous":
            delivered = min(delivered, compute / busy)
        else:
            wait += max(0.0, busy - (compute if traffic.hiding == "phase" else 0.0))
    return Utilization(compute / (compute + wait), delivered)


def implied_inner_step_seconds(method: Method, setting: CostSetting, share: float) -> float:
    """Return the t at which a method that hides nothing computes ``share`` of its time: t = d u / (H (1 - u)).

    ``setting.inner_step_s`` is not read. Raises ValueError for a method that hides traffic or adapts to stragglers.
    """
    if method.straggler != "delays everybody" or any(traffic.hiding != "nothing" for traffic in method.traffic):
        raise ValueError(f"{method.name} cannot be solved for the inner step")
    wait = sum(duration_s(traffic, setting, setting.straggler_share) for traffic in method.traffic)
    return wait * share / ((1 if method.every_step else setting.inner_steps) * (1.0 - share))


def at_bits(method: Method, bits: float, name: str | None = None) -> Method:
    """Return the method with ``bits`` per parameter in all of its traffic, under another name if given."""
    return replace(method, name=name or method.name, traffic=tuple(replace(each, bits=bits) for each in method.traffic))


def _swarm(name: str, *bits: float, exchanges: int = 1, share: float = 1.0) -> Method:
    """Return our method: ``exchanges`` initiated in an outer step and as many answered, each with all of ``bits``."""
    traffic = (CostTraffic("pairs", each, "asynchronous", share, swaps=2 * exchanges) for each in bits)
    return Method(name, tuple(traffic), straggler="delays its partner")


_RING_UNDER_PHASE = CostTraffic("all_reduce", 32, "phase")
_SWAP_UNDER_PHASE = CostTraffic("pairs", 32, "phase")
_MIX2 = CostTraffic("pairs", 32, share=0.43)
"""Factored Gossip's second mix: 43 % of the parameters (arXiv 2606.22768)."""

_METHODS = (
    Method("ddp", (CostTraffic("all_reduce", 32),), every_step=True),
    Method("dpsgd", (CostTraffic("pairs", 32, swaps=2),), every_step=True),  # arXiv 1705.09056: both ring neighbours
    Method("ad_psgd", (_SWAP_UNDER_PHASE,), every_step=True, straggler="delays its partner"),  # arXiv 1710.06952
    Method("diloco", (CostTraffic("all_reduce", 32),)),  # arXiv 2311.08105
    # arXiv 2501.18512: fp4; 8 fragments, each hidden by tau = 5 inner steps, so a whole phase where H <= 40.
    Method("streaming_diloco", (CostTraffic("all_reduce", 4, "phase"),)),
    Method("eager_diloco", (CostTraffic("all_reduce", 4, "phase"),)),  # arXiv 2502.12996: fp4
    Method("noloco", (CostTraffic("pairs", 64),)),  # arXiv 2506.10911: x and d in fp32
    Method("gasloc-1", (CostTraffic("pairs", 32),), straggler="trains less"),  # arXiv 2606.11081
    Method("gasloc-2", (CostTraffic("pairs", 32, swaps=2),), straggler="trains less"),
    Method("factored_gossip_global_none", (_RING_UNDER_PHASE,)),  # arXiv 2606.22768
    Method("factored_gossip_global_local", (_RING_UNDER_PHASE, _MIX2)),
    Method("factored_gossip", (_SWAP_UNDER_PHASE, _MIX2)),
    Method("dilocox", (CostTraffic("all_reduce", DILOCOX_BITS, "phase"),)),  # arXiv 2506.21263
    Method("sparseloco", (CostTraffic("all_gather", SPARSELOCO_BITS),)),  # arXiv 2508.15706
    _swarm("swarm", 32),
    _swarm("swarm int8", INT8_BITS),
    _swarm("swarm modular4", MODULAR4_BITS),
    _swarm("swarm modular4, one swap", MODULAR4_BITS, share=0.5),
    _swarm("swarm-2 modular4", MODULAR4_BITS, exchanges=2),
    _swarm("swarm x and g modular4", MODULAR4_BITS, TOP_K_BITS),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})
"""Every recipe as its authors run it, by name."""
