"""Scripts carried out with fake bootstraps and peers: real processes, no torch, no network."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab import conductor
from lab import runner as conducting
from lab.plan import manifest_of
from lab.resource_monitor import ResourceMonitor
from lab.run_record import Ended, RunRecord
from lab.runner import run_script
from lab.scenario import RealGroup, parse
from lab.script import script_of
from lab.stages import Loopback, Suspension
from p2ptrain.base.errors import DeviceError
from peer.testnet import processes
from peer.testnet.plan import lay_out
from peer.testnet.processes import Child, Wrap
from peer.testnet.watch import Watch

BOOTSTRAP = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
home = Path(sys.argv[sys.argv.index("--home") + 1])
beside = sys.argv[sys.argv.index("--beside") + 1] + "/beside" if "--beside" in sys.argv else "p2ptrain://the-link"
(home / "link.new").write_text(beside + "\\n")
(home / "link.new").rename(home / "join-link.txt")
(home / "said").write_text(" ".join(sys.argv))
print("[page] http://127.0.0.1:8080/?token=drawn", flush=True)
with (home / "starts").open("a") as starts:
    starts.write("x")
time.sleep(0.5 if Path("bootstrap-crashes").exists() else 120)
sys.exit(7)
"""

PEER = """
import json, signal, sys, time
from pathlib import Path
home = Path(sys.argv[sys.argv.index("--home") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with (home / "starts").open("a") as starts:
    starts.write(" ".join(sys.argv[1:]) + "\\n")
if Path("crash-" + home.name).exists():
    sys.exit("error: out of memory")
with (home / "events.jsonl").open("a") as log:
    log.write(json.dumps({"kind": "started", "loss": 2.0 if home.name == "office-1" else 4.0}) + "\\n")
for number in range(10_000 if not Path("short").exists() else 20):
    loss = 3.9 if number < 20 or Path("dull").exists() else 2.0
    with (home / "events.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "progress", "time": time.time(), "loss": loss}) + "\\n")
    time.sleep(0.05)
"""


class Recording(Loopback):
    """Loopback that accepts partitions and records what happens to it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []

    def inside(self, host: str, who: str) -> Wrap:
        self.heard.append(("inside", host))
        return super().inside(host, who)

    def cut_link(self, host: str, is_cut: bool) -> None:
        self.heard.append(("sleeps" if is_cut else "wakes", host))

    def partition(self, key: str) -> None:
        self.heard.append(("parts", key))

    def heal(self, key: str) -> None:
        self.heard.append(("heals", key))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose ``python -m peer`` and ``python -m bootstrap`` are fakes."""
    (tmp_path / "peer.py").write_text(PEER)
    (tmp_path / "bootstrap.py").write_text(BOOTSTRAP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conducting, "TICK_S", 0.05)
    return tmp_path


def conducted(place: Path, data: dict[str, Any], stage: Recording | None = None) -> tuple[RunRecord, Recording]:
    scenario = parse(data)
    script, stage = script_of(scenario), stage or Recording()
    names = [part.name for part in script.peers]
    plan = lay_out(place / "out", manifest_of(scenario), names)
    with (place / "screen").open("w") as screen:
        watch = Watch(plan.trainers, Console(file=screen))
        record = asyncio.run(run_script(plan, script, stage, scenario.run.seconds, 1, watch))
    return record, stage


def happened(record: RunRecord) -> list[tuple[str, str]]:
    return [(done.who, done.do) for done in record.done]


def test_all_peers_leave_when_the_seconds_are_over(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    record, stage = conducted(place, tiny)
    assert record.troubles == record.missed == []
    assert record.cut_short
    assert record.lives == {name: [Ended(0, "")] for name in ("home-1", "home-2", "office-1")}
    assert ("inside", "bootstrap") in stage.heard
    start = (place / "out" / "home-1" / "starts").read_text()
    assert start.startswith("p2ptrain://the-link --local --nickname home-1 --home ")


def test_honest_peers_share_figures_and_the_page_address_is_printed(place: Path, tiny: dict[str, Any]) -> None:
    """The bootstrap has the page, and honest peers share their figures with it."""
    tiny["run"]["seconds"] = 1
    tiny["peers"][1]["lie"] = "flipped"
    stage = Recording()
    stage.page = ["--page", "8080"]
    record, _ = conducted(place, tiny, stage)
    assert record.troubles == []
    assert (place / "out" / "bootstrap" / "said").read_text().endswith(" --page 8080")
    assert "watch them at http://127.0.0.1:8080/?token=drawn" in (place / "screen").read_text()
    assert (place / "out" / "home-1" / "starts").read_text().endswith(" --share\n")


def test_second_0_may_wait_until_the_swarm_has_learned(place: Path, tiny: dict[str, Any]) -> None:
    """Check that second 0 waits for progress: some scenarios start with peers that have learned."""
    tiny["run"]["seconds"] = 1
    tiny["begins"] = "learned"
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "leaves": "killed"}
    record, _ = conducted(place, tiny)
    assert record.troubles == record.missed == []
    assert happened(record) == [("office-1", "is killed")]
    losses = [json.loads(line)["loss"] for line in (place / "out" / "office-1" / "events.jsonl").open()]
    assert losses[-1] == 2.0


