"""Summary lines of event logs, without processes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from peer.home import Home
from peer.testnet import watch as watching
from peer.testnet.plan import TrainerProcess
from peer.testnet.watch import Tail, TrainerProgress, Watch, described, noted

PROGRESS = {
    "kind": "progress",
    "fraction": 0.34,
    "loss": 2.31,
    "tokens_per_s": 1203.4,
    "exchanges_ok": 12,
}


def test_a_view_follows_the_notes() -> None:
    view = noted(TrainerProgress(), {"kind": "started", "loss": 5.5})
    assert (view.begun, view.first_loss) == (False, 5.5)
    coming = noted(view, {"kind": "catching up", "peer": "12D3KooWowl"})
    assert (coming.begun, coming.catches_up) == (False, True)
    first = noted(view, {"kind": "progress", "fraction": 0.0})
    assert first.begun
    view = noted(view, PROGRESS)
    assert described({"a": view, "b": view, "c": first}) == (
        "a 34 % loss 2.310, b 34 % loss 2.310, c 0 %; 2,407 tokens/s, 24 exchanges"
    )
    assert noted(view, {"kind": "trained"}).fraction == 1.0
    assert noted(view, {"kind": "never heard of"}) == view
    assert noted(view, {}) == view


def test_a_tail_takes_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"b"')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write(': 2}\nnot json\n[3]\n{"c": 4}\n')
    assert tail.read() == [{"b": 2}, {"c": 4}]
    path.write_text('{"d": 5}\n')  # a log that was truncated at its size limit
    assert tail.read() == [{"d": 5}]


def test_the_watch_reads_what_a_peer_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PERIOD_S", 0.0)
    home, console = Home(tmp_path / "peer-1"), Console(width=120, record=True, file=io.StringIO())
    home.path.mkdir()
    watch, log = Watch([TrainerProcess("peer-1", home, PeerId("12D3KooWfox"))], console), EventLog(home.events)
    watch.refresh()
    assert not watch.all_begun
    log.note(**PROGRESS)
    for _ in range(3):
        watch.refresh()
    log.close()
    assert watch.all_begun
    assert watch.views["peer-1"].loss == 2.31
    watch.say("[brackets] stay")
    assert console.export_text().splitlines() == [
        "[testnet] peer-1 starting; 0 tokens/s, 0 exchanges",
        "[testnet] peer-1 34 % loss 2.310; 1,203 tokens/s, 12 exchanges",
        "[testnet] [brackets] stay",
    ]


def test_notes_are_json_lines(tmp_path: Path) -> None:
    """Check the format of the event log: one object a line, with the kind among its fields."""
    log = EventLog(tmp_path / "events.jsonl")
    log.note(**PROGRESS)
    log.close()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "progress"
