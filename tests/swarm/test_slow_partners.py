"""A partner that held us for longer than usual waits, and others are served in between."""

from __future__ import annotations

import pytest
from table import RULES, RUN, Table, presence

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.events import Donate, LinkFailed, PeersSeen, Received, Send, SwapDone
from p2ptrain.swarm.messages import Accept, Acknowledge, Decline, DeclineReason, Offer, PeerState, Terms, WeightsRequest
from p2ptrain.swarm.partners import own_terms
from p2ptrain.swarm.peer_info import REST

DRAGGER = PeerId("dragger")


def in_step() -> Table:
    table = Table("amber", "birch")
    table.start()
    table.run(3.0)
    table.step("amber", "birch")
    table.run(3.0)
    assert table["amber"].core.counters.exchanges_ok > 0
    return table


def answer_to(table: Table, link: LinkId) -> DeclineReason | None:
    """Return amber's reason to decline an offer on this link; None: it accepts."""
    offer = Offer(RUN, RULES.protocol, (0, 1, 2), own_terms(table["birch"].core._core, PeerId("amber")))
    effects = table["amber"].core.handle(Received(link, offer), table.now)
    messages = [effect.message for effect in effects if isinstance(effect, Send) and effect.link == link]
    [message] = messages
    assert isinstance(message, Accept | Decline)
    return message.reason if isinstance(message, Decline) else None


def link_of(peer: PeerId, serial: int) -> LinkId:
    return LinkId(peer, serial, outbound=False)


def swap(table: Table, link: LinkId, seconds: float, breaks_off: bool) -> None:
    """Let an exchange take this long, and commit or break off."""
    core = table["amber"].core
    table.now += seconds
    if breaks_off:
        core.handle(LinkFailed(link, "gone"), table.now)
        return
    core.handle(SwapDone(link, 1000, 1000, 0.1, 1.0, b""), table.now)
    core.handle(Received(link, Acknowledge()), table.now)


@pytest.mark.parametrize("breaks_off", [False, True])
def test_who_held_our_fragments_for_too_long_waits_and_another_is_served(breaks_off: bool) -> None:
    table = in_step()
    assert answer_to(table, link_of(DRAGGER, 1)) is None
    swap(table, link_of(DRAGGER, 1), 4.0, breaks_off)
    ended = table.now
    table["amber"].core._exchanges.book._exchanges.clear()  # its displacement is applied
    table.now = ended + REST * 2.0  # well after its pause for breaking off, and within its rest of four times 3 s
    assert answer_to(table, link_of(DRAGGER, 2)) is DeclineReason.BUSY
    assert answer_to(table, link_of(PeerId("cedar"), 1)) is None
    swap(table, link_of(PeerId("cedar"), 1), 0.1, False)
    table["amber"].core._exchanges.book._exchanges.clear()
    table.now = ended + REST * 3.1
    assert answer_to(table, link_of(DRAGGER, 3)) is None


@pytest.mark.parametrize("breaks_off", [False, True])
@pytest.mark.parametrize("by_message", [False, True])
def test_nobody_held_us_while_we_slept(breaks_off: bool, by_message: bool) -> None:
    """Check a laptop's sleep during an exchange, whatever event is first: no penalty, and no measured transfer."""
    table = in_step()
    core = table["amber"].core
    assert answer_to(table, link_of(DRAGGER, 1)) is None
    slept_s = core._wake_at - table.now + 8 * 3600.0
    before = core._core.deadlines.seconds_per_byte()
    if by_message:  # which first names the peers that its sender knows
        core.handle(
            PeersSeen(((presence("cedar", at=table.now + slept_s), table.now + slept_s + 75.0),), from_lookup=False),
            table.now + slept_s,
        )
    swap(table, link_of(DRAGGER, 1), slept_s, breaks_off)
    core._exchanges.book._exchanges.clear()
    assert not core._exchanges._slow_partners.waits(DRAGGER, table.now)
    assert core._core.deadlines.seconds_per_byte() <= before
    assert core._core.seconds_per_outer_step < 3600.0
    table.now += 60.0
    core._core.members.record_success(DRAGGER)
    assert answer_to(table, link_of(DRAGGER, 2)) is not DeclineReason.BUSY


def test_who_takes_no_longer_than_it_takes_does_not_wait() -> None:
    table = in_step()
    assert answer_to(table, link_of(DRAGGER, 1)) is None
    swap(table, link_of(DRAGGER, 1), 0.5, False)
    table["amber"].core._exchanges.book._exchanges.clear()
    assert answer_to(table, link_of(DRAGGER, 2)) is None


def test_a_stranger_that_keeps_the_one_place_for_newcomers_leaves_it_to_others() -> None:
    table = in_step()
    for _ in range(30):
        table.step("amber", "birch")
        table.run(0.5)
    core = table["amber"].core
    request = WeightsRequest(RUN, RULES.protocol, 0.0, seconds_per_byte=1e12)

    def is_given(peer: PeerId, serial: int) -> bool:
        effects = core.handle(Received(link_of(peer, serial), request), table.now)
        return any(isinstance(effect, Donate) for effect in effects)

    assert is_given(DRAGGER, 1)
    held_s = core._catch_up._donations[link_of(DRAGGER, 1)] - table.now
    assert held_s <= 60.0, "it says for how long it may keep the place"
    table.now += held_s + 1.0
    core._catch_up.expire(table.now)
    assert not core._catch_up._donations
    table.now += 2.0
    assert not is_given(DRAGGER, 2)
    assert is_given(PeerId("cedar"), 1)


@pytest.mark.parametrize("weight", [1e6, 2.0, 0.5])
def test_who_claims_a_weight_of_its_own_where_all_are_equal_breaks_the_protocol(weight: float) -> None:
    table = in_step()
    core = table["amber"].core
    terms = Terms(1, 10.0, weight, float("inf"), True, PeerState.TRAINING)
    core.handle(Received(link_of(DRAGGER, 1), Offer(RUN, RULES.protocol, (0,), terms)), table.now)
    assert core.counters.offences == 1
    assert not core._exchanges.book.get(link_of(DRAGGER, 1))
    assert core._core.members.is_distrusted(DRAGGER, table.now)


def test_who_answers_with_a_weight_of_its_own_breaks_it_too() -> None:
    table = in_step()
    core = table["amber"].core
    core._core.members.see(presence("dragger"), table.now + 75.0)
    table.kill("birch")
    table.run(200.0)
    core._core.members.see(presence("dragger", at=table.now), table.now + 75.0)
    table.step("amber")
    offers = [each.link for each in core._exchanges.book if each.link.peer == DRAGGER]
    assert offers
    terms = Terms(1, 10.0, 1e6, float("inf"), True, PeerState.TRAINING)
    core.handle(Received(offers[0], Accept((0,), terms)), table.now)
    assert core.counters.offences == 1


@pytest.mark.parametrize(("mine", "theirs", "counts"), [(1.0, 3.0, 3.0), (1.0, 1e6, 16.0), (1e6, 1.0, 62_500.0)])
def test_a_weight_counts_up_to_a_ratio_on_both_sides_alike(mine: float, theirs: float, counts: float) -> None:
    one, other = (Terms(1, 10.0, weight, float("inf"), True, PeerState.TRAINING) for weight in (mine, theirs))
    assert one.weight_of(other) == counts
    shares = [a.weight_of(b) / (a.weight + a.weight_of(b)) for a, b in ((one, other), (other, one))]
    assert sum(shares) == pytest.approx(1.0)
