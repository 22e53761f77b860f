"""In a swarm too large to know, a peer remembers a sample of the others, and replaces it over time."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from run_rules import run_rules
from table import RULES, presence

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import Peer, SwarmRules
from p2ptrain.swarm.events import Lookup, Note, PeersSeen, Started, Woke
from p2ptrain.swarm.rules import CROWDED_LOOKUP_PERIOD_S, ENOUGH_PEERS, FRESH_PEERS, LOOKUP_PERIOD_S

UNTIL = 500.0


def peer(rules: SwarmRules = RULES, seed: int = 1) -> Peer:
    core = Peer(PeerId("me"), rules, Random(seed))
    core.handle(Started(), 0.0)
    return core


def seen(first: int, count: int, from_lookup: bool = True) -> PeersSeen:
    records = tuple((presence(f"peer-{number:04d}"), UNTIL) for number in range(first, first + count))
    return PeersSeen(records, from_lookup)


def known(core: Peer) -> set[PeerId]:
    return set(core.live_peers(1.0))


def kinds(effects: list) -> list[str]:
    return [effect.kind for effect in effects if isinstance(effect, Note)]


def test_a_small_swarm_is_known_whole_and_named():
    core = peer()
    assert kinds(core.handle(seen(0, ENOUGH_PEERS), 0.1)).count("found") == ENOUGH_PEERS
    assert len(known(core)) == ENOUGH_PEERS


def test_of_a_crowd_enough_are_kept_in_mind_and_none_is_named():
    core = peer()
    effects = core.handle(seen(0, 100), 0.1)
    assert len(known(core)) == ENOUGH_PEERS
    assert "found" not in kinds(effects)


def test_every_lookup_brings_strangers_and_refreshes_the_known():
    core = peer()
    core.handle(seen(0, 100), 0.1)
    before = known(core)
    core.handle(seen(0, 200), 20.0)
    assert before < known(core)
    assert len(known(core)) == ENOUGH_PEERS + FRESH_PEERS


def test_what_messages_pass_on_fills_up_a_small_swarm():
    core = peer()
    core.handle(seen(0, ENOUGH_PEERS - 2), 0.1)
    core.handle(seen(1000, 4, from_lookup=False), 0.2)
    assert len(known(core)) == ENOUGH_PEERS
    core.handle(seen(2000, 4, from_lookup=False), 0.3)
    assert len(known(core)) == ENOUGH_PEERS


def test_in_a_crowd_messages_fill_up_half():
    core = peer()
    core.handle(PeersSeen(seen(0, 100).records[:20] + tuple((record, 2.0) for record, _ in seen(20, 80).records)), 0.1)
    core.handle(Woke(), 3.0)
    left = len(core.live_peers(3.0))
    assert left < ENOUGH_PEERS // 2
    for times in range(20):
        core.handle(seen(1000 + 4 * times, 4, from_lookup=False), 3.1)
    assert len(core.live_peers(3.2)) == ENOUGH_PEERS // 2


def test_everybody_is_as_likely_to_be_kept():
    counts = dict.fromkeys(range(100), 0)
    for seed in range(200):
        core = peer(seed=seed)
        core.handle(seen(0, 100), 0.1)
        for name in known(core):
            counts[int(name.removeprefix("peer-"))] += 1
    expected = 200 * ENOUGH_PEERS / 100
    assert all(0.5 * expected < count < 1.6 * expected for count in counts.values())


@pytest.mark.parametrize("planned", [{"topology": "ring"}, {"between": (0,), "free": ()}, {"beside": (0,), "free": ()}])
def test_who_plans_with_everybody_knows_everybody(planned):
    core = peer(run_rules(**planned))
    core.handle(seen(0, 100), 0.1)
    assert len(known(core)) == 100


@pytest.mark.parametrize(("peers", "period"), [(10, LOOKUP_PERIOD_S), (100, CROWDED_LOOKUP_PERIOD_S)])
def test_in_a_crowd_the_directory_is_asked_half_as_often(peers, period):
    core = peer()
    core.handle(seen(0, peers), 0.1)
    asked = []
    for tenth in range(1, 4000):
        now = 0.1 * tenth
        if any(isinstance(effect, Lookup) for effect in core.handle(Woke(), now)):
            asked.append(now)
            core.handle(seen(0 if peers == 10 else 100 * len(asked), peers), now + 0.05)
    gaps = [later - earlier for earlier, later in pairwise(asked)][1:]
    assert 0.75 * period <= min(gaps)
    assert max(gaps) <= 1.25 * period + 0.2
