"""Scenarios as runs: unsupported fields are rejected by name, and the run trains what the simulator trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from lab import scenario as scenarios
from lab.artifacts import Artifacts
from lab.figures import figures_of
from lab.plan import check, manifest_of
from lab.resource_monitor import FIGURES
from lab.scenario import Breakage, WireLie
from lab.script import script_of
from lab.stages import StageName
from p2ptrain.swarm import PRESENCE_LIFETIME_S
from peer.saving import SAVE_PERIOD_S
from sim.errors import ScenarioError
from sim.lm.language import description
from sim.scenario import Lie
from sim.scenario_file import changed

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").rglob("*.toml"))
CONTAINERS = Path(__file__).parent.parent.parent / "docker" / "testnet.toml"
NOTHING: dict[str, Any] = {"lives": {}, "done": [], "missed": [], "troubles": [], "wall_s": 0.0, "samples": {}}
"""Run record without any peer."""


def refused(data: dict[str, Any], stage: StageName, *changes: str) -> str:
    scenario = scenarios.parse(changed(data, changes))
    with pytest.raises(ScenarioError) as caught:
        check(scenario, script_of(scenario), stage)
    return caught.value.problem


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ('learner={kind = "bytes", parameters = 100000, tokens_per_step = 9, disagreement = 0.1}', "learner.kind"),
        ("learner.data=shards", "learner.data"),
        ("run.failed_exchanges=0.1", "run.failed_exchanges"),
        ("run.split=test", "run.split"),
        ("pace.policy=by_speed", "pace.policy"),
        ("peers.home.loss=0.1", "peers.home.loss"),
        ("peers.home.count=65", "peers: 66 in total"),
    ],
)
def test_fields_that_real_peers_do_not_support_are_rejected(tiny: dict[str, Any], change: str, field: str) -> None:
    assert refused(tiny, "namespaces", change).startswith(field)
    assert refused(tiny, "local", change).startswith(field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("peers.home.up_mbit_s=1", "peers.home.up_mbit_s"),
        ("peers.home.down_mbit_s=1", "peers.home.down_mbit_s"),
        ("peers.office.packet_loss=0.01", "peers.office.packet_loss"),
        ("peers.office.router=true", "peers.office.router"),
        ("peers.office.cores=0.5", "peers.office.cores"),
        ('peers.home.troubles=[{what = "disk_full", at_s = 1}]', "peers.home.troubles"),
        ('partitions=[{at_s = 1, for_s = 1, sides = [["home"], ["office"]]}]', "partitions"),
    ],
)
def test_fields_that_the_loopback_does_not_support_need_namespaces(
    tiny: dict[str, Any], change: str, field: str
) -> None:
    problem = refused(tiny, "local", change)
    assert problem.startswith(field)
    assert "take --stage namespaces" in problem
    scenario = scenarios.parse(changed(tiny, [change]))
    check(scenario, script_of(scenario), "namespaces")


def test_a_peer_must_start_at_second_0(tiny: dict[str, Any]) -> None:
    problem = refused(tiny, "local", "peers.home.arrives_at_s=1", "peers.office.arrives_at_s=2")
    assert problem == "peers: no peer starts at second 0; give a group arrives_at_s = 0"


def test_the_run_trains_what_the_simulator_trains(tiny: dict[str, Any]) -> None:
    scenario = scenarios.parse(tiny)
    manifest = manifest_of(scenario)
    assert manifest.model.config == description(scenario.learner).config  # type: ignore[arg-type]  # it is lm
    assert manifest.outer == scenario.outer
    assert manifest.codec == scenario.codec
    assert manifest.swarm == scenario.swarm
    assert manifest.training.tokens_per_step == scenario.learner.tokens_per_step
    assert manifest.run.tokens == scenario.run_tokens


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_all_scenarios_are_supported(path: Path) -> None:
    scenario = scenarios.load(path)
    check(scenario, script_of(scenario), "namespaces")
    assert manifest_of(scenario).outer == scenario.outer
    assert scenario.limits
    if (calm := scenario.calm()) is not None:
        check(calm, script_of(calm), "namespaces")


@pytest.mark.parametrize("path", [*SCENARIOS, CONTAINERS], ids=lambda path: path.stem)
def test_warm_up_ends_long_before_timed_scenarios_do(path: Path) -> None:
    scenario = scenarios.load(path)
    # More tokens than any peer reads, so a share of them means nothing; others end at their tokens.
    if scenario.run.outer_steps is None and "finished" not in scenario.limits:
        training = manifest_of(scenario).training
        # A newcomer's place in the schedule is visible only if there is a schedule.
        assert training.schedule == ("cosine" if path.stem == "late" else "constant")
        least = 30_000 if path.stem == "narrow_lines" else 300_000  # a larger model with short steps
        begin = sum(group.count for group in scenario.peers if group.lie is None and group.arrives_at_s == 0)
        # 7 s of small models' peers that have a core each: measured
        assert least <= training.warmup_tokens / begin <= 320_000


@pytest.mark.parametrize("path", [*SCENARIOS, CONTAINERS], ids=lambda path: path.stem)
def test_every_scenario_ends_and_misses_a_limit_if_it_hangs(path: Path) -> None:
    scenario = scenarios.load(path)
    assert scenario.run.seconds is not None
    if scenario.run.outer_steps is not None or "tokens_share" in scenario.limits:
        assert scenario.limits["finished"].at_least == scenario.limits["stayed"].at_least


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_limits_name_figures(path: Path) -> None:
    scenario = scenarios.load(path)
    peers = script_of(scenario).peers
    figures = figures_of(NOTHING, [Artifacts(peer, peer.name, [], None) for peer in peers], None, {})
    figures["bootstraps"] = {"bootstrap": dict.fromkeys(FIGURES)}
    if scenario.undisturbed is not None:
        times = {name: {"mean": 1.0, "largest": 1.0, "work": 1.0} for name, _ in scenario.named()}
        figures["compared"] = {**figures, "times_to_losses": times}
    for name in scenario.limits:
        place: Any = figures
        for key in name.split("."):
            assert key in place, name
            place = place[key]


NOT_ACTED_OUT = {
    "garbage": "random bytes for payloads. In the modular codec of these scenarios any bytes are codes, so they are as "
    "little anybody's weights as nan's, which are all 255",
}
"""Adversarial behaviours without a scenario, and why."""


def test_every_lie_and_every_failure_has_a_scenario() -> None:
    groups = [group for path in SCENARIOS for group in scenarios.load(path).peers]
    acted_out = {group.lie for group in groups if group.lie is not None}
    assert acted_out == {*get_args(WireLie), *get_args(Lie)} - NOT_ACTED_OUT.keys()
    assert set(get_args(Breakage)) == {trouble.what for group in groups for trouble in group.troubles}


LIARS = [each for each in SCENARIOS if "liars" in each.stem]


def test_adversary_scenarios_with_one_codec_share_an_undisturbed_run() -> None:
    undisturbed_runs = [calm for path in LIARS if (calm := scenarios.load(path).calm()) is not None]
    assert {calm.codec.name for calm in undisturbed_runs} == {
        "modular4",
        "int8",
    }  # modular codecs decode any bytes
    assert len({calm.model_dump_json() for calm in undisturbed_runs}) == 2


@pytest.mark.parametrize("path", LIARS, ids=lambda path: path.stem)
def test_adversary_scenarios_limit_blame_and_cost(path: Path) -> None:
    scenario = scenarios.load(path)
    assert scenario.limits["compared.peak_memory"].at_most == 1.2
    for liar in (group.name for group in scenario.peers if group.lie is not None):
        heard = [scenario.limits.get(f"peers.{liar}-1.{figure}") for figure in ("noticed", "lied")]
        assert any(limit is not None and (limit.at_least or 0) >= 1 for limit in heard), liar


@pytest.mark.parametrize("path", LIARS, ids=lambda path: path.stem)
def test_a_quarter_is_adversarial_and_the_others_are_compared_with_themselves(path: Path) -> None:
    scenario = scenarios.load(path)
    calm = scenario.calm()
    assert calm is not None
    assert [group.count for group in scenario.peers if group.lie is None] == [6] == [each.count for each in calm.peers]
    assert scenario.total_peers == 8


def test_machines_fail_while_a_checkpoint_is_due() -> None:
    scenario = scenarios.load(next(path for path in SCENARIOS if path.stem == "machine_trouble"))
    assert scenario.run.seconds is not None
    for trouble in (each for group in scenario.peers for each in group.troubles if each.for_s is not None):
        until = trouble.at_s + trouble.for_s  # type: ignore[operator]  # not None, see above
        assert trouble.at_s < SAVE_PERIOD_S - 30 < SAVE_PERIOD_S + 30 < until < 2 * SAVE_PERIOD_S - 30
        assert scenario.run.seconds > 2 * SAVE_PERIOD_S + 30  # and once more after the repair


def test_a_partition_outlasts_the_records() -> None:
    scenario = scenarios.load(next(path for path in SCENARIOS if path.stem == "partition"))
    [partition] = scenario.partitions
    assert partition.for_s > PRESENCE_LIFETIME_S
    assert scenario.run.seconds is not None
    assert scenario.run.seconds - partition.at_s - partition.for_s > PRESENCE_LIFETIME_S


def test_the_scenario_of_containers_is_supported_there() -> None:
    scenario = scenarios.load(CONTAINERS)
    check(scenario, script_of(scenario), "docker")


@pytest.mark.parametrize("change", ["peers.office.packet_loss=0.1", "peers.home.latency_s=0.1"])
def test_delay_and_loss_in_containers_need_netem(tiny: dict[str, Any], change: str) -> None:
    scenario = scenarios.parse(changed(tiny, [change]))
    check(scenario, script_of(scenario), "docker")
    with pytest.raises(ScenarioError, match="take --stage namespaces"):
        check(scenario, script_of(scenario), "docker", netem=False)


def test_amid_exchange_is_rejected_in_containers(tiny: dict[str, Any]) -> None:
    napping = "peers.home.freezes=[{at_s = 1, for_s = 1}]"
    assert "amid_exchange: stage docker" in refused(tiny, "docker", napping, "peers.home.amid_exchange=true")


@pytest.mark.parametrize("change", ["peers.home.router=true", "peers.home.clock_off_s=9"])
def test_fields_that_containers_do_not_support_need_namespaces(tiny: dict[str, Any], change: str) -> None:
    assert "take --stage namespaces" in refused(tiny, "docker", change)


def test_there_are_scenarios() -> None:
    wanted = {"kill", "leave", "freeze", "bootstrap_dies", "partition", "late", "slow_line", "routers"}
    wanted |= {"churn", "slow_among_eight", "home_lines", "narrow_lines", "machine_trouble", "wrong_clock", "suspend"}
    wanted |= {"two_bootstraps", "liars_weights", "liars_frames", "liars_calls", "soak"}
    wanted |= {"liars_shapes", "liars_endless", "liars_silence", "liars_terms", "liars_old", "liars_progress"}
    wanted |= {
        "address_changes",
        "slept",
        "clock_jumps",
        "routers_direct",
        "donor_dies",
        "early_end",
        "minority",
        "uneven_computers",
        "uneven_pairs",
        "claimed_crowd",
    }
    assert wanted <= {path.stem for path in SCENARIOS}


def test_adversaries_and_wrong_clocks_need_no_namespaces(tiny: dict[str, Any]) -> None:
    troubles = 'peers.home.troubles=[{what = "daemon_dies", at_s = 1}, {what = "no_descriptors", at_s = 2}]'
    changes = ["peers.office.lie=flood", "peers.home.clock_off_s=3600", troubles]
    scenario = scenarios.parse(changed(tiny, changes))
    check(scenario, script_of(scenario), "local")
