"""R10: two of eight peers lie."""

from __future__ import annotations

from collections.abc import Sequence

from bench.evidence.blocks import block
from bench.evidence.cells import Setting
from bench.evidence.contenders import SWARM_2
from bench.evidence.layout import Column, Entry, Experiment, Table, rows
from p2ptrain.sim.scenario import Lie

LIES: tuple[Lie, ...] = ("scaled", "flipped", "stale", "random", "nan")
PEERS, LIARS = 8, 2
CLEAN = Setting(peers=PEERS - LIARS)
"""The honest ones alone: what two more who only disturb may at best leave them."""
LYING = {lie: Setting(peers=PEERS, liars=LIARS, lie=lie) for lie in LIES}


def _against_clean(entries: Sequence[Entry]) -> list[Entry]:
    """Adds ``loss_ratio``: the honest peers' loss over that of the clean run, same method and seed."""
    clean = {
        (each["contender"], each["seed"]): each["headline"].get("loss")
        for each in entries
        if each["setting"] == CLEAN.key()
    }
    made: list[Entry] = []
    for each in entries:
        reference, loss = clean.get((each["contender"], each["seed"])), each["headline"].get("loss")
        more = {"loss_ratio": loss / reference} if reference and loss is not None else {}
        made.append({**each, "headline": {**each["headline"], **more}})
    return made


R10 = Experiment(
    id="R10",
    question="Liars: two of eight send scaled, negated, old, random or broken weights; H = 10",
    notes=(
        "Loss is the honest peers' mean; the ratio is to six honest peers alone, same seed.",
        "Scaled: times 3. Old: their first payload, for ever. Random: normally distributed, of the true length. NaN: "
        "every byte is 255. The liars train like the others and say so; nothing but what they send is a lie.",
        "What is not shown: lies that stay within the clipping radius (docs/SECURITY.md).",
    ),
    cells=block("R10", (SWARM_2,), (CLEAN, *LYING.values()), tier=9),
    derive=_against_clean,
    figures=("loss", "loss_ratio", "averaged_loss", "disagreement", "exchanges_failed", "solo_share"),
    tables=(
        Table(
            "Honest peers' loss over that of the clean run",
            rows(SWARM_2),
            tuple(Column(lie, "loss_ratio", setting, digits=4) for lie, setting in LYING.items()),
        ),
        Table(
            "Honest peers' loss",
            rows(SWARM_2),
            (Column("clean", "loss", CLEAN), *(Column(lie, "loss", setting) for lie, setting in LYING.items())),
        ),
    ),
    competition=False,
)
