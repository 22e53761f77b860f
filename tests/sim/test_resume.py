"""An interrupted simulation goes on, and ends as if it had never stopped."""

from __future__ import annotations

import errno
import os
from array import array
from collections import Counter, defaultdict, deque
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
import torch

from p2ptrain.errors import ScenarioError
from p2ptrain.sim import snapshot
from p2ptrain.sim.resume import discard
from p2ptrain.sim.scenario import Scenario
from p2ptrain.sim.simulate import StoppedError, simulate
from p2ptrain.sim.transfers import Pipe
from p2ptrain.swarm import PeerState

LEARNERS = {
    "bytes": "learner={kind = 'bytes', parameters = 4096}",
    "quadratic": "learner={kind = 'quadratic', parameters = 4096}",
    "lm": "learner={kind = 'lm', hidden_size = 16, intermediate_size = 32, layers = 1, heads = 1, curve_sequences = 4}",
}
WEATHER = [
    {"name": "late", "count": 1, "step_s": 1.0, "arrives_at_s": 60.0},
    {"name": "asleep", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 20.0, "for_s": 30.0}]},
    {"name": "vandals", "count": 1, "step_s": 1.0, "lie": "garbage"},
]

FOLLOWING = (
    "outer.recipe=dilocox",
    "outer.exchanges_per_step=0",
    "outer.fragments=1",
    "outer.learning_rate=0.2",
    "outer.momentum=0",
    "codec.gradients=lowrank",
    "codec.rank=24",
    "learner.learning_rate=1.0",
    "learner.noise=0",
    "learner.spread=0",
    "run.outer_steps=30",
    "pace.policy=rank",
)
"""The rank falls from the seventh outer step on."""


