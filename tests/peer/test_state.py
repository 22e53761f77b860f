"""A peer's state for observers: notes folded into a view, current figures, and the report to others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.tasks import TaskFigures
from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.page.memory import PageMemory
from p2ptrain.page.view import MOST_PEERS, RunFacts
from p2ptrain.ports import HeldOutLoss
from p2ptrain.receipts import Receipt
from p2ptrain.swarm import PeerState, Presence
from peer.held_out_reader import HeldOutReader
from peer.messages import line, without_places
from peer.session_recorder import SessionRecorder
from peer.sharing import Sharing
from peer.state import FAILURES, SHAREABLE, Sources, StatusView

ME, OTHER = PeerId("12D3KooWme"), PeerId("12D3KooWother")
CROWD = PeerId("12D3KooWcrowd")
FIGURES = {
    "step": 3,
    "progress": 300.0,
    "fraction": 0.3,
    "loss": 2.0,
    "val_loss": 2.5,
    "tokens": 310,
    "tokens_per_s": 50.0,
    "swarm_tokens_per_s": 150.0,
    "remaining_s": 60.0,
    "shortened_s": None,
    "exchanges_ok": 2,
    "exchanges_failed": 1,
    "blocked_share": 0.01,
}
EXCHANGED = {"peer": OTHER, "seconds": 0.5, "sent_bytes": 10, "received_bytes": 20, "distance": 0.2}


@pytest.fixture
def state() -> StatusView:
    state = StatusView(ME, "fox", lambda: ("training", ""), wall=lambda: 1000.0)
    state.set_sources(Sources(lambda: FIGURES, lambda: (5.0, 6.0), lambda: (100, 200)))
    return state


NUMBERS = {
    "seconds": 1.0,
    "step": 1,
    "port": 1,
    "off_s": 1.0,
    "nodes": 1,
    "micro_batch": 2,
    "name": "Kx41ab",
    "yields": True,
    "command": "p2ptrain",
    "fragments": False,
    "remedies": ["a", "b"],
}
"""Fields of failures that name no place."""


def test_before_there_is_a_trainer_it_says_what_the_owner_is_told() -> None:
    document = StatusView(ME, "fox", lambda: ("starting", "it looks around")).document()
    assert (document["state"], document["why"]) == ("starting", "it looks around")
    assert json.loads(json.dumps(document, allow_nan=False)) == document | {"peers": []}


def test_exchanges_are_kept(state: StatusView) -> None:
    state.on_note("exchanged", EXCHANGED)
    state.on_note("exchanged", {**EXCHANGED, "relay": "somebody", "distance": 0.4})
    state.on_note("skipped", {"peer": OTHER, "why": "busy"})
    document = state.document()
    first, second = document["exchanges"]
    assert first == {
        "n": 1,
        "at": 1000.0,
        "a": ME,
        "b": OTHER,
        "seconds": 0.5,
        "bytes": 30,
        "distance": 0.2,
        "path": "direct",
    }
    assert (second["n"], second["path"]) == (2, "relayed")
    assert document["figures"]["disagreement"] == pytest.approx(0.3)
    assert document["disagreement"] == [(300.0, 1000.0, 0.2), (300.0, 1000.0, pytest.approx(0.3))]


def test_failures_are_told_in_a_line(state: StatusView) -> None:
    state.on_note("failed", {"peer": OTHER, "why": "it \x1b[2J hung\nup"})
    [failure] = state.document()["failures"]
    assert failure["line"].isprintable()
    assert "hung" in failure["line"]


def test_every_failure_has_a_line_for_people() -> None:
    fields = dict.fromkeys(("why", "peer", "what", "remedy", "where", "path"), "x")
    for kind in FAILURES:
        shown = line(kind, {**fields, **NUMBERS})
        assert shown is not None, kind


def test_curves_checkpoints_and_samples(state: StatusView) -> None:
    state.on_note("started", {"device": "cpu", "parameters": 5, "loss": 5.5, "progress": 50.0})
    state.on_note("progress", {"progress": 100.0, "loss": 4.0})
    state.on_note("progress", {"progress": 120.0})  # before the first outer step
    state.on_note("held out", {"progress": 100.0, "loss": 4.5, "step": 1})
    state.on_note("saved", {"path": "somewhere"})
    state.on_note("sample", {"step": 1, "text": "To be"})
    document = state.document()
    [curve] = document["curves"]
    assert (curve["peer"], curve["name"]) == (ME, "fox")
    assert curve["train"] == [(100.0, 1000.0, 4.0)]
    assert curve["held_out"] == [(50.0, 1000.0, 5.5), (100.0, 1000.0, 4.5)]
    assert document["checkpoints"] == [{"n": 1, "at": 1000.0, "peer": ME, "step": 3}]
    assert document["sample"]["text"] == "To be"


def test_who_is_here(state: StatusView) -> None:
    presence = Presence(
        OTHER, RunId("5" * 64), ("/ip4/1.2.3.4/tcp/5",), PeerState.TRAINING, 7, 700.0, True, "hen\x1b", 990, 75
    )
    state.update_peers([presence], lambda peer: "")
    own, other = state.document()["peers"]
    assert (own["id"], own["path"], own["up"], own["tokens"]) == (ME, "here", 5.0, 310)
    assert (other["nickname"], other["state"], other["step"], other["age_s"]) == ("hen", "training", 7, 10.0)
    assert other["path"] == "direct"
    assert other["loss"] is None
    state.update_peers([], lambda peer: "")
    assert [each["state"] for each in state.document()["peers"]] == ["training", "gone"]
    assert state.document()["total_peers"] == 1
    state.update_peers([presence], lambda peer: "relayed")
    assert state.document()["peers"][1]["path"] == "relayed"


def test_what_it_tells_a_watcher(state: StatusView) -> None:
    state.on_note("exchanged", EXCHANGED)
    state.on_note("exchanged", EXCHANGED)
    row, exchanges = state.report(1)
    assert row["tokens"] == 310
    assert exchanges == [["exchange", 2, 1000.0, OTHER, 0.5, 30, 0.2, "direct"]]
    state.on_note("failed", {"peer": OTHER, "why": "it hung"})
    state.on_note("saved", {"path": "x"})
    state.on_note("sample", {"step": 1, "text": "To be\nor\x1b not" * 100})
    row, news = state.report(2)
    assert [each[:2] for each in news] == [["failure", 3], ["checkpoint", 4]]
    assert len(row["sample"]) == 600
    assert row["sample"].startswith("To be\nor  not")


def test_others_hear_nothing_of_the_owners_computer_and_network(state: StatusView) -> None:
    """Check that paths, names and private addresses stay here: a bootstrap would publish them."""
    places = "/home/alice.smith/x 192.168.1.23 192.168.1.23:4001 /ip4/192.168.1.23/tcp/4 fe80::1%eth0 [fd00::1]:80 ~/x"
    fields = dict.fromkeys(("why", "what", "remedy", "where", "path", "own"), f"dial tcp {places} timed out")
    for kind in sorted(FAILURES):
        state.on_note(kind, {**fields, **NUMBERS, "peer": OTHER})
    news = state.report(0)[1]
    assert len(news) == len(SHAREABLE)
    for secret in ("alice", "192.168", "fe80", "fd00", "~"):
        assert secret not in json.dumps(news), secret
        assert secret in json.dumps(state.document()["failures"]), "the owner sees it"
    assert "dial tcp … … … … … … … timed out" in news[0][3]


def test_words_that_look_like_places_are_told() -> None:
    said = "[exchange] exchange with AbCdEf failed: 5 kB/s, .4 s, (1/2), 1.2.3, and/or: no"
    assert without_places(said) == said


def test_a_quoted_path_with_spaces_is_a_place() -> None:
    assert without_places("'/home/me/my runs/x' cannot be written") == "… cannot be written"


def test_a_host_is_no_word_where_a_sentence_ends_with_it() -> None:
    said = "no answer from laptop.fritz.box. Again laptop.fritz.box.: none"
    assert without_places(said) == "no answer from …. Again ….: none"


def test_a_watcher_of_the_process_before_hears_of_this_one(state: StatusView) -> None:
    """Check serials after a restart: a serial that this process never issued belongs to the one before."""
    state.on_note("exchanged", EXCHANGED)
    assert [each[1] for each in state.report(5000)[1]] == [1]
    assert state.report(1)[1] == []


def test_held_out_losses_are_noted_with_the_progress_they_were_read_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: StatusView
) -> None:
    """Check losses at the start of a session, which may be in the middle of the run, and after the final gossip."""
    monkeypatch.setattr("peer.session_recorder.checkpoint.save", lambda *arguments: tmp_path)
    log = MemoryLog()
    parts = {
        "learner": SimpleNamespace(
            tokens=0,
            progress=700.0,
            step=7,
            changes=0,
            ended=False,
            blocked_s=0.0,
            state_dict=lambda: ({"slow": ()}, {}),
            at_slow=lambda tell: tell(),
        ),
        "task": SimpleNamespace(
            figures=TaskFigures(parameter_count=5),
            held_out_loss=lambda *_: HeldOutLoss(2.0, 16, 16),
        ),
        "home": SimpleNamespace(trained=tmp_path, summary=tmp_path / "summary.json", foreign_tokens=lambda: 0),
        "checkpoints": SimpleNamespace(digest=None),
        "notebook": log,
        "me": ME,
    }
    corpus = SimpleNamespace(held_out_tokens=64, sequence_length=16)
    parts["losses"] = HeldOutReader(*cast(Any, (parts["learner"], parts["task"], corpus, log)))
    names = ("home", "checkpoints", "me", "run", "nickname", "learner", "task", "losses")
    names = (*names, "run_tokens", "notebook")
    record = SessionRecorder(**cast(Any, {name: parts.get(name) for name in names}))
    record.begin()
    record.training_ended()
    record.learner.ended, record.learner.changes, record.saver._saved = True, 1, 1
    record.conclude()
    for kind, fields in log.notes:
        state.on_note(kind, fields)
    [curve] = state.document()["curves"]
    assert curve["held_out"] == [(700.0, 1000.0, 2.0)] * 2


async def opened(sharing: Sharing, log: MemoryLog) -> None:
    """Open the page, and end it at once."""
    sharing.open(asyncio.create_task, log)


def test_the_log_does_not_get_the_token(state: StatusView) -> None:
    """Check that the log has no token, since others may read it; the terminal shows the whole address."""
    log, said = MemoryLog(), list[str]()
    showing = Sharing(state, cast(Any, None), ListenAddress("0.0.0.0", 0, "secret"), False, said.append)
    asyncio.run(opened(showing, log))
    assert "secret" not in str(log.notes)
    assert [kind for kind, _ in log.notes] == ["page"]
    assert said[0].endswith("/?token=secret")
    asyncio.run(opened(Sharing(state, cast(Any, None), ListenAddress(), False, said.append), log))
    assert len(said) == 1


def test_figures_and_state(state: StatusView) -> None:
    document = state.document()
    assert document["state"] == "training"
    assert document["figures"] == {
        "tokens": 310,
        "tokens_per_s": 50.0,
        "fraction": 0.3,
        "swarm_tokens_per_s": 150.0,
        "remaining_s": 60.0,
        "blocked_share": 0.01,
        "exchanges": 2,
        "failed": 1,
        "loss": 2.0,
        "held_out": 2.5,
        "up": 5.0,
        "down": 6.0,
        "sent_bytes": 100,
        "received_bytes": 200,
    }
    own = document["peers"][0]
    assert (own["sent_bytes"], own["received_bytes"], own["blocked_share"]) == (100, 200, 0.01)


def test_its_line_is_watched_whether_anybody_looks_or_not(state: StatusView) -> None:
    """Check that traffic is sampled without an open page: the page shows the last hour when it is opened."""
    for _ in range(3):
        state.update_peers([], lambda peer: "")
    assert state.document()["traffic"] == [(1000.0, 5.0, 6.0)] * 3


def test_of_a_large_swarm_it_says_how_many_there_are(state: StatusView) -> None:
    """Check the number of peers, also if not all are shown."""
    records = [
        Presence(PeerId(f"12D3KooW{n}"), RunId("5" * 64), (), PeerState.TRAINING, 7, 700.0, True, "hen", 990, 75)
        for n in range(2 * MOST_PEERS)
    ]
    state.update_peers(records, lambda peer: False)
    document = state.document()
    assert document["total_peers"] == 2 * MOST_PEERS + 1
    assert len(document["peers"]) == MOST_PEERS
    assert document["peers"][0]["id"] == ME


# --- what the page remembers -----------------------------------------------------------------------------------------


def receipt(tokens: int, peer: PeerId = ME, partner: PeerId = OTHER) -> Receipt:
    return Receipt(peer, partner, 10, 900, 3, tokens, 4, 100, 100, 0, b"s" * 64)


def rows_of(state: StatusView) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in state.document()["contributions"]["rows"]}


def test_contributions_are_its_own_and_those_that_partners_claimed(tmp_path: Path) -> None:
    """Check own tokens without those of an earlier identity, a partner's claim, and that a restart keeps both."""
    figures = {**FIGURES, "tokens": 310, "trained_s": 7200.0}
    state = StatusView(ME, "fox", lambda: ("training", ""), wall=lambda: 1000.0)
    state.set_sources(Sources(lambda: figures, lambda: (5.0, 6.0), lambda: (100, 200), foreign_tokens=10))
    state._view.run = RunFacts(run_tokens=1000)
    state.remember(PageMemory("run", tmp_path))
    state.contributed(receipt(280), [receipt(150, OTHER, ME), receipt(10**9, CROWD, ME)])
    state.on_note("sample", {"step": 3, "progress": 300.0, "text": "To be"})
    rows = rows_of(state)
    assert [rows[ME][name] for name in ("tokens", "signed_tokens", "signers", "trained_s")] == [300, 280, 1, 7200.0]
    assert [rows[OTHER][name] for name in ("tokens", "signed_tokens", "trained_s")] == [150, 150, None]
    assert rows[CROWD]["tokens"] == 150  # what the others leave of twice the progress
    state.on_note("saved", {})

    again = StatusView(ME, "fox", lambda: ("starting", ""), wall=lambda: 2000.0)
    again.remember(PageMemory.load(tmp_path, "run"))
    assert rows_of(again)[ME]["tokens"] == 300
    assert again.document()["sample"]["text"] == "To be"
    assert [each["tokens"] for each in again.document()["samples"]] == [300.0]


def test_others_get_its_contribution_with_the_newest_receipt(state: StatusView) -> None:
    state.contributed(None, [])
    assert "receipt" not in state.report(0)[0]
    ours = receipt(280)
    state.contributed(ours, [])
    row = state.report(0)[0]
    assert (row["contributed"], row["receipt"]) == (310, ours.encode())


def test_a_full_disk_takes_nothing_from_the_page(state: StatusView, tmp_path: Path) -> None:
    state.remember(PageMemory("run", tmp_path / "missing"))
    state.on_note("sample", {"step": 3, "text": "To be"})
    assert state.document()["sample"]["text"] == "To be"
