"""Step widths that fit, and a partner whose bytes do not: they are rejected, and do not change the widths."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import torch
from torch import Tensor

from bench.liars import BLOCK, BLOCKS, COMMON, LIES, coarse, peer, refusals, toll
from p2ptrain.base.errors import MisfitError
from p2ptrain.codec import FIRST_PACE, LARGEST_MAGNITUDE, PACE, get
from p2ptrain.codec.steps import SKETCH_BYTES
from p2ptrain.host.payloads import Difference, Encoded, Payloads, Snapshot
from p2ptrain.host.widths import FITTED, LEAST_GAP, MISFIT_BLOCKS, Fit, WidthFeedback, judge
from p2ptrain.swarm.trust import are_unrelated


def lopsided(part: Tensor) -> Tensor:
    """Return weights with seven of sixteen blocks sixteen times as far from ``COMMON``: others need narrower steps."""
    far = 7 * BLOCK
    return torch.cat([16 * part[:far] - 15 * COMMON[:far], part[far:]])


def met(one: Payloads, other: Payloads, garble: Random | None = None, number: int = 0) -> Difference:
    """Return one side's result of an exchange; with ``garble``, the other's codes are random bytes."""
    proposals = one.proposals([number]), other.proposals([number])
    mine: Encoded = one.encode([number], *proposals)
    theirs = other.encode([number], *reversed(proposals)).parts
    return one.difference(mine, [garble.randbytes(len(part)) for part in theirs] if garble else theirs)


def acquainted(one: Payloads, other: Payloads) -> float:
    """Return the distance of two peers that have learnt their step widths."""
    return [met(one, other).distance for _ in range(FITTED)][-1]


def test_bytes_that_are_no_weights_are_refused_and_teach_little() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    before = acquainted(one, other)
    widths = one.proposals([0])[0]
    with pytest.raises(MisfitError, match="do not fit the agreed step widths"):
        met(one, other, random)
    assert all(0 <= after - known <= PACE for known, after in zip(widths, one.proposals([0])[0], strict=True))
    assert met(one, other).distance == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize(
    ("told", "verdict"), [(0.9 * LEAST_GAP, WidthFeedback.FITS), (2.0 * LEAST_GAP, WidthFeedback.NARROW)]
)
def test_weights_that_are_as_good_as_equal_fit_whatever_wraps(told: float, verdict: WidthFeedback) -> None:
    """Check peers that nearly agree: at the run's end they would otherwise reject each other for wrapped blocks."""
    fit = Fit(sketched=told, unexplained=told, blocks=MISFIT_BLOCKS, wrapped=1.0, is_known=True)
    assert judge([fit], own=1.0) is verdict


@pytest.mark.parametrize("factor", [3.0, -1.0, 0.0, 0.5, LARGEST_MAGNITUDE / 8])
def test_weights_other_than_the_sketch_told_of_are_refused(factor: float) -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    proposals = one.proposals([0]), other.proposals([0])
    part = factor * other.published.parts[0]
    false = other.encode([0], *reversed(proposals), Snapshot(1, (part,), (part,)))
    with pytest.raises(MisfitError, match="do not fit the agreed step widths"):
        one.difference(one.encode([0], *proposals), false.parts)


@pytest.mark.parametrize("factor", [3.0, -1.0, 0.0, 0.5, LARGEST_MAGNITUDE / 8])
def test_who_has_measured_nothing_yet_mixes_nothing_of_them(factor: float) -> None:
    """Check false weights at the first meeting, whose steps fit smaller differences: nothing is mixed."""
    one, other = peer(2), peer(3)
    part = factor * other.published.parts[0]
    proposals = one.proposals([0]), other.proposals([0])
    false = other.encode([0], *reversed(proposals), Snapshot(1, (part,), (part,)))
    with contextlib.suppress(MisfitError):
        assert one.difference(one.encode([0], *proposals), false.parts).distance <= 0.05


def test_what_the_sketch_told_of_is_sent_though_something_newer_is_published() -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    told = one.published, other.published
    proposals = one.proposals([0], told[0]), other.proposals([0], told[1])
    for each, snapshot in zip((one, other), told, strict=True):
        part = 2.0 * snapshot.parts[0]
        each.publish(Snapshot(2, (part,), (part,)))
    found = one.difference(one.encode([0], *proposals, told[0]), other.encode([0], *reversed(proposals), told[1]).parts)
    apart = told[1].parts[0] - told[0].parts[0]
    assert float((found.parts[0] - apart).norm()) <= 0.5 * float(apart.norm())
    assert found.mine.step == 1


def test_weights_that_moved_since_the_sketch_are_refused_however_near() -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    proposals = one.proposals([0]), other.proposals([0])
    part = other.published.parts[0] + 0.1 * torch.randn(len(COMMON), generator=torch.Generator().manual_seed(4))
    moved = other.encode([0], *reversed(proposals), Snapshot(2, (part,), (part,)))
    with pytest.raises(MisfitError, match="do not fit the agreed step widths"):
        one.difference(one.encode([0], *proposals), moved.parts)


def test_weights_whose_sketch_tells_that_they_are_far_off_are_strange_whatever_wraps() -> None:
    one, other = peer(2), peer(3)
    acquainted(one, other)
    true = other.published.parts[0]
    part = torch.cat([8 * true[:BLOCK], true[BLOCK:]])  # the first block wraps, and all others fit
    other.publish(Snapshot(1, (part,), (part,)))
    found = met(one, other)
    assert not are_unrelated(found.distance)
    assert are_unrelated(found.sketched)
    assert found.sketched == pytest.approx(float((part - one.published.parts[0]).norm()) / found.norm, rel=0.3)


