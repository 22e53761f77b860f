"""Summary lines of event logs, without processes."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import EventLog
from peer.home import Home
from peer.testnet.plan import TrainerProcess
from peer.testnet.watch import Tail, TrainerProgress, Watch, described, noted

NAMES = {PeerId("12D3KooWowl"): "peer-2"}
PROGRESS = {
    "kind": "progress",
    "fraction": 0.34,
    "loss": 2.31,
    "tokens_per_s": 1203.4,
    "exchanges_ok": 12,
}


def test_a_view_follows_the_notes() -> None:
    view = noted(TrainerProgress(), {"kind": "started", "loss": 5.5}, NAMES)
    assert (view.begun, view.last) == (False, "training")
    coming = noted(view, {"kind": "catching up", "peer": "12D3KooWowl"}, NAMES)
    assert (coming.begun, coming.catches_up) == (False, True)
    first = noted(view, {"kind": "progress", "fraction": 0.0}, NAMES)
    assert first.begun
    assert described(first) == "training"  # no loss before the first outer step
    view = noted(view, PROGRESS, NAMES)
    assert view.begun
    assert described(view) == "34 %, loss 2.310, 1,203 tokens/s, 12 exchanges; training"
    exchanged = {"kind": "exchanged", "peer": "12D3KooWowl", "seconds": 0.012, "sent_bytes": 4e5, "received_bytes": 7e5}
    view = noted(view, exchanged, NAMES)
    assert (view.exchanges, view.last) == (13, "exchanged with peer-2: 12 ms, 1.1 MB")
    view = noted(view, {"kind": "skipped", "peer": "12D3KooWunknown", "why": "busy"}, NAMES)
    assert view.last == "skipped nknown: busy"
    assert noted(view, {"kind": "trained"}, NAMES).fraction == 1.0
    assert noted(view, {"kind": "never heard of"}, NAMES) == view
    assert noted(view, {}, NAMES) == view


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


def watched(tmp_path: Path, *, terminal: bool) -> tuple[Watch, EventLog]:
    home = Home(tmp_path / "peer-1")
    home.path.mkdir()
    console = Console(width=120, force_terminal=terminal, record=True, file=(tmp_path / "screen").open("w"))
    return Watch([TrainerProcess("peer-1", home, PeerId("12D3KooWfox"))], console), EventLog(home.events)


def test_the_watch_reads_what_a_peer_notes(tmp_path: Path) -> None:
    watch, log = watched(tmp_path, terminal=False)
    with watch:
        watch.refresh()
        assert not watch.all_begun
        log.note(**PROGRESS)
        watch.refresh()
        assert watch.all_begun
        assert watch.views["peer-1"].loss == 2.31
        watch.say("[brackets] stay")
    log.close()
    watch.console.file.close()
    text = watch.console.export_text()
    assert "[testnet] [brackets] stay" in text


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    watch, log = watched(tmp_path, terminal=True)
    with watch:
        log.note(**PROGRESS)
        log.note("exchanged", peer="12D3KooWowl", seconds=0.1)
        watch.refresh()
    log.close()
    watch.console.file.close()
    text = watch.console.export_text()
    assert "peer-1" in text
    assert "34%" in text
    assert "loss 2.31" in text


def test_notes_are_json_lines(tmp_path: Path) -> None:
    """Check the format of the event log: one object a line, with the kind among its fields."""
    log = EventLog(tmp_path / "events.jsonl")
    log.note(**PROGRESS)
    log.close()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "progress"
