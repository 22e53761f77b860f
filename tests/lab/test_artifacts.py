"""Reader of a peer's home."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sample_artifacts import GROUP, WELL, artifacts, figures, record

from lab.artifacts import TOLD, Artifacts, ExchangeArtifact, read_artifacts
from lab.scenario import RealGroup
from lab.script import ScriptedPeer
from p2ptrain.admission import Refusal
from peer import messages


def test_a_home_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    part = ScriptedPeer("anna", "anna", GROUP, "anna")
    assert read_artifacts(part, "id", tmp_path / "nowhere") == Artifacts(part, "id", [], None)
    (tmp_path / "events.jsonl").write_text('{"kind": "found"}\n{"kind": "exch')
    (tmp_path / "summary.json").write_text("torn")
    found = read_artifacts(part, "id", tmp_path)
    assert found.count("found") == 1
    assert found.summary is None


def test_times_of_a_wrong_clock_are_corrected(tmp_path: Path) -> None:
    part = ScriptedPeer("anna", "anna", RealGroup(count=1, step_s=1.0, clock_off_s=3600), "anna")
    (tmp_path / "events.jsonl").write_text('{"kind": "exchanged", "time": 3605.0, "seconds": 1.0}\n{"kind": "found"}\n')
    assert read_artifacts(part, "id", tmp_path).exchanges() == [ExchangeArtifact(4.0, 5.0, "", 0.0, False, False, 0)]


def test_messages_to_owners_are_read_from_notes_and_output(tmp_path: Path) -> None:
    """Peers print a line for each of these notes, and the patterns match the printed messages."""
    notes: dict[str, dict[str, Any]] = {
        "told_daemon": {"kind": "p2pd died", "why": "signal 9"},
        "told_banned": {"kind": "put out", "why": Refusal.BANNED.value, "remedy": "Ask."},
        "told_wrong_clock": {"kind": "wrong clock", "off_s": -3600.0, "nodes": 2},
        "told_clock_jumped": {"kind": "clock jumped", "by_s": 86_400.0, "is_right": False, "nodes": 2},
        "told_network_changed": {"kind": "network changed", "cause": "slept", "seconds": 3600},
        "told_same_identity": {
            "kind": "same identity",
            "name": "Kx41ab",
            "where": "45.67.2.3:4001",
            "step": 3,
            "yields": True,
            "command": "p2ptrain",
        },
        "told_narrow_path": {"kind": "narrow path", "where": "45.67.2.3", "fragments": True, "remedies": ["a", "b"]},
    }
    words = {
        "told_not_saved": messages.line("not saved", {"what": "a checkpoint", "why": "the disk is full"}),
        "told_not_invited": f"error: This run does not let this peer in: {Refusal.NO_INVITE}.",
    }
    assert {*notes, *words} == set(TOLD)
    assert all(messages.line(note["kind"], note) for note in notes.values())
    others: list[dict[str, Any]] = [{"kind": "right clock"}, {"kind": "p2pd is back"}]
    others.append({"kind": "put out", "why": Refusal.REVOKED.value, "remedy": "Ask."})
    part = ScriptedPeer("anna", "anna", GROUP, "anna")
    for expected in (set(TOLD), {"told_daemon"}, {"told_banned", "told_not_invited"}, set()):
        noted = [*others, *(note for name, note in notes.items() if name in expected)]
        (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, noted)))
        (tmp_path / "output.log").write_text("\n".join(str(words[name]) for name in words if name in expected))
        assert read_artifacts(part, "id", tmp_path).said == expected
    found = figures(
        record({"anna": [WELL]}), replace(artifacts("anna"), said=frozenset({"told_not_saved"})), artifacts("bert")
    )
    assert (found["told_not_saved"], found["told_daemon"], found["groups"]["anna"]["told_not_saved"]) == (1, 0, 1)