def test_a_swarm_that_never_learns_is_a_trouble(
    place: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "dull").touch()
    monkeypatch.setattr(conducting, "LEARNING_S", 0.5)
    record, _ = conducted(place, tiny | {"begins": "learned"})
    assert record.troubles == ["home-1, home-2, office-1 had learned nothing after 0 s, so second 0 never came"]
    assert record.lives == {name: [Ended(0, "")] for name in ("home-1", "home-2", "office-1")}


def test_the_run_ends_when_all_peers_have_ended(place: Path, tiny: dict[str, Any]) -> None:
    (place / "short").touch()
    tiny["peers"][1] |= {"arrives_at_s": 500}
    del tiny["run"]["seconds"]
    record, _ = conducted(place, tiny)
    assert not record.cut_short
    assert record.missed == ["office-1 starts at 500 s: the run was over"]
    assert record.lives == {name: [Ended(0, "")] for name in ("home-1", "home-2")}


def test_a_killed_peer_returns(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "leaves": "killed", "returns_after_s": 0.2, "returns": "resumed"}
    record, _ = conducted(place, tiny)
    assert happened(record) == [("office-1", "is killed"), ("office-1", "starts")]
    assert record.lives["office-1"] == [Ended(-signal.SIGKILL, "is killed"), Ended(0, "")]
    assert record.troubles == []


@pytest.mark.parametrize(("awaited", "is_killed_first"), [("training", False), ("weights", True)])
def test_acts_may_happen_during_a_weight_download(
    place: Path, tiny: dict[str, Any], awaited: str, is_killed_first: bool
) -> None:
    pulling = """if home.name == "home-1":
    (home / "events.jsonl").write_text(json.dumps({"kind": "catching up"}) + "\\n")
    time.sleep(5)
for number"""
    (place / "peer.py").write_text(PEER.replace("for number", pulling))
    tiny["run"]["seconds"] = 8
    tiny["peers"][0] |= {"count": 1, "arrives_at_s": 0.1, "awaited": awaited}
    tiny["peers"][1] |= {"leaves_at_s": 0.2, "leaves": "killed"}
    record, _ = conducted(place, tiny)
    assert happened(record) == [("home-1", "starts"), ("office-1", "is killed")]
    notes = [json.loads(line) for line in (place / "out" / "home-1" / "events.jsonl").open()]
    trains_at = next(note["time"] for note in notes if note["kind"] == "progress")
    assert (record.done[-1].time < trains_at) is is_killed_first


def test_a_killed_peer_may_return_at_once(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "leaves": "killed", "returns_after_s": 0, "returns": "resumed"}
    record, _ = conducted(place, tiny)
    assert record.missed == []
    assert record.lives["office-1"] == [Ended(-signal.SIGKILL, "is killed"), Ended(0, "")]


def test_a_leaving_peer_is_replaced_by_another(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "returns_after_s": 0.2}
    record, stage = conducted(place, tiny)
    assert record.lives["office-1"] == [Ended(0, "is asked to leave")]
    assert record.lives["office-1.2"] == [Ended(0, "")]
    assert stage.heard.count(("inside", "office-1")) == 2  # on the same computer


def test_a_peer_that_ended_before_its_death_is_not_replaced(place: Path, tiny: dict[str, Any]) -> None:
    brief = PEER.replace("for number", "if home.name == 'office-1': time.sleep(0.3)\nfor number")
    (place / "peer.py").write_text(brief.replace("10_000", "(1 if home.name == 'office-1' else 10_000)"))
    tiny["run"]["seconds"] = 3
    tiny["peers"][1] |= {"leaves_at_s": 1, "leaves": "killed", "returns_after_s": 0.2}
    record, _ = conducted(place, tiny)
    assert record.missed == [
        "office-1 is killed: it has already ended",
        "office-1.2 starts: the previous peer had ended by itself",
    ]
    assert "office-1.2" not in record.lives


