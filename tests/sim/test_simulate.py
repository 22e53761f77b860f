"""Whole simulations with known results."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sim.report import SimulationReport
from sim.simulate import begin, simulate


def learnt(make, *changes: str, groups=None) -> SimulationReport:
    """Run a scenario with a quadratic task."""
    return simulate(make("learner={kind = 'quadratic', parameters = 2048, noise = 0.05}", *changes, groups=groups))


def test_the_same_scenario_gives_the_same_report_and_another_seed_another(make):
    groups = [{"name": "visitors", "count": 2, "step_s": 0.9, "stays_s": 30.0, "returns_after_s": 5.0, "loss": 0.2}]
    one, same = (simulate(make(groups=groups)).model_dump(exclude={"cost"}) for _ in range(2))
    other = simulate(make("run.seed=2", groups=groups)).model_dump(exclude={"cost"})
    assert one == same
    assert one["curve"] != other["curve"]


def test_two_hundred_peers_behind_home_lines_keep_computing(make):
    """Check the goal at 100 / 20 Mbit/s: training never waits, all peers exchange, and bytes are the codec's."""
    report = simulate(
        make(
            "learner.parameters=135_000_000",
            "outer.inner_steps=30",
            "outer.fragments=16",
            "outer.fragments_per_exchange=4",
            "codec.name=modular4",
            "peers.home.count=200",
            "peers.home.arrives_over_s=30",
        )
    )
    overall = report.overall
    assert overall.peers == 200
    assert overall.utilization >= 0.999
    assert overall.solo_share <= 0.1  # the first outer step of eight: exchanges start in its middle and last as long
    assert overall.exchanges_failed <= 2 * overall.peers  # when partners leave, at the end
    # A quarter of 4.2 bits, sent about twice an outer step: as initiator and as responder.
    assert 1.8 <= overall.bits_per_parameter <= 2.4
    assert overall.bits_per_parameter <= 1.01 * overall.payload_bits_per_parameter
    assert overall.up.payload == pytest.approx(overall.down.payload)
    assert sum(overall.endings.values()) == 200


@pytest.mark.parametrize(("recipe", "parts"), [("factored_gossip", 2.0), ("factored_gossip_half", 1.5)])
def test_mix2_of_a_share_sends_that_share(make, recipe, parts):
    changes = ("outer.exchanges_per_step=0", "outer.fragments_per_exchange=2", "swarm.final_gossip_s=0")
    report = simulate(make(f"outer.recipe={recipe}", *changes))
    met = report.overall.exchanges / report.overall.outer_steps / 2  # rounds of both mixes, an exchange each
    assert met > 0.8
    assert report.overall.payload_bits_per_parameter == pytest.approx(32 * parts * met, rel=0.05)


def test_a_narrow_line_slows_its_own_peer_alone(make):
    """Check exchanges: no inner step waits, and the others exchange as often as without the narrow link."""
    narrow = {"name": "narrow", "count": 1, "step_s": 1.0, "step_jitter": 0.1, "up_mbit_s": 0.5, "down_mbit_s": 0.5}
    among = simulate(make("run.outer_steps=30", groups=[narrow]))
    assert among.overall.utilization == pytest.approx(1.0)
    assert among.groups["home"].solo_share <= 0.05
    per_peer = {name: figures.exchanges / figures.peers for name, figures in among.groups.items()}
    assert per_peer["narrow"] < 0.5 * per_peer["home"]


def test_late_comers_take_a_model_and_train_on(make):
    late = {"name": "late", "count": 3, "step_s": 1.0, "arrives_at_s": 150.0}
    report = simulate(make("run.outer_steps=30", groups=[late]))
    assert report.groups["late"].pulls == 3
    assert report.groups["late"].down.weights == pytest.approx(4e6, rel=0.01)
    assert report.groups["home"].up.weights == pytest.approx(4e6 * 3 / 6, rel=0.01)
    assert report.groups["late"].tokens < 0.8 * report.groups["home"].tokens / 2


def test_who_goes_and_comes_back_is_somebody_new(make):
    visitors = {"name": "visitors", "count": 2, "step_s": 1.0, "leaves_at_s": 60.0, "returns_after_s": 20.0}
    report = simulate(make("run.outer_steps=30", groups=[visitors]))
    assert report.groups["visitors"].peers == 4
    assert report.groups["visitors"].endings["stopped by its owner"] == 2
    assert report.groups["visitors"].pulls == 2


def test_the_killed_are_noticed_and_the_rest_goes_on(make):
    victims = {"name": "victims", "count": 6, "step_s": 1.0, "leaves_at_s": 100.0, "leaves": "killed"}
    report = simulate(make("run.outer_steps=20", groups=[victims]))
    assert report.groups["victims"].endings == {"killed": 6}
    assert report.groups["home"].outer_steps >= 6 * 20
    assert report.notes["lost"] >= 6


def test_who_sleeps_misses_its_sleep_and_nothing_else(make):
    sleepers = {"name": "sleepers", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 50.25, "for_s": 25.0}]}
    simulation = begin(make("run.outer_steps=20", groups=[sleepers]))
    simulation.world.run(until=60.0)
    (sleeper,) = (each for each in simulation.population.members if each.slot.group == "sleepers")
    before = sleeper.peer.core.counters.outer_steps, sleeper.peer.learner.tokens
    simulation.world.run(until=75.0)
    assert (sleeper.peer.core.counters.outer_steps, sleeper.peer.learner.tokens) == before
    simulation.run()
    report = simulation.report("")
    assert report.groups["sleepers"].utilization == pytest.approx(1.0)
    assert report.groups["sleepers"].tokens == report.groups["sleepers"].outer_steps * 10
    assert report.groups["sleepers"].pulls == 0


