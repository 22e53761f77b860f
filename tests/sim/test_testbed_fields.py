"""Fields that only real peers act out: read with the others, refused by the simulator, and no part of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.base.errors import ScenarioError
from p2ptrain.sim import scenario_file, testbed_fields
from p2ptrain.sim.scenario_file import changed
from p2ptrain.sim.testbed_fields import Limit

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "bench" / "scenarios").glob("*.toml"))
PARTED = 'partitions=[{at_s = 1, for_s = 1, sides = [["home"], ["bootstrap"]]}]'

BROKEN = 'peers.home.troubles=[{what = "daemon_dies", at_s = 1}]'


@pytest.fixture
def plain() -> dict[str, Any]:
    import tomllib

    text = next(path for path in EXAMPLES if path.stem == "home_lines").read_text(encoding="utf-8")
    return tomllib.loads(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_simulated_is_what_the_simulator_reads_itself(path: Path) -> None:
    assert testbed_fields.load(path).simulated().model_dump() == scenario_file.load(path).model_dump()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("peers.home.router=true", "peers.home.router: only p2ptrain testnet --stage namespaces supports this"),
        (
            "peers.home.packet_loss=0.01",
            "peers.home.packet_loss: only p2ptrain testnet --stage namespaces supports this",
        ),
        ("peers.home.returns=resumed", "peers.home.returns: only p2ptrain testnet supports resumed"),
        ("peers.home.clock_off_s=9", "peers.home.clock_off_s: only p2ptrain testnet supports this"),
        (BROKEN, "peers.home.troubles: only p2ptrain testnet supports this"),
        (PARTED, "partitions: only p2ptrain testnet --stage namespaces supports them"),
        ("bootstrap.dies_at_s=3", "bootstrap: the simulator has none; only p2ptrain testnet supports this"),
        ("begins=learned", "begins: only p2ptrain testnet supports learned"),
        ("admission=invite", "admission: only p2ptrain testnet supports invite"),
    ],
)
def test_the_simulator_refuses_by_name(plain: dict[str, Any], change: str, line: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        testbed_fields.parse(changed(plain, [change])).simulated()
    assert caught.value.problem == line


def test_limits_change_nothing_that_is_simulated(plain: dict[str, Any]) -> None:
    limited = testbed_fields.parse({**plain, "limits": {"tokens": {"at_least": 5}}})
    assert limited.simulated() == testbed_fields.parse(plain).simulated()


def test_whom_a_clock_waits_for_changes_nothing_where_it_never_stands_still(plain: dict[str, Any]) -> None:
    awaited = testbed_fields.parse(changed(plain, ["peers.home.awaited=weights"]))
    assert awaited.simulated() == testbed_fields.parse(plain).simulated()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("peers.home.name=bootstrap", "peers.bootstrap.name: bootstrap is reserved for the bootstrap"),
        ("bootstrap.returns_after_s=3", "bootstrap.returns_after_s: the bootstrap does not die; give dies_at_s"),
        (
            BROKEN.replace("1}", "1, for_s = 2}"),
            "peers.home.troubles[0].for_s: a daemon that died stays dead; leave it out",
        ),
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
        testbed_fields.parse(changed(plain, [change]))
    assert caught.value.problem.startswith(line)


def test_second_0_waits_for_nobody_who_is_not_invited(plain: dict[str, Any]) -> None:
    uninvited = ["admission=invite", "peers.home.invited=false"]
    with pytest.raises(ScenarioError, match=r"peers\.home\.arrives_at_s: second 0 waits until all peers train"):
        testbed_fields.parse(changed(plain, uninvited))
    assert not testbed_fields.parse(changed(plain, [*uninvited, "peers.home.arrives_at_s=3"])).peers[0].invited


def test_limits_are_inclusive() -> None:
    assert Limit(at_least=1, at_most=2).holds(1)
    assert Limit(at_least=1, at_most=2).holds(2)
    assert not Limit(at_least=1).holds(0.9)
    assert not Limit(at_most=2).holds(2.1)


def test_what_a_scenario_is_compared_with_has_its_own_peers_and_nothing_happens(plain: dict[str, Any]) -> None:
    assert testbed_fields.parse(plain).calm() is None
    undisturbed = {"peers": [{"name": "calm", "count": 3, "step_s": 1.0}]}
    data = changed({**plain, "undisturbed": undisturbed}, [PARTED, "bootstrap.dies_at_s=3", BROKEN])
    calm = testbed_fields.parse(data).calm()
    assert calm is not None
    assert [group.name for group in calm.peers] == ["calm"]
    assert (calm.partitions, calm.bootstrap.dies_at_s, calm.limits, calm.undisturbed) == ([], None, {}, None)
    assert calm.outer == testbed_fields.parse(plain).outer
    assert calm.peers[0].model_fields_set == {"name", "count", "step_s"}


def test_a_lie_that_needs_bytes_is_not_simulated(plain: dict[str, Any]) -> None:
    crowd = [{"count": 3, "step_s": 1.0}, {"count": 1, "step_s": 1.0, "lie": "drip"}]
    with pytest.raises(ScenarioError) as caught:
        testbed_fields.parse({**plain, "peers": crowd}).simulated()
    assert caught.value.problem == "peers[1].lie: drip needs real bytes, which only p2ptrain testnet sends"


def test_churn_needs_places_that_are_free_again(plain: dict[str, Any]) -> None:
    group = {"count": 2, "step_s": 1.0, "leaves_at_s": 5.0, "leaves_every_s": 5.0, "returns_after_s": 10.0}
    with pytest.raises(ScenarioError) as caught:
        testbed_fields.parse({**plain, "peers": [group]})
    assert caught.value.problem == "peers[0].leaves_every_s: a replacement would arrive only after its turn to leave"
    churn = testbed_fields.parse({**plain, "peers": [{**group, "returns_after_s": 0.0}]})
    with pytest.raises(ScenarioError) as caught:
        churn.simulated()
    assert caught.value.problem == "peers[0].leaves_every_s: only p2ptrain testnet supports this"


def test_no_simulated_death_waits_for_an_exchange(plain: dict[str, Any]) -> None:
    group = {"count": 2, "step_s": 1.0, "leaves_at_s": 5.0, "leaves": "killed", "amid_exchange": True}
    with pytest.raises(ScenarioError) as caught:
        testbed_fields.parse({**plain, "peers": [group]}).simulated()
    assert caught.value.problem == "peers[0].amid_exchange: only p2ptrain testnet supports this"
