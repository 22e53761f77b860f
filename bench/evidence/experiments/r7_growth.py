"""R7: from 8 to 10,000 peers."""

from __future__ import annotations

from bench.evidence.blocks import block
from bench.evidence.cells import Contender, Setting
from bench.evidence.contenders import INT8, ONE_EXCHANGE
from bench.evidence.layout import Column, Experiment, Panel, Point, Row, Table

QUARTERS = {**ONE_EXCHANGE, "fragments": 16, "fragments_per_exchange": 4}
"""A quarter of the parameters in an exchange: what a home line carries in the time of 30 inner steps."""

SWARM = Contender(name="swarm", forms=("swarm",), outer=QUARTERS, codec=INT8)
"""Not tuned: neither bytes nor the way to agreement on a quadratic depend on the tuning of a language model."""

COUNTED = tuple(Setting(peers=peers, inner_steps=30, steps=600, learner="bytes") for peers in (8, 100, 1_000, 10_000))
MEASURED = tuple(Setting(peers=peers, steps=500, learner="quadratic") for peers in (8, 64, 512))

_BYTES = (
    ("bytes sent per peer", "bytes_per_peer", 0),
    ("bits per parameter and outer step", "bits_per_parameter", 3),
    ("outer steps without an exchange, %", "solo_share", 2),
    ("directory, bytes per peer, both ways", "directory_bytes_per_peer", 0),
    ("simulator, events per second", "events_per_s", 0),
)


def _by_size(title: str, settings: tuple[Setting, ...], figures: tuple[tuple[str, str, int], ...]) -> Table:
    """One line per number of peers."""
    first = settings[0]
    lines = tuple(Row("swarm", {"peers": each.peers}, label=f"{each.peers:,} peers") for each in settings)
    columns = tuple(
        Column(heading, figure, first, digits=digits, scale=100 if figure in ("solo_share", "disagreement") else 1)
        for heading, figure, digits in figures
    )
    return Table(title, lines, columns, row_heading="swarm")


R7 = Experiment(
    id="R7",
    question="Growth: 8 to 10,000 peers",
    notes=(
        "Traffic: 135M parameters that are counted and not there, 100 / 20 Mbit/s, H = 30, a quarter of the "
        "parameters in each exchange, 20 outer steps. Nothing is learnt.",
        "Agreement: noisy descent on a quadratic, 50 outer steps, at sizes that fit into memory. A model so small that "
        "the directory is a good part of what is sent, so that a peer's bytes grow with the swarm.",
        "Not the default: one exchange an outer step and int8, without momentum. The bytes of the default are other "
        "ones, and as flat. The directory's are bounded, not flat: presence lies in buckets, which split, and while a "
        "swarm is small an answer is as long as the swarm is large. How many keys a lookup asks, which is what its "
        "time goes by, is counted by `make bench`: as many among 10,000 as among 8, to a few hundredths.",
        "Events per second are real time of this machine, everything else is counted or simulated.",
    ),
    cells=(
        *block("R7", (SWARM,), COUNTED[:3], tier=2, quick=(SWARM,)),
        *block("R7", (SWARM,), (*MEASURED, COUNTED[3]), tier=3),
    ),
    figures=(
        "bytes_per_peer",
        "bits_per_parameter",
        "solo_share",
        "directory_bytes_per_peer",
        "events_per_s",
        "disagreement",
    ),
    tables=(
        _by_size("Traffic", COUNTED, _BYTES),
        _by_size(
            "Agreement",
            MEASURED,
            (
                ("disagreement, %", "disagreement", 2),
                ("outer steps alone, %", "solo_share", 2),
                ("bytes sent per peer", "bytes_per_peer", 0),
                ("directory, bytes per peer, both ways", "directory_bytes_per_peer", 0),
            ),
        ),
    ),
    panels=(
        Panel(
            "learner: bytes",
            "peers",
            "bytes sent per peer",
            {"swarm": tuple(Point("swarm", each, each.peers, "bytes_per_peer") for each in COUNTED)},
            logarithmic=True,
        ),
    ),
    competition=False,
)