def test_who_sleeps_long_takes_the_others_weights_when_it_wakes(make):
    sleepers = {"name": "sleepers", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 50.25, "for_s": 100.0}]}
    report = learnt(make, "run.outer_steps=30", groups=[sleepers])
    assert report.notes["slept"] == 1
    assert report.groups["sleepers"].pulls == 1
    assert report.groups["sleepers"].offences == report.groups["home"].offences == 0
    assert report.curve[-1].groups["sleepers"] == pytest.approx(report.curve[-1].groups["home"], rel=0.1)


def test_failed_exchanges_are_as_many_as_the_scenario_says(make):
    report = simulate(make("run.outer_steps=60", "run.failed_exchanges=0.3", "swarm.final_gossip_s=0"))
    overall = report.overall
    share = overall.exchanges_failed / (overall.exchanges + overall.exchanges_failed)
    assert share == pytest.approx(0.3, abs=0.05)  # some more fail as peers leave
    assert report.notes["failed"] >= overall.exchanges_failed


AMONG_LIARS = "run.outer_steps=60", "peers.home.up_mbit_s=1.0", "swarm.final_gossip_s=0"


@pytest.fixture(scope="module")
def honest(make) -> SimulationReport:
    return learnt(make, *AMONG_LIARS)


@pytest.mark.parametrize("lie", ["progress", "garbage", "silent", "stalling"])
def test_a_liar_does_not_stop_the_others_from_learning(make, honest, lie):
    liar = {"name": "liar", "count": 1, "step_s": 1.0, "lie": lie}
    lied_to = learnt(make, *AMONG_LIARS, groups=[liar])
    assert lied_to.curve[-1].validation <= 1.5 * honest.curve[-1].validation
    assert lied_to.groups["home"].solo_share <= 0.1
    if lie == "garbage":
        assert lied_to.groups["home"].offences >= 1
        assert lied_to.groups["liar"].exchanges == 0
    if lie == "stalling":
        assert lied_to.groups["liar"].exchanges == 0


def test_the_curve_is_bounded_and_falls(make):
    report = learnt(make, "run.outer_steps=40", "run.points=5")
    assert 5 <= len(report.curve) <= 11
    times = [point.time_s for point in report.curve]
    assert times == sorted(times)
    assert report.curve[-1].validation < 0.5 * report.curve[0].validation
    assert report.curve[-1].validation_of_mean < report.curve[-1].validation
    assert set(report.curve[-1].groups) == {"home"}


def test_time_may_run_out(make):
    report = simulate(make("run.seconds=25"))
    assert report.simulated_s == 25.0
    assert report.ending == "run.seconds, 25.0, passed"
    assert report.overall.endings == {"still there": 6}


def test_it_tells_how_far_it_is(make):
    shares: list[float] = []
    simulate(make(), progress=shares.append)
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_the_order_of_sets_decides_nothing(make, tmp_path):
    """Check the report in processes with different hash seeds."""
    path = tmp_path / "scenario.json"
    path.write_text(
        make("outer.fragments=4", "outer.fragments_per_exchange=2", "peers.home.count=20").model_dump_json()
    )
    code = (
        "import sys, hashlib, pathlib\n"
        "from sim.scenario import Scenario\n"
        "from sim.simulate import simulate\n"
        "scenario = Scenario.model_validate_json(pathlib.Path(sys.argv[1]).read_text())\n"
        "print(hashlib.sha256(repr(simulate(scenario).model_dump(exclude={'cost'})).encode()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, path],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("recipe", "alone"), [(("outer.recipe=swarm",), 0.99), (("outer.recipe=gasloc", "outer.exchanges_per_step=0"), 0.6)]
)
def test_a_peer_on_a_slow_line_takes_part(make, recipe: tuple[str, ...], alone: float) -> None:
    """Check a tenth of the others' bandwidth: an exchange takes ten times as long, and no partner gives up."""
    line = {"step_s": 1.0, "step_jitter": 0.1}
    slow = {"name": "slow", "count": 1, "up_mbit_s": 2.0, "down_mbit_s": 2.0, **line}
    full = ("peers.home.count=7", "peers.home.up_mbit_s=20", "peers.home.down_mbit_s=20")
    report = simulate(
        make(*recipe, *full, "run.outer_steps=30", "outer.inner_steps=30", "outer.fragments=1", groups=[slow])
    )
    found, others = report.groups["slow"], report.groups["home"]
    assert found.exchanges > 0.9 * found.outer_steps
    assert found.exchanges_failed <= 3
    assert (found.solo_share or 0.0) < 0.1
    assert (others.utilization or 0.0) > alone, "who waits for partners waits for it; who does not, does not"


def test_who_trains_alone_takes_nobodys_weights(make) -> None:
    alone = ("outer.recipe=local", "outer.exchanges_per_step=0", "run.outer_steps=60")
    fast = {"name": "fast", "count": 1, "step_s": 0.1, "up_mbit_s": 20.0, "down_mbit_s": 100.0}
    report = simulate(make(*alone, groups=[fast]))
    assert report.overall.pulls == 0
    assert report.overall.up.weights == 0
    assert {name: group.outer_steps for name, group in report.groups.items()} == {"home": 6 * 60, "fast": 60}
