"""Valid scenarios, and the messages to their authors for all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario_file import changed, load, parse, simulated
from sim.simulate import simulate
from sim.step_times import inner_steps

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "bench" / "scenarios").glob("*.toml"))


def problems(data: dict[str, Any], *changes: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        parse(changed(data, changes))
    return caught.value.problem.split("\n")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_scenarios(path: Path) -> None:
    assert load(path).total_peers > 1


def test_there_are_examples() -> None:
    assert {"home_lines", "rough_weather", "ten_thousand"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("outer.inner_step=3", "outer.inner_step: unknown field; did you mean outer.inner_steps?"),
        ("peers.home.up_mbits=3", "peers.home.up_mbits: unknown field; did you mean peers.home.up_mbit_s?"),
        ("lerner.kind=bytes", "lerner: unknown section; did you mean learner?"),
        ("learner.kind=byte", "learner.kind: 'byte' is not known; did you mean bytes?"),
        ("peers.home.leaves=kiled", "found 'kiled'; did you mean killed?"),
        ("peers.home.lie=brag", "peers.home.lie: input should be 'progress', 'behind', 'garbage', 'silent'"),
        ("peers.home.step_s=0", "peers.home.step_s: input should be at least 1e-06 and at most 1e+06, found 0"),
        ("peers.home.step_s=inf", "peers.home.step_s: input should be a finite number, found inf"),
        ("peers.home.count=1.5", "peers.home.count: input should be a valid integer, found 1.5"),
        ("peers.home.loss=1", "peers.home.loss: input should be at least 0 and less than 1, found 1"),
        ('peers.home.name=""', "peers[0].name: found ''; wanted: Name of the group in the report, 1 to 24 letters"),
        ("peers.home.up_mbit_s=0", "peers.home.up_mbit_s: input should be at least 1e-06 and at most 1e+09, found 0"),
        (
            "peers.home.arrives_at_s=-1",
            "arrives_at_s: input should be at least 0 and at most 1e+09, found -1",
        ),
        (
            "peers.home.leaves_at_s=0",
            "leaves_at_s: input should be greater than 0 and at most 1e+09, found 0",
        ),
        ("peers=3", "peers: input should be a list of tables of fields, found 3"),
        ("peers.home.freezes=3", "peers.home.freezes: input should be a list of tables of fields, found 3"),
        ("outer=3", "outer: input should be a table of fields, found 3"),
        ("learner=3", "learner: input should be a table of fields, found 3"),
        ("outer.recipe=swam", "outer.recipe: unknown recipe 'swam'; did you mean swarm?"),
        ("codec.name=int9", "found 'int9'; did you mean int8?"),
        ("codec.name=topk", "codec.name: input should be 'fp32', 'bf16'"),
        ("codec.block_size=48", "codec.block_size: 48 does not divide 1024"),
        ("outer.exchanges_per_step=0", "outer.exchanges_per_step: 0, and recipe swarm would train every peer alone"),
        ("codec.gradients=lowrank", "codec.gradients: lowrank, and recipe swarm mixes no pseudo-gradients"),
        ("codec.gradients=int4", "codec.gradients: int4, and recipe swarm mixes no pseudo-gradients"),
        ("codec.gradients=int8", None),
        ("outer.fragments_per_exchange=3", "outer.fragments_per_exchange: 3 exceeds outer.fragments, 2"),
        ("outer.fragments=4096", "outer.fragments: 4096 is too many for this model; at most 977"),
        ("outer.cut=layers", "outer.cut: layers, but learner.kind bytes has none; use even, or kind lm"),
        ("outer.partners=2", "outer.partners: 2, and recipe swarm has one partner at a time; set it to 1"),
        ("peers.home.count=1", "peers: a single peer has no partners; give a count of 2 or another group, or set"),
        ("run.tokens=80", "run.outer_steps: give either outer_steps or tokens"),
        ("peers.home.leaves_at_s=0.5", None),
        ("peers.home.returns_after_s=1", "peers.home.returns_after_s: no peer leaves; give leaves_at_s or stays_s"),
        (
            "peers.home.lie=silent",
            "peers: every group has a lie or keeps fragments; at least one group must be honest and train",
        ),
        ("peers.home.count=200000", "peers.home.count: input should be at least 1 and at most 100000, found 200000"),
        (
            "peers.home.freezes=[{at_s = 5, for_s = 9}, {at_s = 10, for_s = 1}]",
            "peers.home.freezes: two of them overlap",
        ),
    ],
)
def test_what_is_wrong_is_told_in_a_line(basic: dict[str, Any], change: str, line: str | None) -> None:
    if line is None:
        parse(changed(basic, (change,)))
        return
    assert any(line in problem for problem in problems(basic, change)), problems(basic, change)


def test_one_peer_is_enough_where_nobody_exchanges(basic: dict[str, Any]) -> None:
    alone = ("outer.recipe=local", "outer.exchanges_per_step=0", "peers.home.count=1")
    assert simulate(parse(changed(basic, alone))).overall.peers == 1


@pytest.mark.parametrize("count", [6, 2])
def test_nobody_meets_more_at_once_than_there_are(basic: dict[str, Any], count: int) -> None:
    planned = ("outer.recipe=gasloc", "outer.exchanges_per_step=0", "outer.partners=6", f"peers.home.count={count}")
    assert problems(basic, *planned) == [f"outer.partners: 6 is too many for {count} peers"]


def test_a_wrong_field_among_groups_is_named_by_its_group_or_counted_from_zero(basic: dict[str, Any]) -> None:
    basic["peers"].append({"name": "away", "count": 1, "step_s": -1.0})
    assert problems(basic) == ["peers.away.step_s: input should be at least 1e-06 and at most 1e+06, found -1.0"]
    basic["peers"][1].pop("name")
    assert problems(basic) == ["peers[1].step_s: input should be at least 1e-06 and at most 1e+06, found -1.0"]
    basic["peers"][1]["name"] = "home"
    assert problems(basic) == ["peers[1].step_s: input should be at least 1e-06 and at most 1e+06, found -1.0"]


def test_names_are_given_once_and_missing_ones_are_numbers(basic: dict[str, Any]) -> None:
    basic["peers"] += [{"count": 1, "step_s": 1.0}, {"name": "home", "count": 1, "step_s": 1.0}]
    assert problems(basic) == ["peers[2].name: home is taken"]
    basic["peers"][2].pop("name")
    assert [name for name, _ in parse(basic).named()] == ["home", "peers-2", "peers-3"]


def test_a_learner_that_diverges_is_refused_with_the_bound(basic: dict[str, Any]) -> None:
    basic["learner"] = {"kind": "quadratic", "largest_curvature": 4.0, "learning_rate": 0.5}
    basic["outer"]["fragments_per_exchange"] = 1
    (line,) = problems(basic)
    assert line.endswith("it must be below 0.5")


def test_who_leaves_before_coming_is_refused(basic: dict[str, Any]) -> None:
    basic["peers"][0] |= {"arrives_at_s": 9.0, "leaves_at_s": 9.0}
    assert problems(basic) == ["peers.home.leaves_at_s: 9.0 is not after arrives_at_s, 9.0"]


def test_changes_reach_every_field(basic: dict[str, Any]) -> None:
    changes = ("outer.momentum = 0.9", "peers.home.count=7", "peers[0].step_s=2.5", "codec.name=int8", "run.seed=3")
    scenario = parse(changed(basic, changes))
    assert (scenario.outer.momentum, scenario.peers[0].count, scenario.peers[0].step_s) == (0.9, 7, 2.5)
    assert (scenario.codec.name, scenario.run.seed) == ("int8", 3)
    assert basic["outer"]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("outer.momentum", "'outer.momentum' is not of the form KEY=VALUE."),
        ("=3", "'=3' is not of the form KEY=VALUE."),
        ("peers.away.count=3", "peers.away.count: there is no away; there are home, [0] to [0]."),
        ("peers[1].count=3", "peers[1].count: there is no [1]; there are home, [0] to [0]."),
        ("run.seed.x=3", "run.seed.x: x cannot be set: the path leads into a value."),
        ("run.seed.x.y=3", "run.seed.x.y: x cannot be set: the path leads into a value."),
    ],
)
def test_changes_that_lead_nowhere(basic: dict[str, Any], change: str, problem: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        changed(basic, (change,))
    assert caught.value.problem == problem


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(tmp_path / "absent.toml")
    file = tmp_path / "broken.toml"
    file.write_text("[run\n")
    with pytest.raises(ScenarioError, match="not valid TOML"):
        load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioError, match="cannot be read: it is not UTF-8 text"):
        load(file)
    file.write_text("# nothing\n")
    with pytest.raises(ScenarioError, match="run: missing"):
        load(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = " + "[" * 5000, "is not valid TOML: it is nested too deeply"),
        ("x = " + "9" * 5000, "is not valid TOML: a number has thousands of digits"),
        (".".join("x" * 5000) + " = 1", "is not (a scenario|valid TOML): it is nested too deeply"),
    ],
)
def test_files_that_break_the_parser(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "extreme.toml"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=problem):
        load(file)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_changes_that_break_the_parser(basic: dict[str, Any], value: str) -> None:
    with pytest.raises(ScenarioError, match=r"outer\.inner_steps: input should be a valid integer, found"):
        parse(changed(basic, [f"outer.inner_steps={value}"]))


def test_the_end_in_tokens(basic: dict[str, Any]) -> None:
    assert parse(basic).run_tokens == 6 * 80, "of six peers"
    alone = {**basic, "outer": basic["outer"] | {"recipe": "local", "exchanges_per_step": 0}}
    assert parse(alone).run_tokens == 80
    del basic["run"]["outer_steps"]
    basic["run"]["tokens"] = 85
    assert parse(basic).run_tokens == 85
    basic["run"]["tokens"] = 9
    assert problems(basic) == ["run.tokens: 9 ends the run before its first outer step, which takes 10 tokens"]


def steps(scenario: Scenario) -> list[int]:
    """Return H of each group; a payload takes 5/3 inner steps at 20 Mbit/s."""
    return [inner_steps(scenario, group, payload_bytes=round(5 / 3 * 2.5e6)) for group in scenario.peers]


def test_how_many_inner_steps_each_makes(make) -> None:
    slow = {"name": "slow", "count": 1, "step_s": 4.0, "up_mbit_s": 20.0}
    narrow = {"name": "narrow", "count": 1, "step_s": 1.0, "up_mbit_s": 2.0}
    assert steps(make("outer.inner_steps=30", groups=[slow, narrow])) == [30, 30, 30]
    assert steps(make("outer.inner_steps=30", "pace.policy=by_speed", groups=[slow, narrow])) == [30, 8, 30]
    assert steps(make("outer.inner_steps=30", "pace.policy=straggler", groups=[slow, narrow])) == [30, 30, 15]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("peers.home.router=true", "peers.home.router"),
        ("peers.home.cores=0.5", "peers.home.cores"),
        ("peers.home.returns=resumed", "peers.home.returns"),
        ('peers.home.troubles=[{what = "daemon_dies", at_s = 1}]', "peers.home.troubles"),
        ("partitions=[]", "partitions"),
        ("bootstrap.dies_at_s=3", "bootstrap"),
        ("admission=invite", "admission"),
    ],
)
def test_fields_of_a_testnet_are_refused_by_name(basic: dict[str, Any], change: str, field: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        simulated(changed(basic, [change]))
    assert caught.value.problem == f"{field}: only p2ptrain testnet supports this"


def test_limits_change_nothing_that_is_simulated(basic: dict[str, Any]) -> None:
    limited = changed({**basic, "limits": {"tokens": {"at_least": 5}}}, ["peers.home.awaited=weights"])
    assert simulated(limited) == basic
