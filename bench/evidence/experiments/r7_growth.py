"""R7: from 8 to 10,000 peers."""

from __future__ import annotations

from bench.evidence.cells import CellSetting, Contender, block
from bench.evidence.contenders import INT8, ONE_EXCHANGE
from bench.evidence.layout import DISAGREEMENT, Column, Experiment, PlotPanel, PlotPoint, ResultTable, TableRow

SWARM = Contender(
    name="swarm",
    forms=("swarm",),
    outer={**ONE_EXCHANGE, "fragments": 16, "fragments_per_exchange": 4},  # fits a home line in 30 inner steps
    codec=INT8,
)
"""Not tuned: neither bytes nor agreement on a quadratic depend on the tuning of a language model."""

COUNTED = tuple(
    CellSetting(peers=peers, inner_steps=30, steps=600, learner="bytes") for peers in (8, 100, 1_000, 10_000)
)
MEASURED = tuple(CellSetting(peers=peers, steps=500, learner="quadratic") for peers in (8, 64, 512))

BYTES = Column("bytes sent per peer", "bytes_per_peer", digits=0)
BITS = Column("bits per parameter and outer step", "bits_per_parameter")
SOLO = Column("outer steps without an exchange, %", "solo_share", digits=2, scale=100)
DIRECTORY = Column("directory, bytes per peer, both ways", "directory_bytes_per_peer", digits=0)
EVENTS = Column("simulator, events per second", "events_per_s", digits=0)


def _by_size(title: str, settings: tuple[CellSetting, ...], shown: tuple[Column, ...]) -> ResultTable:
    """Return a table with one row for each number of peers."""
    lines = tuple(TableRow("swarm", {"peers": each.peers}, label=f"{each.peers:,} peers") for each in settings)
    at = tuple(Column(each.heading, each.figure, settings[0], each.digits, each.scale) for each in shown)
    return ResultTable(title, lines, at, row_heading="swarm")


R7 = Experiment(
    id="R7",
    question="Growth: 8 to 10,000 peers",
    notes=(
        "Traffic: 135M parameters that are counted, not trained; 100 / 20 Mbit/s, H = 30, a quarter of the parameters "
        "in each exchange, 20 outer steps.",
        "Agreement: noisy descent on a quadratic, 50 outer steps. The model is so small that the directory is a good "
        "part of the bytes sent.",
        "Not the default recipe: one exchange per outer step and int8, without momentum. Directory traffic is "
        "bounded, not flat: presence records lie in buckets that split. The keys per lookup are in FIGURES.md.",
        "Events per second are real time on this machine.",
    ),
    cells=(*block("R7", (SWARM,), COUNTED[:3], quick=(SWARM,)), *block("R7", (SWARM,), (*MEASURED, COUNTED[3]))),
    tables=(
        _by_size("Traffic", COUNTED, (BYTES, BITS, SOLO, DIRECTORY, EVENTS)),
        _by_size("Agreement", MEASURED, (DISAGREEMENT, SOLO, BYTES, DIRECTORY)),
    ),
    panels=(
        PlotPanel(
            "learner: bytes",
            "peers",
            "bytes sent per peer",
            {"swarm": tuple(PlotPoint("swarm", each, each.peers, "bytes_per_peer") for each in COUNTED)},
            logarithmic=True,
        ),
    ),
)