def test_a_started_peer_ends_with_the_run_if_its_stage_fails(
    place: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Child] = []
    start = processes.start

    async def noted(*arguments: Any) -> Child:
        begun.append(await start(*arguments))
        return begun[-1]

    def started(self: Recording, who: str, settings: RealGroup | None) -> None:
        raise DeviceError("It has no line.", "Give it one.")

    monkeypatch.setattr(processes, "start", noted)
    monkeypatch.setattr(Recording, "started", started)
    with pytest.raises(DeviceError):
        conducted(place, tiny)
    assert [child.name for child in begun] == ["bootstrap", "home-1"]
    assert all(child.process.returncode is not None for child in begun)


def test_suspended_peers_resume_leave_and_are_killed(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 2
    tiny["peers"] = [
        {"name": "home", "count": 1, "step_s": 1.0},
        {"name": "napper", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 0.1, "for_s": 0.5}]},
        {"name": "leaver", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 0.1, "for_s": 60}], "leaves_at_s": 0.5},
        {"name": "victim", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 0.1, "for_s": 60}], "leaves_at_s": 0.5}
        | {"leaves": "killed"},
        {"name": "dreamer", "count": 1, "step_s": 1.0, "freezes": [{"at_s": 0.1, "for_s": 60}]},
    ]
    record, stage = conducted(place, tiny)
    assert record.troubles == record.missed == []
    assert record.lives["napper-1"] == record.lives["dreamer-1"] == [Ended(0, "")]
    assert record.lives["leaver-1"] == [Ended(0, "is asked to leave")]
    assert record.lives["victim-1"] == [Ended(-signal.SIGKILL, "is killed")]
    for name in ("napper", "leaver", "victim", "dreamer"):
        assert stage.heard.count(("sleeps", f"{name}-1")) == stage.heard.count(("wakes", f"{name}-1")) == 1


