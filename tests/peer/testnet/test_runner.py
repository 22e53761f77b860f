"""Children from start to end, with fakes of the bootstrap and the peers: real processes, no torch, no network."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from p2ptrain.manifest import preset
from peer.testnet import runner as conducting
from peer.testnet.plan import Plan, lay_out
from peer.testnet.processes import last_words
from peer.testnet.runner import Ending, Options, conduct
from peer.testnet.watch import Watch

BOOTSTRAP = """
import signal, sys, time
from pathlib import Path
if Path("bootstrap-fails").exists():
    sys.exit("error: the port is taken")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
home = Path(sys.argv[sys.argv.index("--home") + 1])
(home / "link.new").write_text("p2ptrain://the-link\\n")
(home / "link.new").rename(home / "join-link.txt")
time.sleep(0.3 if Path("bootstrap-dies").exists() else 120)
sys.exit(7)
"""

PEER = """
import json, os, signal, sys, time
from pathlib import Path
home = Path(sys.argv[sys.argv.index("--home") + 1])
(home / "arguments").write_text(json.dumps([*sys.argv[1:], os.environ["OMP_NUM_THREADS"]]))
does = Path("does-" + home.name)
does = does.read_text() if does.exists() else "finish"
if does == "crash":
    sys.exit("error: out of memory")
def leave(*_):
    if does != "ignore":
        (home / "left").write_text("saved")
        sys.exit(0)
signal.signal(signal.SIGTERM, leave)
with (home / "events.jsonl").open("a") as log:
    log.write(json.dumps({"kind": "progress", "fraction": 0.5, "loss": 2.0}) + "\\n")
if does != "finish":
    time.sleep(120)
"""


ALL, SHORT = Options(threads=1), Options(threads=1, seconds=0.1)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose ``python -m peer`` and ``python -m bootstrap`` are fakes."""
    (tmp_path / "peer.py").write_text(PEER)
    (tmp_path / "bootstrap.py").write_text(BOOTSTRAP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def conducted(stage: Path, options: Options = ALL) -> tuple[Plan, Ending]:
    """Return the plan and the ending."""
    plan = lay_out(stage / "out", preset("demo", "ab" * 32), ["peer-1", "peer-2"], solo=True)
    with (stage / "screen").open("w") as screen:
        return plan, asyncio.run(conduct(plan, options, Watch(plan.trainers, Console(file=screen))))


def test_it_ends_when_all_trainers_did(stage: Path) -> None:
    plan, ending = conducted(stage, Options(3, weights=Path("model"), devices="cpu,cpu"))
    assert ending.statuses == {"solo": 0, "peer-1": 0, "peer-2": 0}
    assert ending.troubles == ()
    assert not ending.cut_short
    peer, other, solo = ((trainer.home.path / "arguments").read_text() for trainer in plan.trainers)
    assert peer.startswith(
        '["p2ptrain://the-link", "--local", "--nickname", "peer-1", "--devices", "cpu,cpu", "--home"'
    )
    assert "--devices" not in other
    assert peer.endswith('"--weights", "model", "3"]')
    assert solo.startswith('["--home"')


def test_seconds_cut_it_short_and_everybody_saves(stage: Path) -> None:
    for name in ("peer-1", "peer-2", "solo"):
        (stage / f"does-{name}").write_text("train")
    plan, ending = conducted(stage, SHORT)
    assert ending.cut_short
    assert set(ending.statuses.values()) == {0}
    assert all((trainer.home.path / "left").exists() for trainer in plan.trainers)


def test_a_crash_ends_it_for_all(stage: Path) -> None:
    (stage / "does-peer-1").write_text("crash")
    (stage / "does-peer-2").write_text("train")
    _, ending = conducted(stage)
    (trouble,) = ending.troubles
    assert trouble.startswith("peer-1 ended with status 1; ")
    assert trouble.endswith("error: out of memory")
    assert "peer-2" in ending.statuses  # asked to leave, or ended before: not left running


def test_a_bootstrap_that_dies_is_a_trouble(stage: Path) -> None:
    (stage / "bootstrap-dies").touch()
    for name in ("peer-1", "peer-2"):
        (stage / f"does-{name}").write_text("train")
    _, ending = conducted(stage)
    assert any(trouble.startswith("the bootstrap ended with status 7") for trouble in ending.troubles)


def test_a_bootstrap_that_never_starts_is_a_trouble(stage: Path) -> None:
    (stage / "bootstrap-fails").touch()
    _, ending = conducted(stage)
    (trouble,) = ending.troubles
    assert trouble.startswith("the bootstrap printed no join link; ")
    assert trouble.endswith("error: the port is taken")
    assert set(ending.statuses) == {"solo"}


def test_silence_is_a_trouble(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "SILENCE_S", 0.5)
    (stage / "does-peer-1").write_text("train")
    _, ending = conducted(stage)
    assert any("has written to its event log" in trouble for trouble in ending.troubles)


def test_a_child_that_ignores_us_is_killed(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "SAVE_GRACE_S", 0.3)
    for name in ("peer-1", "peer-2"):
        (stage / f"does-{name}").write_text("ignore")
    _, ending = conducted(stage, SHORT)
    assert ending.statuses == {"solo": 0, "peer-1": -signal.SIGKILL, "peer-2": -signal.SIGKILL}


def test_last_words_are_few(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n\n" for number in range(9999)))
    assert last_words(tmp_path / "log", 2) == "line 9997\nline 9998"
    assert last_words(tmp_path / "missing") == ""


# --- the command as a process -----------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition on real processes holds."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


REAL = [
    sys.executable,
    "-P",
    "-c",
    f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); import p2ptrain.cli"
    "; import peer.testnet.command; os.environ['PYTHONPATH'] = os.getcwd(); p2ptrain.cli.main()",
]
"""Command line of the real testnet, whose children are the fakes."""


def running_testnet(stage: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """Yield a testnet in a process of its own, and its children, once all train."""
    for name in ("peer-1", "peer-2", "solo"):
        (stage / f"does-{name}").write_text("train")
    process = subprocess.Popen(
        [*REAL, "testnet", "--peers", "2", "--out", "out"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    homes = [stage / "out" / name for name in ("peer-1", "peer-2", "solo")]
    wait_for(lambda: all((home / "events.jsonl").exists() for home in homes))
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4
    return process, children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(stage: Path, number: signal.Signals) -> None:
    process, children = running_testnet(stage)
    process.send_signal(number)
    assert process.wait(60) == 130
    assert not any(child.is_running() for child in children)
    assert (stage / "out" / "peer-1" / "left").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_nothing_survives_a_killed_testnet(stage: Path) -> None:
    process, children = running_testnet(stage)
    process.kill()
    process.wait(60)
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert (stage / "out" / "peer-1" / "left").exists()
