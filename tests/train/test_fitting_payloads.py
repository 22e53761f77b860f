"""Step widths that fitted, and a partner whose bytes do not: refused, and nothing is learnt from them."""

from __future__ import annotations

from random import Random

import pytest
import torch

from p2ptrain.codec import get
from p2ptrain.errors import NetworkError
from p2ptrain.train.payloads import MISFIT_BLOCKS, MISFITS, Difference, Encoded, Payloads, Snapshot

BLOCK = 64
COMMON = torch.randn(MISFIT_BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))


def peer(seed: int, blocks: int = MISFIT_BLOCKS) -> Payloads:
    """About a thirtieth off the others, and knowing how far that is."""
    payloads = Payloads([blocks * BLOCK], get("modular4", BLOCK), None)
    noise = 0.03 * torch.randn(blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    part = COMMON[: blocks * BLOCK] + noise
    payloads.publish(Snapshot(1, (part,), (part,)))
    payloads.foresee([noise])
    return payloads


def met(one: Payloads, other: Payloads, garble: Random | None = None) -> Difference:
    """What one makes of an exchange; with ``garble`` the other's codes are any bytes."""
    wishes = one.wishes([0]), other.wishes([0])
    mine: Encoded = one.encode([0], *wishes)
    theirs = other.encode([0], *reversed(wishes)).parts
    return one.difference(mine, [garble.randbytes(len(part)) for part in theirs] if garble else theirs)


def test_bytes_that_are_no_weights_are_refused_and_teach_nothing() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    before = met(one, other).distance
    widths = one.wishes([0])[0]
    with pytest.raises(NetworkError, match="not where it said"):
        met(one, other, random)
    assert one.wishes([0])[0] == widths
    assert met(one, other).distance == pytest.approx(before, rel=0.2)


def test_weights_other_than_the_sketch_told_of_are_refused() -> None:
    one, other = peer(2), peer(3)
    met(one, other)
    wishes = one.wishes([0]), other.wishes([0])
    part = 3 * other.published.parts[0]
    false = other.encode_snapshot(Snapshot(1, (part,), (part,)), [0], *reversed(wishes))
    with pytest.raises(NetworkError, match="not where it said"):
        one.difference(one.encode([0], *wishes), false.parts)


def test_what_never_fitted_and_what_does_not_fit_again_and_again_is_learnt_from() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    met(one, other, random)  # nothing is known yet: widths rise
    assert met(one, other).distance > 0
    for _ in range(MISFITS - 1):
        with pytest.raises(NetworkError):
            met(one, other, random)
    widths = one.wishes([0])[0]
    met(one, other, random)
    assert one.wishes([0])[0] != widths


def test_an_exchange_that_fits_forgives_those_before() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    met(one, other)
    for _ in range(3 * MISFITS):
        with pytest.raises(NetworkError):
            met(one, other, random)
        met(one, other)


def test_of_few_blocks_as_many_may_wrap_by_chance() -> None:
    one, other, random = peer(2, MISFIT_BLOCKS - 1), peer(3, MISFIT_BLOCKS - 1), Random(1)
    met(one, other)
    assert met(one, other, random).distance == 0.0


def test_new_weights_need_other_widths() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    met(one, other)
    one.begin_anew()
    assert met(one, other, random).distance == 0.0