class Stops:
    """Says stop at every so many-th question."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked % self.every == 0


@pytest.mark.parametrize(
    ("learner", "changes", "groups"),
    [
        ("bytes", ("peers.home.up_mbit_s=0.05", "run.failed_exchanges=0.1"), WEATHER),
        ("quadratic", ("peers.home.up_mbit_s=0.05", "run.failed_exchanges=0.1"), WEATHER),
        ("quadratic", ("outer.recipe=noloco", "outer.exchanges_per_step=0", "codec.gradients=topk"), []),
        ("quadratic", ("outer.recipe=swarm_both", "codec.name=modular4", "codec.gradients=lowrank"), []),
        ("quadratic", ("outer.recipe=sparseloco", "outer.exchanges_per_step=0", "outer.fragments=1"), []),
        ("quadratic", FOLLOWING, []),
        ("lm", ("run.outer_steps=2", "codec.name=modular8", "outer.fragments=1"), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_interrupted_again_and_again_it_ends_the_same(make, tmp_path, monkeypatch, learner, changes, groups):
    monkeypatch.setattr("p2ptrain.sim.simulation.SLICE_S", 0.0)  # one event, one question
    scenario = make(LEARNERS[learner], *changes, groups=groups)
    whole = simulate(scenario)
    path, stops = tmp_path / "kept", Stops(every=max(whole.events // 4, 2))
    times = 0
    while True:
        try:
            resumed = simulate(scenario, resume=path, is_stopped=stops)
            break
        except StoppedError:
            assert path.exists()
            times += 1
    assert times >= 3
    assert resumed.without_cost() == whole.without_cost()
    assert path.exists()  # the report is not saved yet


def test_it_is_kept_now_and_then_without_being_asked(make, tmp_path, monkeypatch):
    monkeypatch.setattr("p2ptrain.sim.resume.EVERY_S", 0.0)
    monkeypatch.setattr("p2ptrain.sim.resume.DEAR", 0.0)
    monkeypatch.setattr("p2ptrain.sim.simulation.SLICE_S", 0.001)
    path, seen = tmp_path / "kept", []
    simulate(make(), resume=path, progress=lambda share: seen.append(path.exists()))
    assert any(seen)
    assert path.exists()
    discard(path)
    assert not path.exists()


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("p2ptrain.files.replace", full)


def test_a_full_disk_is_told_once_and_does_not_end_a_simulation(make, tmp_path, monkeypatch):
    monkeypatch.setattr("p2ptrain.sim.resume.EVERY_S", 0.0)
    monkeypatch.setattr("p2ptrain.sim.resume.DEAR", 0.0)
    monkeypatch.setattr("p2ptrain.sim.simulation.SLICE_S", 0.001)
    path, said, scenario = tmp_path / "kept", [], make()
    fill(monkeypatch)
    done = simulate(scenario, resume=path, say=said.append)
    assert said == [f"not kept: {path} cannot be written: No space left on device; the simulation goes on"]
    assert done.without_cost() == simulate(scenario).without_cost()
    assert not path.exists()


def test_who_is_stopped_where_the_disk_is_full_keeps_what_was_kept_before(make, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    scenario = interrupted(make, path)
    before = path.read_bytes()
    fill(monkeypatch)
    with pytest.raises(ScenarioError) as caught:
        simulate(scenario, resume=path, is_stopped=lambda: True)
    assert "goes on from what was kept before" in caught.value.remedy
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(ScenarioError) as caught:
        simulate(scenario, resume=path, is_stopped=lambda: True)
    assert "begins anew" in caught.value.remedy


def interrupted(make, path: Path) -> Scenario:
    scenario = make()
    with pytest.raises(StoppedError):
        simulate(scenario, resume=path, is_stopped=lambda: True)
    return scenario


def test_what_was_kept_of_something_else_is_refused(make, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    interrupted(make, path)
    with pytest.raises(ScenarioError, match="was interrupted with another scenario"):
        simulate(make("run.seed=5"), resume=path)
    monkeypatch.setattr("p2ptrain.sim.resume._build", lambda: "another")
    with pytest.raises(ScenarioError, match="was interrupted with another build"):
        simulate(make(), resume=path)
    path.write_text("{}")
    with pytest.raises(ScenarioError, match="is no interrupted simulation"):
        simulate(make(), resume=path)


def test_what_is_damaged_is_told(make, tmp_path):
    path = tmp_path / "kept"
    scenario = interrupted(make, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ScenarioError, match="is damaged"):
        simulate(scenario, resume=path)
    with pytest.raises(ScenarioError, match="cannot be written"):
        simulate(scenario, resume=tmp_path / "absent" / "kept", is_stopped=lambda: True)


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_graph_comes_back_as_it_was():
    base = torch.arange(12.0)
    shared = ["shared"]
    generator = torch.Generator().manual_seed(4)
    graph: dict[Any, Any] = {
        "atoms": [None, True, 2**70, -3, 0.1, float("inf"), "text", b"bytes"],
        "shared": (shared, shared),
        ("a", 1): {3, 4},
        "frozen": frozenset({"x"}),
        "counted": Counter("abca"),
        "by default": defaultdict(int, {"k": 2}),
        "last": deque([1, 2], maxlen=2),
        "slice": slice(1, None, 2),
        "numbers": array("d", [0.1, 2.5]),
        "enum": PeerState.TRAINING,
        "method": shared.append,
        "views": (base, base[3:6], base.view(3, 4).T),
        "random": Random(3),
        "generator": generator,
        "dtype": torch.float16,
        "pipe": Pipe(3.0),
    }
    graph["itself"] = graph
    queue: SimpleQueue[int] = SimpleQueue()
    queue.put(7)
    graph["queue"] = queue
    del graph["method"]
    back = snapshot.load(snapshot.dump(graph))
    assert back["itself"] is back
    assert back["atoms"] == graph["atoms"]
    assert back["shared"][0] is back["shared"][1]
    for key in (("a", 1), "frozen", "counted", "by default", "last", "slice", "numbers", "enum", "dtype"):
        assert back[key] == graph[key]
        assert type(back[key]) is type(graph[key])
    assert back["last"].maxlen == 2
    assert back["by default"]["absent"] == 0
    back["views"][0][4] = -1.0
    assert back["views"][1].tolist() == [3.0, -1.0, 5.0]
    assert back["views"][2][0, 1] == -1.0
    assert back["random"].random() == graph["random"].random()
    assert torch.equal(torch.rand(3, generator=back["generator"]), torch.rand(3, generator=generator))
    assert back["queue"].get_nowait() == queue.get_nowait() == 7
    assert back["pipe"].capacity == 3.0


def test_what_cannot_be_found_again_is_not_written():
    with pytest.raises(TypeError, match="cannot be written into a snapshot"):
        snapshot.dump(lambda: None)
    with pytest.raises(TypeError, match="cannot be written into a snapshot"):
        snapshot.dump(Path("x"))


@pytest.mark.parametrize("name", [["os", "system"], ["p2ptrain.sim.resume", "absent"], ["subprocess", "run"]])
def test_names_that_are_none_of_ours_are_not_looked_up(name):
    import msgpack

    with pytest.raises(ValueError, match="no snapshot of a simulation"):
        snapshot.load(msgpack.packb([[0], [["name", *name]], []]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", bytes(100)])
def test_other_bytes_are_no_snapshot(data):
    with pytest.raises(ValueError, match="no snapshot of a simulation"):
        snapshot.load(data)
