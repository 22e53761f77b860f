"""Step widths that fitted, and a partner whose bytes do not: refused, and nothing is learnt from them."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import torch

from p2ptrain.codec import LARGEST_MAGNITUDE, get
from p2ptrain.errors import NetworkError
from p2ptrain.swarm.trust import are_strange
from p2ptrain.train.payloads import Difference, Encoded, Payloads, Snapshot
from p2ptrain.train.widths import FITS, MISFIT_BLOCKS, MISFITS, STRAYS

BLOCK = 64
BLOCKS = MISFIT_BLOCKS
COMMON = torch.randn(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))


def peer(seed: int, blocks: int = BLOCKS) -> Payloads:
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


def acquainted(one: Payloads, other: Payloads) -> float:
    """How far apart they are, once widths are known."""
    return [met(one, other).distance for _ in range(FITS)][-1]


def test_bytes_that_are_no_weights_are_refused_and_teach_nothing() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    before = acquainted(one, other)
    widths = one.wishes([0])[0]
    with pytest.raises(NetworkError, match="not where it said"):
        met(one, other, random)
    assert one.wishes([0])[0] == widths
    assert met(one, other).distance == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("factor", [3.0, -1.0, 0.0, 0.5, LARGEST_MAGNITUDE / 8])
def test_weights_other_than_the_sketch_told_of_are_refused(factor: float) -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    wishes = one.wishes([0]), other.wishes([0])
    part = factor * other.published.parts[0]
    false = other.encode([0], *reversed(wishes), Snapshot(1, (part,), (part,)))
    with pytest.raises(NetworkError, match="not where it said"):
        one.difference(one.encode([0], *wishes), false.parts)


@pytest.mark.parametrize("factor", [3.0, -1.0, 0.0, 0.5, LARGEST_MAGNITUDE / 8])
def test_who_has_measured_nothing_yet_mixes_nothing_of_them(factor: float) -> None:
    """Or refuses them: as they decode in widths made for far smaller differences."""
    one, other = peer(2), peer(3)
    part = factor * other.published.parts[0]
    wishes = one.wishes([0]), other.wishes([0])
    false = other.encode([0], *reversed(wishes), Snapshot(1, (part,), (part,)))
    with contextlib.suppress(NetworkError):
        assert one.difference(one.encode([0], *wishes), false.parts).distance <= 0.05


def test_what_the_sketch_told_of_is_sent_though_something_newer_is_published() -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    told = one.published, other.published
    wishes = one.wishes([0], told[0]), other.wishes([0], told[1])
    for each, snapshot in zip((one, other), told, strict=True):
        part = 2.0 * snapshot.parts[0]
        each.publish(Snapshot(2, (part,), (part,)))
    found = one.difference(one.encode([0], *wishes, told[0]), other.encode([0], *reversed(wishes), told[1]).parts)
    apart = told[1].parts[0] - told[0].parts[0]
    assert float((found.parts[0] - apart).norm()) <= 0.5 * float(apart.norm())
    assert found.mine.step == 1


def test_weights_that_moved_since_the_sketch_are_refused_however_near() -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    wishes = one.wishes([0]), other.wishes([0])
    part = other.published.parts[0] + 0.1 * torch.randn(len(COMMON), generator=torch.Generator().manual_seed(4))
    moved = other.encode([0], *reversed(wishes), Snapshot(2, (part,), (part,)))
    with pytest.raises(NetworkError, match="not where it said"):
        one.difference(one.encode([0], *wishes), moved.parts)


def test_weights_whose_sketch_tells_that_they_are_far_off_are_strange_whatever_wraps() -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    true = other.published.parts[0]
    part = torch.cat([8 * true[:BLOCK], true[BLOCK:]])  # the first block wraps, and all others fit
    other.publish(Snapshot(1, (part,), (part,)))
    found = met(one, other)
    assert not are_strange(found.distance)
    assert are_strange(found.sketched)
    assert found.sketched == pytest.approx(float((part - one.published.parts[0]).norm()) / found.norm, rel=0.3)


def test_the_sketched_distance_of_near_weights_is_about_theirs() -> None:
    found = met(peer(2), peer(3))
    assert found.sketched == pytest.approx(found.distance, rel=0.4)


def test_what_never_fitted_is_learnt_from() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    met(one, other, random)  # nothing is known yet: widths rise
    assert met(one, other).distance > 0


def test_what_does_not_fit_again_and_again_is_our_own_widths_fault() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    acquainted(one, other)
    widths = one.wishes([0])[0]
    for _ in range(MISFITS - 1):
        with pytest.raises(NetworkError):
            met(one, other, random)
    assert one.wishes([0])[0] == widths
    met(one, other, random)
    assert one.wishes([0])[0] != widths
    with pytest.raises(NetworkError):  # once
        met(one, other, random)


def test_an_exchange_that_fits_forgives_those_before() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    acquainted(one, other)
    for _ in range(3):
        for _ in range(MISFITS - 1):
            with pytest.raises(NetworkError):
                met(one, other, random)
        met(one, other)


def test_of_few_blocks_as_many_may_wrap_by_chance() -> None:
    one, other, random = peer(2, MISFIT_BLOCKS - 1), peer(3, MISFIT_BLOCKS - 1), Random(1)
    acquainted(one, other)
    assert met(one, other, random).distance == 0.0


def test_widths_that_fitted_once_may_not_the_next_time() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    for _ in range(FITS - 1):
        met(one, other)
    assert met(one, other, random).distance == 0.0


def test_equal_weights_say_nothing_of_widths() -> None:
    one, random = peer(2), Random(1)
    for _ in range(2 * FITS):
        assert met(one, peer(2)).distance == 0.0
    assert met(one, peer(3), random).distance == 0.0


@pytest.mark.parametrize("factor", [3.0, -1.0])
def test_a_liar_that_has_drifted_far_away_is_refused_as_well(factor: float) -> None:
    """Widths are made for a far one then: much of what it says wraps, and the rest leaves little more than was told."""
    one, other = peer(2), peer(3)
    for _ in range(3):
        met(one, other)
    far = other.published.parts[0] + 0.7 * torch.randn(len(COMMON), generator=torch.Generator().manual_seed(5))
    other.publish(Snapshot(9, (far,), (far,)))
    part = factor * far
    for _ in range(MISFITS - 1):
        wishes = one.wishes([0]), other.wishes([0])
        false = other.encode([0], *reversed(wishes), Snapshot(9, (part,), (part,)))
        with pytest.raises(NetworkError, match="not where it said"):
            one.difference(one.encode([0], *wishes), false.parts)
        assert one.wishes([0]) == wishes[0]


def test_an_honest_one_that_has_drifted_far_away_fits() -> None:
    one, other = peer(2), peer(3)
    for _ in range(3):
        met(one, other)
    far = other.published.parts[0] + 0.7 * torch.randn(len(COMMON), generator=torch.Generator().manual_seed(5))
    other.publish(Snapshot(9, (far,), (far,)))
    apart = far - one.published.parts[0]
    left = apart - met(one, other).parts[0]
    assert float(left.norm()) <= 0.6 * float(apart.norm())


def test_new_weights_need_other_widths() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    acquainted(one, other)
    one.begin_anew()
    assert met(one, other, random).distance == 0.0


def coarse(wish: bytes, share: float) -> bytes:
    """The same sketch, and the widest steps there are for the first blocks."""
    blocks = round(share * BLOCKS)
    return bytes([255]) * blocks + wish[blocks:]


def widened(one: Payloads, liar: Payloads, share: float) -> None:
    """An exchange with one that wishes for coarse steps, and whose hashes there say that all wraps."""
    mine, theirs = one.wishes([0]), [coarse(liar.wishes([0])[0], share)]
    message = bytearray(liar.encode([0], theirs, mine).parts[0])
    for place in range(0, 2 * round(share * BLOCKS), 2):
        message[place] ^= 1
    with contextlib.suppress(NetworkError):
        one.difference(one.encode([0], mine, theirs), [bytes(message)])


def refusals(one: Payloads, other: Payloads, exchanges: int) -> list[bool]:
    """Of exchanges that both judge, which were refused by either."""
    found = []
    for _ in range(exchanges):
        refused = False
        for pair in ((one, other), (other, one)):
            try:
                met(*pair)
            except NetworkError:
                refused = True
        found.append(refused)
    return found


@pytest.mark.parametrize("share", [0.25, 0.4, 1.0])
def test_who_wishes_for_the_widest_steps_spoils_no_exchange_of_others(share: float) -> None:
    one, other, liar = peer(2), peer(3), peer(4)
    refusals(one, other, 3)
    before = met(one, other).distance
    for _ in range(3):
        widened(one, liar, share)
        widened(other, liar, share)
        assert not any(refusals(one, other, 1))
    assert met(one, other).distance == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("share", [0.25, 0.4, 1.0])
def test_widths_that_are_far_too_wide_are_forgotten(share: float) -> None:
    """They leave as much unexplained as a lie does."""
    one, other, liar = peer(2), peer(3), peer(4)
    refusals(one, other, 3)
    before = met(one, other).distance
    for _ in range(12):  # nobody else is met meanwhile
        widened(one, liar, share)
        widened(other, liar, share)
    refused = refusals(one, other, 4 * STRAYS)
    assert sum(refused) <= 2 * STRAYS
    assert not any(refused[-STRAYS:])
    assert met(one, other).distance == pytest.approx(before, rel=0.2)
