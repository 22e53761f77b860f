"""The swarm as a bootstrap shows it, from records and from what peers tell; strangers' words are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bootstrap.swarm_view import SwarmView
from p2ptrain.ids import PeerId
from p2ptrain.manifest import SignedManifest, create_run, load_run, sign_run
from p2ptrain.swarm import PeerState, Presence

A, B = PeerId("12D3KooWaaaa"), PeerId("12D3KooWbbbb")
ROW: dict[str, Any] = {
    "device": "cpu",
    "tokens": 300,
    "tokens_per_s": 40.0,
    "loss": 2.0,
    "held_out": 2.1,
    "disagreement": 0.01,
    "exchanges": 5,
    "failed": 1,
    "up": 10.0,
    "down": 20.0,
}


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> SignedManifest:
    run = tmp_path_factory.mktemp("run") / "run"
    create_run(run, "demo")
    sign_run(run)
    return load_run(run)


@pytest.fixture
def view(signed: SignedManifest) -> SwarmView:
    view = SwarmView(signed, wall=lambda: 1000.0)
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], None)
    return view


def presence(signed: SignedManifest, peer: PeerId, name: str) -> Presence:
    return Presence(peer, signed.run_id, ("/ip4/1.2.3.4/tcp/5",), PeerState.TRAINING, 7, 700.0, name, 990.0, 75.0)


def exchange(serial: int, partner: str, **changes: Any) -> list[Any]:
    fields = {
        "n": serial,
        "at": 999.0,
        "partner": partner,
        "seconds": 0.5,
        "bytes": 1000,
        "distance": 0.1,
        "path": "direct",
    }
    return ["exchange", *(fields | changes).values()]


def test_records_alone_show_who_is_here(view: SwarmView, signed: SignedManifest) -> None:
    document = view.document()
    assert document["total_peers"] == 2
    assert [(row["nickname"], row["state"], row["age_s"], row["path"]) for row in document["peers"]] == [
        ("fox", "training", 10.0, "direct"),
        ("hen", "training", 10.0, "direct"),
    ]
    assert all(row["loss"] is None for row in document["peers"])
    assert document["run"]["id"] == signed.run_id
    json.dumps(document, allow_nan=False)


def test_what_peers_tell_is_shown_and_summed_up(view: SwarmView, signed: SignedManifest) -> None:
    view.told(A, ROW, [])
    view.told(B, {**ROW, "loss": 3.0}, [])
    view.meet([presence(signed, A, "fox"), presence(signed, B, "hen")], 500)
    document = view.document()
    assert document["total_peers"] == 500
    assert document["peers"][0]["device"] == "cpu"
    assert document["figures"]["tokens"] == 600
    assert document["figures"]["loss"] == 2.5
    assert document["figures"]["tokens_per_s"] == 80.0
    assert {each["peer"]: each["train"] for each in document["curves"]} == {
        A: [(700.0, 1000.0, 2.0)],
        B: [(700.0, 1000.0, 3.0)],
    }
    assert document["traffic"] == [(1000.0, 20.0, 40.0)]


def test_an_exchange_that_both_tell_of_is_shown_once(view: SwarmView) -> None:
    events: list[dict[str, Any]] = []
    view.on_event(events.append)
    view.told(A, ROW, [exchange(1, B)])
    view.told(B, ROW, [exchange(4, A)])
    assert [(each["a"], each["b"]) for each in events] == [(A, B)]
    view.told(B, ROW, [exchange(5, "12D3KooWzzzz", path="relayed")])  # of whom nothing is known
    assert [(each["a"], each["path"]) for each in events] == [(A, "direct"), (B, "relayed")]


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {"n": 1},
        exchange(1, B)[:7],
        exchange(1, B)[1:],
        ["gossip", *exchange(1, B)[1:]],
        exchange(1, B, at="now"),
        exchange(1, B, seconds=-1.0),
        exchange(1, B, bytes=float("inf")),
        exchange(0, B),
        [*exchange(1, B)[:3], 7, 0.5, 1000, 0.1, "direct"],
    ],
)
def test_nonsense_about_exchanges_is_dropped(view: SwarmView, told: Any) -> None:
    view.told(A, ROW, [told])
    assert view.document()["exchanges"] == []


def test_failures_checkpoints_and_a_text_are_shown(view: SwarmView) -> None:
    events: list[dict[str, Any]] = []
    view.on_event(events.append)
    news = [["failure", 3, 999.0, "it\x1b[2J hung"], ["checkpoint", 4, 999.0, 12], ["failure", 5, 999.0, 7]]
    view.told(A, {**ROW, "sample": "To be\n\x1b[2J"}, news)
    document = view.document()
    assert [(each["peer"], each["line"]) for each in document["failures"]] == [(A, "it [2J hung")]
    assert [(each["peer"], each["step"]) for each in document["checkpoints"]] == [(A, 12)]
    assert document["sample"]["text"] == "To be\n [2J"
    assert [each["kind"] for each in events] == ["failure"]


def test_hostile_rows_change_nothing_but_their_own_numbers(view: SwarmView) -> None:
    row = {
        "device": "<b>\x1b[2J" * 99,
        "tokens": float("nan"),
        "loss": "2",
        "id": B,
        "nickname": "root",
        "step": 10**30,
    }
    view.told(A, row, [])
    found = view.document()["peers"][0]
    assert (found["id"], found["nickname"], found["step"]) == (A, "fox", 7)
    assert (found["tokens"], found["loss"]) == (None, None)
    assert len(found["device"]) <= 32
    assert found["device"].isprintable()


def test_who_is_gone_is_shown_as_gone_and_tells_nothing_more(view: SwarmView, signed: SignedManifest) -> None:
    view.told(A, ROW, [])
    view.meet([presence(signed, B, "hen")], None)
    view.told(A, ROW, [exchange(9, B)])
    document = view.document()
    assert {row["nickname"]: row["state"] for row in document["peers"]} == {"hen": "training", "fox": "gone"}
    assert document["exchanges"] == []
    assert "tokens" not in document["figures"]


def test_only_an_open_run_shows_how_to_join(signed: SignedManifest, tmp_path: Path) -> None:
    view = SwarmView(signed)
    view.join("p2ptrain peer 'p2ptrain://x'")
    assert view.document()["join"] == "p2ptrain peer 'p2ptrain://x'"
    run = tmp_path / "run"
    create_run(run, "demo")
    text = (run / "manifest.toml").read_text()
    (run / "manifest.toml").write_text(text.replace('policy = "open"', 'policy = "invite"'))
    sign_run(run)
    private = SwarmView(load_run(run))
    private.join("p2ptrain peer 'p2ptrain://x'")
    assert private.document()["join"] == ""
