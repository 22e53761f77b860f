"""Cost of adversarial peers that teach wrong step widths to two honest peers, with codec modular4.

``python -m bench.liars`` prints the share of the honest peers' exchanges that were refused, and the error of the codec
in the others, relative to the difference. Takes a minute.

Two honest peers with sixteen blocks of fixed weights each differ from common weights by .03 of their norm. In every
round each of them meets an adversarial peer with a given probability; otherwise they exchange with each other, without
mixing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import click
import torch
from torch import Tensor

from p2ptrain.base.errors import NetworkError
from p2ptrain.codec import get
from p2ptrain.codec.steps import SKETCH_BYTES
from p2ptrain.host.payloads import Payloads, Snapshot

BLOCK = 1024
BLOCKS = 16
APART = 0.03
"""Relative distance of each peer from the common weights."""

COMMON = torch.randn(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))

SHARES = (2 / 7, 2 / 5, 1 / 2)
ROUNDS = 150
SEEDS = (0, 1, 2)


@dataclass(slots=True)
class Toll:
    """Outcome of the exchanges between honest peers."""

    refused: list[bool]
    """Whether each exchange was refused, in order."""
    errors: list[float]
    """||d - true|| / ||true|| of each exchange that one of both accepted."""


def peer(seed: int, blocks: int = BLOCKS) -> Payloads:
    """Return a peer about a thirtieth off the others that knows this distance."""
    payloads = Payloads([blocks * BLOCK], get("modular4", BLOCK), None)
    noise = APART * torch.randn(blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    part = COMMON[: blocks * BLOCK] + noise
    payloads.publish(Snapshot(1, (part,), (part,)))
    payloads.predict_widths([noise])
    return payloads


def refusals(one: Payloads, other: Payloads, exchanges: int, number: int = 0) -> list[bool]:
    """Return which of some exchanges were refused by either side."""
    return [any(found is None for found in exchanged(one, other, number)) for _ in range(exchanges)]


def exchanged(one: Payloads, other: Payloads, number: int = 0) -> list[Tensor | None]:
    """Return the difference that each side finds; None if it refused."""
    proposal, answer = one.proposals([number]), other.proposals([number])
    mine, theirs = one.encode([number], proposal, answer), other.encode([number], answer, proposal)
    found: list[Tensor | None] = []
    for each, own, others in ((one, mine, theirs), (other, theirs, mine)):
        try:
            found.append(each.difference(own, others.parts).parts[0])
        except NetworkError:
            found.append(None)
    return found


Lie = Callable[[Payloads, Payloads, Random], None]
"""One exchange of an honest peer and an adversarial one with its random generator, judged only by the honest one."""


# --- lies -------------------------------------------------------------------------------------------------------------


def garbled(one: Payloads, liar: Payloads, random: Random) -> None:
    """Send random bytes."""
    proposal, answer = one.proposals([0]), liar.proposals([0])
    theirs = [random.randbytes(len(part)) for part in liar.encode([0], answer, proposal).parts]
    with contextlib.suppress(NetworkError):
        one.difference(one.encode([0], proposal, answer), theirs)


def scaled(factor: float) -> Lie:
    """Return a lie that sends weights times a factor, with the true sketch."""

    def lie(one: Payloads, liar: Payloads, random: Random) -> None:
        proposal, answer = one.proposals([0]), liar.proposals([0])
        part = factor * liar.published.parts[0]
        false = liar.encode([0], answer, proposal, Snapshot(1, (part,), (part,)))
        with contextlib.suppress(NetworkError):
            one.difference(one.encode([0], proposal, answer), false.parts)

    return lie


def coarse(share: float) -> Lie:
    """Return a lie that proposes the widest steps for the first blocks and sends bytes for them, which wrap."""

    def lie(one: Payloads, liar: Payloads, random: Random) -> None:
        wide = round(share * BLOCKS)
        mine, theirs = one.proposals([0]), [bytes([255]) * wide + liar.proposals([0])[0][wide:]]
        message = bytearray(liar.encode([0], theirs, mine).parts[0])
        message[: wide * BLOCK // 2] = random.randbytes(wide * BLOCK // 2)
        with contextlib.suppress(NetworkError):
            one.difference(one.encode([0], mine, theirs), [bytes(message)])

    return lie


def echoed(one: Payloads, liar: Payloads, random: Random) -> None:
    """Propose the narrowest steps and send our own message back, so that nothing differs."""
    sketch = liar.proposals([0])[0][-SKETCH_BYTES:]
    mine = one.encode([0], one.proposals([0]), [bytes(BLOCKS) + sketch])
    one.difference(mine, mine.parts)


LIES: dict[str, Lie] = {
    "sends bytes": garbled,
    "sends negated weights": scaled(-1.0),
    "sends three times its weights": scaled(3.0),
    "sends zeros": scaled(0.0),
    "proposals for the widest steps in a quarter of the blocks, and they wrap": coarse(0.25),
    "the same in two fifths": coarse(0.4),
    "the same in all": coarse(1.0),
    "sends our own message back": echoed,
}


def toll(lie: Lie, share: float, rounds: int, seed: int) -> Toll:
    """Return the outcome for two honest peers and one adversarial one, from their first exchange on."""
    random, one, other, liar = Random(seed), peer(2), peer(3), peer(4)
    true = other.published.parts[0] - one.published.parts[0]
    found = Toll([], [])
    for _ in range(rounds):
        for honest in (one, other):
            if random.random() < share:
                lie(honest, liar, random)
        if random.random() < 1 - share:
            ours, theirs = exchanged(one, other)
            found.refused.append(ours is None or theirs is None)
            if ours is not None:
                found.errors.append(float((ours - true).norm() / true.norm()))
    return found


@click.command()
def main() -> None:
    """Print the table."""
    headings = [f"in {share:.0%} of the rounds" for share in SHARES]
    click.echo("| the adversarial peer | " + " | ".join(headings) + " |\n|---|" + "---|" * len(SHARES))
    for name, lie in LIES.items():
        cells = []
        for share in SHARES:
            tolls = [toll(lie, share, ROUNDS, seed) for seed in SEEDS]
            refused = [each for found in tolls for each in found.refused]
            errors = [each for found in tolls for each in found.errors]
            cells.append(f"{sum(refused) / len(refused):.1%} refused, error {sum(errors) / len(errors):.2f}")
        click.echo(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
