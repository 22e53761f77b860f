"""Keepers in the protocol core: what they may move, whom they count among, and how their parts are downloaded."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from run_rules import run_rules

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import Peer, PeerState, Presence, Terms, keeping
from p2ptrain.swarm.download_plan import Compare, DownloadPlan, Fetch
from p2ptrain.swarm.events import Announce, BeginTraining, Note, PeersSeen, Started
from p2ptrain.swarm.matching import OfferView, answer
from p2ptrain.swarm.membership import Membership
from p2ptrain.swarm.messages import DeclineReason, Offer
from p2ptrain.swarm.peer_count import PeerCount
from p2ptrain.swarm.progress import progress_displacement
from p2ptrain.swarm.rules import ProgressBounds

A, B, C, ME = (PeerId(name) for name in ("a", "b", "c", "me"))
RULES = run_rules(fragment_bytes=(10,) * 8, free=tuple(range(8)), run_tokens=1e6, exchanges_per_step=1)
TRAINER = Terms(step=9, progress=900.0, weight=1.0, clip_radius=inf, settled=True, state=PeerState.TRAINING)
KEEPER = replace(TRAINER, state=PeerState.KEEPING, step=5, progress=500.0)


def record(peer: PeerId, state: PeerState, progress: float = 0.0, keeps: keeping.Ranges = ()) -> Presence:
    return Presence(peer, RULES.run, ("/ip4/1.2.3.4/tcp/1",), state, 3, progress, True, "", 1.0, 75.0, b"", keeps=keeps)


@pytest.mark.parametrize("weight", [1e-3, 1.0, 1e6])
def test_a_keeper_moves_nobody_whatever_it_claims(weight: float) -> None:
    keeper = replace(KEEPER, weight=weight, progress=1e9, partners=0, max_decrease=inf)
    assert TRAINER.share(keeper) == 0.0
    assert keeper.share(TRAINER) == 0.5
    assert progress_displacement(TRAINER, keeper, 8, RULES) == 0.0
    assert keeper.share(keeper) == 0.0


def test_a_keepers_position_is_the_median_of_its_last_exchanges() -> None:
    position = keeping.KeeperPosition()
    for step in range(1, 8):
        position.exchanged(A if step % 2 else B, replace(TRAINER, step=step, progress=100.0 * step), 10.0 * step)
    for _ in range(3):
        said = position.exchanged(C, replace(TRAINER, step=10**6, progress=1e12), 80.0)
    assert said == (7, 700.0)
    assert position.pace_s(is_final=False) == pytest.approx(10.0)
    assert position.pace_s(is_final=True) == keeping.FINAL_PACE_S


def test_a_keeper_is_neither_counted_nor_called() -> None:
    members = Membership(ME)
    members.see(record(A, PeerState.TRAINING), 100.0)
    members.hear(A, PeerState.TRAINING, 3, 0.0, 1.0)
    members.see(record(B, PeerState.KEEPING, keeps=((0, 3),)), 100.0)
    members.hear(B, PeerState.KEEPING, 3, 0.0, 1.0)
    count = PeerCount()
    count.update(members, 2.0)
    assert count.peers == 2.0
    count.update(members, 2.0, is_training=False)
    assert count.peers == 1.0
    assert [known.peer for known in members.partners(2.0)] == [A]
    assert members.ready(B, 2.0) is None
    everything = RULES.everything
    assert [keeping.held_by(known, everything) for known in members.live(2.0)] == [everything, frozenset(range(4))]


def test_a_keeper_declines_every_offer() -> None:
    view = OfferView(
        me=ME,
        bounds=ProgressBounds(RULES),
        state=PeerState.KEEPING,
        settled=True,
        progress=900.0,
        effective_progress=900.0,
        distrusts_sender=False,
        is_crossing=False,
        is_offering=False,
        is_engaged=False,
        free_fragments=(0, 1),
        exchanges=0,
        planned=None,
    )
    offer = Offer(RULES.run, RULES.protocol, (0, 1), TRAINER)
    assert answer(offer, A, view) is DeclineReason.KEEPING
    assert answer(
        replace(offer, terms=replace(KEEPER, progress=900.0)), A, replace(view, state=PeerState.TRAINING)
    ) == (0,)


def test_a_keeper_founds_no_run() -> None:
    peer = Peer(ME, RULES, Random(0), keeps=frozenset({0, 1}))
    effects = [*peer.handle(Started(), 0.0), *peer.handle(PeersSeen((), from_lookup=True), 1.0)]
    for second in range(2, 100):
        effects += peer.handle(PeersSeen((), from_lookup=True), float(second))
    assert peer.state is PeerState.JOINING
    assert not [each for each in effects if isinstance(each, BeginTraining)]
    assert all(not each.keeps for each in effects if isinstance(each, Announce))
    assert [each.kind for each in effects if isinstance(each, Note)] == ["keeper waits"]


def test_records_of_fragments_that_the_run_lacks_are_ignored() -> None:
    peer = Peer(ME, RULES, Random(0))
    peer.handle(Started(), 0.0)
    seen = [(record(A, PeerState.KEEPING, 9.0, ((0, 8),)), 90.0), (record(B, PeerState.KEEPING, 9.0, ((0, 7),)), 90.0)]
    peer.handle(PeersSeen(tuple(seen), from_lookup=True), 1.0)
    assert peer.live_peers(1.0) == [B]


@pytest.mark.parametrize(
    "text", ["", "-", "a", "3-1", "0-", "-3", "0--1", "1,,2", "99999-99999999", "٣", "0-²", "0-3-5"]
)
def test_texts_that_are_no_fragments(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a fragment|not an ascending"):
        keeping.parse(text)


def test_fragments_in_words_and_back() -> None:
    held = frozenset({0, 1, 2, 5, 7, 8})
    assert keeping.words(held) == "0-2, 5, 7-8"
    assert keeping.parse(keeping.words(held)) == held
    assert keeping.fragments_in(keeping.ranges_of(held)) == held
    with pytest.raises(ValueError, match="separate ranges"):
        keeping.parse(",".join(str(2 * each) for each in range(9)))


def test_each_keeper_is_asked_for_its_part_only() -> None:
    held = {A: frozenset({0, 1}), B: frozenset({2, 3})}
    plan = DownloadPlan([10] * 4, [A, B], held=held)
    asked, actions, now = set(), plan.act(0.0), 0.0
    while not plan.is_done:
        now += 1.0
        fetches = [each for each in actions if isinstance(each, Fetch)]
        assert not [each for each in actions if isinstance(each, Compare)]  # nobody else has these pieces
        assert fetches
        actions = []
        for each in fetches:
            asked.add((each.donor, each.piece))
            actions += plan.fetched(each.donor, each.piece, now)
    assert asked == {(A, 0), (A, 1), (B, 2), (B, 3)}


def test_a_waiting_keeper_is_asked_for_what_the_first_three_lack() -> None:
    first = {PeerId(f"{each}"): frozenset({0}) for each in range(5)}
    plan = DownloadPlan([10] * 2, [*first, A], held={**first, A: frozenset({1})})
    assert (A, 1) in {(each.donor, each.piece) for each in plan.act(0.0) if isinstance(each, Fetch)}


def test_a_keepers_piece_is_compared_with_a_whole_copy() -> None:
    plan = DownloadPlan([10] * 2, [A, B, C], held={A: frozenset({0})}, wanted=frozenset({0}))
    actions = plan.act(0.0)
    assert {each.piece for each in actions} == {0}
    compares = [each for each in plan.fetched(A, 0, 1.0) if isinstance(each, Compare)]
    assert compares
    assert compares[0].donor in (B, C)
    plan.compared(compares[0].donor, 0, 1.4, 2.0)
    assert plan.is_disputed
