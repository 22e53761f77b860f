"""What is read of a peer's home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leavings import GROUP, WELL, course, figures, left

from lab.artifacts import TOLD, Artifacts, ExchangeArtifact, read_left
from lab.scenario import RealGroup
from lab.script import Part
from p2ptrain.admission import Refusal
from peer import messages


def test_a_home_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    part = Part("anna", "anna", GROUP, "anna")
    assert read_left(part, "id", tmp_path / "nowhere") == Artifacts(part, "id", [], None)
    (tmp_path / "events.jsonl").write_text('{"kind": "found"}\n{"kind": "exch')
    (tmp_path / "summary.json").write_text("torn")
    found = read_left(part, "id", tmp_path)
    assert found.count("found") == 1
    assert found.summary is None


def test_times_of_a_wrong_clock_are_put_right(tmp_path: Path) -> None:
    part = Part("anna", "anna", RealGroup(count=1, step_s=1.0, clock_off_s=3600), "anna")
    (tmp_path / "events.jsonl").write_text('{"kind": "exchanged", "time": 3605.0, "seconds": 1.0}\n{"kind": "found"}\n')
    assert read_left(part, "id", tmp_path).exchanges() == [ExchangeArtifact(4.0, 5.0, "", 0.0, False, 0)]


def test_what_owners_were_told_is_counted_by_peers(tmp_path: Path) -> None:
    words = {
        "told_not_saved": messages.line("not saved", {"what": "a checkpoint", "why": "the disk is full"}),
        "told_daemon": messages.line("p2pd died", {"why": "signal 9"}),
        "told_wrong_clock": messages.line("wrong clock", {"off_s": -3600.0, "nodes": 2}),
        "told_banned": messages.line("put out", {"why": Refusal.BANNED.value, "remedy": "Ask."}),
        "told_not_invited": f"error: This run does not let this peer in: {Refusal.NO_INVITE}.",
    }
    assert set(words) == set(TOLD)
    others = [messages.line("right clock", {}), messages.line("p2pd is back", {})]
    others.append(messages.line("put out", {"why": Refusal.REVOKED.value, "remedy": "Ask."}))
    part = Part("anna", "anna", GROUP, "anna")
    for expected in (set(words), {"told_daemon"}, {"told_banned", "told_not_invited"}, set()):
        said = [word for name, word in words.items() if name in expected]
        (tmp_path / "output.log").write_text("\n".join(map(str, [*others, *said])))
        assert read_left(part, "id", tmp_path).said == expected
    found = figures(course({"anna": [WELL]}), replace(left("anna"), said=frozenset({"told_not_saved"})), left("bert"))
    assert (found["told_not_saved"], found["told_daemon"], found["groups"]["anna"]["told_not_saved"]) == (1, 0, 1)
