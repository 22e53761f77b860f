"""Fields of a scenario that only a testnet of real peers supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import scenario as scenarios
from lab.scenario import Limit, RealGroup, RealScenario
from sim import scenario_file
from sim.errors import ScenarioError
from sim.scenario import Group, Scenario
from sim.scenario_file import changed

HOME_LINES = Path(__file__).parent.parent.parent / "bench" / "scenarios" / "home_lines.toml"
PARTED = 'partitions=[{at_s = 1, for_s = 1, sides = [["home"], ["bootstrap"]]}]'

BROKEN = 'peers.home.troubles=[{what = "daemon_dies", at_s = 1}]'


@pytest.fixture
def plain() -> dict[str, Any]:
    return scenario_file.read(HOME_LINES, ())


def test_the_simulator_knows_every_field_of_a_testnet() -> None:
    fields = set(RealScenario.model_fields) - set(Scenario.model_fields)
    assert fields == {*scenario_file.TESTNET_KEYS, "limits", "undisturbed"}
    fields = set(RealGroup.model_fields) - set(Group.model_fields)
    assert fields == {*scenario_file.TESTNET_GROUP_KEYS, "awaited"}


@pytest.mark.parametrize(
    "change",
    [
        "peers.home.troubles=[{what = 'disk_full', at_s = 1e308}]",
        "partitions=[{at_s = 1.0, for_s = 1e308, sides = [['home'], ['bootstrap']]}]",
        "bootstrap.dies_at_s=1e308",
    ],
)
def test_times_are_bounded(plain: dict[str, Any], change: str) -> None:
    with pytest.raises(ScenarioError, match=r"found 1e\+308"):
        scenarios.parse(changed(plain, [change]))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("peers.home.name=bootstrap", "peers.bootstrap.name: bootstrap is reserved for the bootstrap"),
        ("bootstrap.returns_after_s=3", "bootstrap.returns_after_s: the bootstrap does not die; give dies_at_s"),
        (
            BROKEN.replace("1}", "1, for_s = 2}"),
            "peers.home.troubles[0].for_s: nothing ends daemon_dies; leave it out",
        ),
        (
            BROKEN.replace("daemon_dies", "rank_dies"),
            "peers.home.troubles[0].what: rank_dies needs a peer on several devices",
        ),
        ('peers.home.devices="cpu;cpu"', "peers.home.devices: found 'cpu;cpu': devices are"),
        ("peers.home.leaves_every_s=9", "peers.home.leaves_every_s: give leaves_at_s, when the first peer leaves"),
        (
            "peers.home.amid_exchange=true",
            "peers.home.amid_exchange: no peer is killed or frozen; give leaves_at_s or freezes",
        ),
        ("peers.home.invited=false", 'peers.home.invited: the run is open to everybody; give admission = "invite"'),
        ("peers.home.banned_at_s=3", 'peers.home.banned_at_s: the run is open to everybody; give admission = "invite"'),
        ("limits.tokens={}", "limits.tokens: give at_least, at_most or both"),
        (PARTED.replace("home", "hone"), "partitions[0].sides: there is no group hone; there are bootstrap, home"),
        (
            PARTED.replace('"bootstrap"', ""),
            "partitions[0].sides: each side needs a group, and each group is on at most one",
        ),
        (
            PARTED.replace("bootstrap", "home"),
            "partitions[0].sides: each side needs a group, and each group is on at most one",
        ),
        ("peers.home.lie=flud", "peers.home.lie: input should be 'progress', 'behind', 'garbage'"),
        ("peers.home.ruoter=true", "peers.home.ruoter: unknown field; did you mean peers.home.router?"),
    ],
)
def test_what_is_wrong_is_told(plain: dict[str, Any], change: str, line: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenarios.parse(changed(plain, [change]))
    assert caught.value.problem.startswith(line)


def test_second_0_waits_for_nobody_who_is_not_invited(plain: dict[str, Any]) -> None:
    uninvited = ["admission=invite", "peers.home.invited=false"]
    with pytest.raises(ScenarioError, match=r"peers\.home\.arrives_at_s: second 0 waits until all peers train"):
        scenarios.parse(changed(plain, uninvited))
    assert not scenarios.parse(changed(plain, [*uninvited, "peers.home.arrives_at_s=3"])).peers[0].invited


def test_every_honest_peer_makes_the_same_outer_steps_beside_adversaries(plain: dict[str, Any]) -> None:
    """Check a run of so many outer steps: the swarm counts the tokens of adversaries, too."""
    run, group = {"seed": 1, "outer_steps": 100}, {"count": 6, "step_s": 1.0}
    honest = {**plain, "run": run, "peers": [{"name": "honest", **group}]}
    among = {**honest, "peers": [*honest["peers"], {"name": "liar", "lie": "progress", **group, "count": 2}]}
    alone, beside = scenarios.parse(honest), scenarios.parse(among)
    assert alone.run_tokens == 600 * alone.tokens_per_outer_step
    assert beside.run_tokens == 800 * alone.tokens_per_outer_step


def test_limits_are_inclusive() -> None:
    assert Limit(at_least=1, at_most=2).holds(1)
    assert Limit(at_least=1, at_most=2).holds(2)
    assert not Limit(at_least=1).holds(0.9)
    assert not Limit(at_most=2).holds(2.1)


def test_what_a_scenario_is_compared_with_has_its_own_peers_and_nothing_happens(plain: dict[str, Any]) -> None:
    assert scenarios.parse(plain).calm() is None
    undisturbed = {"peers": [{"name": "calm", "count": 3, "step_s": 1.0}]}
    data = changed({**plain, "undisturbed": undisturbed}, [PARTED, "bootstrap.dies_at_s=3", BROKEN])
    calm = scenarios.parse(data).calm()
    assert calm is not None
    assert [group.name for group in calm.peers] == ["calm"]
    assert (calm.partitions, calm.bootstrap.dies_at_s, calm.limits, calm.undisturbed) == ([], None, {}, None)
    assert calm.outer == scenarios.parse(plain).outer
    assert calm.peers[0].model_fields_set == {"name", "count", "step_s"}


def test_churn_needs_places_that_are_free_again(plain: dict[str, Any]) -> None:
    group = {"count": 2, "step_s": 1.0, "leaves_at_s": 5.0, "leaves_every_s": 5.0, "returns_after_s": 10.0}
    with pytest.raises(ScenarioError) as caught:
        scenarios.parse({**plain, "peers": [group]})
    assert caught.value.problem == "peers[0].leaves_every_s: a replacement would arrive only after its turn to leave"
    scenarios.parse({**plain, "peers": [{**group, "returns_after_s": 0.0}]})