def test_a_partition_begins_and_heals(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    data = {**tiny, "partitions": [{"at_s": 0.1, "for_s": 0.2, "sides": [["home"], ["office"]]}]}
    record, stage = conducted(place, data)
    assert [each for each in stage.heard if each[0] in ("parts", "heals")] == [("parts", "0"), ("heals", "0")]
    assert happened(record) == [("0", "the network falls apart"), ("0", "the network is whole again")]


def test_the_bootstrap_may_die_by_the_script(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    record, _ = conducted(place, {**tiny, "bootstrap": {"dies_at_s": 0.1, "returns_after_s": 0.2}})
    assert record.troubles == []
    assert happened(record) == [("bootstrap", "is killed"), ("bootstrap", "starts")]
    assert (place / "out" / "bootstrap" / "starts").read_text() == "xx"


def test_later_peers_join_by_the_new_link_of_a_returned_bootstrap(place: Path, tiny: dict[str, Any]) -> None:
    again = """beside = beside + ("/again" if (home / "starts").exists() else "")
if beside.endswith("/again"): time.sleep(0.5)
(home / "link.new").write_text("""
    (place / "bootstrap.py").write_text(BOOTSTRAP.replace('(home / "link.new").write_text(', again))
    tiny["run"]["seconds"] = 3
    tiny["peers"][1] |= {"arrives_at_s": 0.4}
    record, _ = conducted(place, {**tiny, "bootstrap": {"dies_at_s": 0.1, "returns_after_s": 0.2}})
    assert record.troubles == record.missed == []
    assert (place / "out" / "home-1" / "starts").read_text().startswith("p2ptrain://the-link --local")
    assert (place / "out" / "office-1" / "starts").read_text().startswith("p2ptrain://the-link/again --local")


def test_several_bootstraps_start_beside_each_other(place: Path, tiny: dict[str, Any]) -> None:
    tiny["run"]["seconds"] = 3
    record, stage = conducted(place, {**tiny, "bootstrap": {"count": 3, "dies_at_s": 0.1}})
    assert record.troubles == record.missed == []
    assert [host for what, host in stage.heard if what == "inside"][:3] == ["bootstrap", "bootstrap-2", "bootstrap-3"]
    said = [(place / "out" / name / "said").read_text() for name in ("bootstrap", "bootstrap-2", "bootstrap-3")]
    assert "--beside" not in said[0]
    assert said[1].endswith("--beside p2ptrain://the-link")
    assert said[2].endswith("--beside p2ptrain://the-link/beside")
    assert (place / "out" / "home-1" / "starts").read_text().startswith("p2ptrain://the-link/beside/beside --local")


def test_a_bootstrap_that_dies_by_itself_is_a_trouble(place: Path, tiny: dict[str, Any]) -> None:
    (place / "bootstrap-crashes").touch()
    record, _ = conducted(place, tiny)
    assert any(trouble.startswith("the bootstrap ended with status 7") for trouble in record.troubles)


def test_a_crash_ends_the_run(place: Path, tiny: dict[str, Any]) -> None:
    (place / "crash-office-1").touch()
    record, _ = conducted(place, tiny)
    [trouble] = record.troubles
    assert trouble.startswith("office-1 ended with status 1; ")
    assert trouble.endswith("error: out of memory")
    assert not record.cut_short
    assert set(record.lives) == {"home-1", "home-2", "office-1"}


def test_acts_after_the_end_are_missed(place: Path, tiny: dict[str, Any]) -> None:
    (place / "short").touch()
    tiny["peers"][1] |= {"freezes": [{"at_s": 60, "for_s": 1}]}
    del tiny["run"]["seconds"]
    record, _ = conducted(place, tiny)
    assert [each.split(":")[0] for each in record.missed] == [
        "office-1 falls asleep at 60 s",
        "office-1 wakes at 61 s",
    ]


def test_the_clock_stands_still_while_a_peer_starts(place: Path, tiny: dict[str, Any]) -> None:
    slow = PEER.replace("for number", "if home.name == 'office-1': time.sleep(1)\nfor number")
    (place / "peer.py").write_text(slow)
    tiny["run"]["seconds"] = 3
    tiny["peers"][0] |= {"freezes": [{"at_s": 0.2, "for_s": 0.1}]}
    tiny["peers"][1] |= {"arrives_at_s": 0.1}
    record, _ = conducted(place, tiny)
    times = {(done.who, done.do): done.time for done in record.done}
    began = json.loads((place / "out" / "office-1" / "events.jsonl").read_text().splitlines()[1])["time"]
    assert times["office-1", "starts"] < began < times["home-1", "falls asleep"]


def test_the_clock_stands_still_for_a_bounded_time(
    place: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "START_TIMEOUT_S", 0.5)
    (place / "peer.py").write_text(
        PEER.replace("for number", "if home.name == 'office-1': time.sleep(100)\nfor number")
    )
    tiny["run"]["seconds"] = 3
    tiny["peers"][1] |= {"arrives_at_s": 0.1}
    record, _ = conducted(place, tiny)
    assert record.cut_short
    assert record.lives["office-1"] == [Ended(0, "")]


@pytest.mark.parametrize("is_amid", [True, False])
def test_a_death_amid_an_exchange_waits_for_one(
    place: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_amid: bool
) -> None:
    asked = []

    async def wait_for_exchange(home: Path) -> bool:
        asked.append(home.name)
        return is_amid

    monkeypatch.setattr(conductor, "wait_for_exchange", wait_for_exchange)
    tiny["run"]["seconds"] = 2
    tiny["peers"][0] |= {"freezes": [{"at_s": 0.2, "for_s": 0.1}]}
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "leaves": "killed", "amid_exchange": True}
    record, _ = conducted(place, tiny)
    assert asked == ["office-1"]  # the others are suspended at that time
    assert (("office-1", "is killed") in happened(record)) is is_amid
    assert record.missed == ([] if is_amid else ["office-1 is killed: it was in no exchange"])


def test_churn_ends_when_a_peer_has_completed_the_run(place: Path, tiny: dict[str, Any]) -> None:
    through = PEER.replace('"loss": loss', '"loss": loss, "fraction": number / 20 if home.name == "home-1" else 0.0')
    (place / "peer.py").write_text(through)
    tiny["run"]["seconds"] = 5
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "leaves_every_s": 3, "leaves": "killed", "returns_after_s": 0}
    tiny["peers"][0] |= {"freezes": [{"at_s": 4, "for_s": 0.1}]}
    record, _ = conducted(place, tiny)
    assert record.missed == []
    assert happened(record) == [
        ("office-1", "is killed"),
        ("office-1.2", "starts"),
        *[(who, do) for do in ("falls asleep", "wakes") for who in ("home-1", "home-2")],
    ]