def test_the_sketched_distance_of_near_weights_is_about_theirs() -> None:
    found = met(peer(2), peer(3))
    assert found.sketched == pytest.approx(found.distance, rel=0.4)


def test_what_never_fitted_is_learnt_from() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    before = one.proposals([0])[0][:-SKETCH_BYTES]
    met(one, other, random)  # first contact: widths rise
    assert all(after > width for after, width in zip(one.proposals([0])[0], before, strict=False))


def test_widths_far_too_narrow_widen_with_each_honest_exchange_that_is_refused() -> None:
    one, other = peer(2), peer(3)
    parts = [each.published.parts[0] for each in (one, other)]
    for each, part in zip((one, other), parts, strict=True):
        each.publish(Snapshot(1, (lopsided(part),), (lopsided(part),)))
    refusals(one, other, 12)
    for each, part in zip((one, other), parts, strict=True):
        each.publish(Snapshot(2, (part,), (part,)))
    refused = refusals(one, other, 12)
    assert refused[0]
    assert not any(refused[-4:])


def test_of_few_blocks_as_many_may_wrap_by_chance() -> None:
    one, other, random = peer(2, MISFIT_BLOCKS - 1), peer(3, MISFIT_BLOCKS - 1), Random(1)
    acquainted(one, other)
    assert met(one, other, random).distance == 0.0


def test_widths_that_fitted_once_may_not_the_next_time() -> None:
    one, other, random = peer(2), peer(3), Random(1)
    for _ in range(FITTED - 1):
        met(one, other)
    assert met(one, other, random).distance == 0.0


def test_equal_weights_say_nothing_of_widths() -> None:
    one, random = peer(2), Random(1)
    for _ in range(2 * FITTED):
        assert met(one, peer(2)).distance == 0.0
    assert met(one, peer(3), random).distance == 0.0


@pytest.mark.parametrize("factor", [3.0, -1.0])
def test_a_liar_that_has_drifted_far_away_is_refused_as_well(factor: float) -> None:
    """Check false weights from far away: the steps are wide, and what does not wrap must be rejected."""
    one, other = peer(2), peer(3)
    for _ in range(3):
        met(one, other)
    far = other.published.parts[0] + 0.7 * torch.randn(len(COMMON), generator=torch.Generator().manual_seed(5))
    other.publish(Snapshot(9, (far,), (far,)))
    part = factor * far
    for _ in range(2):
        proposals = one.proposals([0]), other.proposals([0])
        false = other.encode([0], *reversed(proposals), Snapshot(9, (part,), (part,)))
        with pytest.raises(MisfitError, match="do not fit the agreed step widths"):
            one.difference(one.encode([0], *proposals), false.parts)


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
    one.forget_fits()
    assert met(one, other, random).distance == 0.0


def widened(one: Payloads, liar: Payloads, share: float) -> None:
    coarse(share)(one, liar, Random(0))


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
def test_widths_that_are_far_too_wide_narrow_with_each_honest_exchange(share: float) -> None:
    """Check steps that are far too wide: honest exchanges are rejected like random bytes, but soon narrow the steps."""
    one, other, liar = peer(2), peer(3), peer(4)
    refusals(one, other, 3)
    before = met(one, other).distance
    for _ in range(100):  # without other partners meanwhile
        widened(one, liar, share)
        widened(other, liar, share)
    refused = refusals(one, other, 24)
    assert sum(refused) <= 8
    assert not any(refused[-8:])
    assert met(one, other).distance == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("lie", LIES)
def test_liars_that_make_two_fifths_of_the_exchanges_lock_nobody_out(lie: str) -> None:
    """Check two fifths of all exchanges; docs/LOG.md has the figures, and those for half of them."""
    refused = toll(LIES[lie], 0.4, 80, seed=1).refused
    assert sum(refused) <= (0.35 if lie == "sends our own message back" else 0.1) * len(refused)
    assert len(refused) > 40


def test_who_knows_nothing_yet_takes_one_octave_of_a_wish_for_the_widest_steps() -> None:
    one, liar = Payloads([BLOCKS * BLOCK], get("modular4", BLOCK), None), peer(4)
    one.publish(peer(2).published)
    guess = one.proposals([0])[0]
    widened(one, liar, 0.4)
    wished = one.proposals([0])[0]
    assert all(abs(after - before) <= FIRST_PACE for before, after in zip(guess, wished, strict=True))
    assert wished != guess


def test_a_fragment_whose_widths_are_wrong_learns_while_others_fit() -> None:
    """Check fragments that are exchanged in turn, one at a time."""
    lengths, codec = [BLOCKS * BLOCK] * 2, get("modular4", BLOCK)
    one, other = Payloads(lengths, codec, None), Payloads(lengths, codec, None)
    parts = {one: peer(2).published.parts[0], other: peer(3).published.parts[0]}
    for each, part in parts.items():
        each.publish(Snapshot(1, (part, lopsided(part)), (part, lopsided(part))))
        each.predict_widths([part - COMMON, lopsided(part) - COMMON])
    for _ in range(12):
        refusals(one, other, 1, 0)
        refusals(one, other, 1, 1)
    for each, part in parts.items():
        each.publish(Snapshot(2, (part, part), (part, part)))
    refused = [refusals(one, other, 1, number)[0] for _ in range(12) for number in range(2)]
    assert not any(refused[::2])
    assert refused[1]
    assert not any(refused[1::2][-4:])