class Hanging(Recording):
    """Stage on which a suspension lasts until all else has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.killed, self.beaten = threading.Event(), threading.Event(), threading.Event()

    def suspend(self, who: str, pid: int) -> Suspension:
        self.begun.set()
        assert self.killed.wait(20.0)
        assert self.beaten.wait(20.0)
        return super().suspend(who, pid)

    def kill(self, who: str, pid: int) -> None:
        super().kill(who, pid)
        self.killed.set()


def test_other_acts_continue_while_a_stage_blocks(
    place: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acts on other hosts and the resource monitor continue; acts on the same host wait."""
    stage = Hanging()

    def sample(self: ResourceMonitor, now: float, pids: Sequence[int]) -> None:
        if stage.begun.is_set():
            stage.beaten.set()

    monkeypatch.setattr(ResourceMonitor, "sample", sample)
    tiny["run"]["seconds"] = 2
    tiny["peers"][0] |= {"count": 1, "freezes": [{"at_s": 0.1, "for_s": 0.1}]}
    tiny["peers"][1] |= {"leaves_at_s": 0.4, "leaves": "killed"}
    record, _ = conducted(place, tiny, stage)
    assert record.troubles == record.missed == []
    assert [(done.who, done.do) for done in sorted(record.done, key=lambda each: each.time)] == [
        ("office-1", "is killed"),
        ("home-1", "falls asleep"),
        ("home-1", "wakes"),
    ]
    assert happened(record) == [("home-1", "falls asleep"), ("home-1", "wakes"), ("office-1", "is killed")]


class Restless:
    """Suspension whose first end fails."""

    def __init__(self, suspension: Suspension) -> None:
        self.inner, self.asked = suspension, 0

    def end(self) -> None:
        self.asked += 1
        if self.asked == 1:
            raise DeviceError("The engine did not answer.", "Restart it.")
        self.inner.end()


class Failing(Recording):
    """Stage that fails at one operation."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def _perhaps(self, what: str) -> None:
        if what == self.what:
            raise DeviceError("The engine did not answer.", "Restart it.")

    def suspend(self, who: str, pid: int) -> Suspension:
        self._perhaps("suspend")
        suspension = super().suspend(who, pid)
        return Restless(suspension) if self.what == "resume" else suspension

    def kill(self, who: str, pid: int) -> None:
        self._perhaps("kill")
        super().kill(who, pid)

    def started(self, who: str, settings: RealGroup | None) -> None:
        if who == "late-1":
            self._perhaps("started")


@pytest.mark.parametrize(
    ("what", "missed"),
    [
        ("suspend", ["home-1 falls asleep: The engine did not answer", "home-1 wakes: it was not asleep"]),
        ("resume", ["home-1 wakes: The engine did not answer"]),
        (
            "kill",
            [
                "office-1 is killed: The engine did not answer",
                "office-1.2 starts: the previous peer could not be ended",
            ],
        ),
        ("started", ["late-1 starts: The engine did not answer"]),
    ],
)
def test_acts_that_a_stage_cannot_perform_are_missed_and_the_run_continues(
    place: Path, tiny: dict[str, Any], what: str, missed: list[str]
) -> None:
    tiny["run"]["seconds"] = 3
    tiny["peers"][0] |= {"count": 1, "freezes": [{"at_s": 0.1, "for_s": 0.1}]}
    tiny["peers"][1] |= {"leaves_at_s": 0.4, "leaves": "killed", "returns_after_s": 0.2}
    tiny["peers"].append({"name": "late", "count": 1, "step_s": 0.01, "arrives_at_s": 0.8})
    record, _ = conducted(place, tiny, Failing(what))
    assert record.missed == missed
    assert record.troubles == []
    assert record.cut_short
    assert len(record.done) == 5 - len(missed)
    assert record.lives["home-1"] == [Ended(0, "")]  # it resumed at the end and saved
    if what == "kill":
        assert record.lives["office-1"] == [Ended(0, "")]
        assert "office-1.2" not in record.lives
    late = record.lives["late-1"]
    assert [each.ended_by_us for each in late] == ["is asked to leave" if what == "started" else ""]


def test_a_bug_in_an_act_ends_the_run(place: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(self: Recording, who: str, pid: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Recording, "kill", kill)
    tiny["run"]["seconds"] = 30
    tiny["peers"][1] |= {"leaves_at_s": 0.1, "leaves": "killed"}
    with pytest.raises(RuntimeError, match="a bug"):
        conducted(place, tiny)
