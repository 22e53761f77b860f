"""Peers that a bootstrap shows from one lookup to the next."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap import presence_watch
from bootstrap.swarm_view import SwarmView
from p2ptrain.base.clock import WallClock
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.directory import DhtDirectory, PeerCache
from p2ptrain.swarm import PeerState, Presence
from p2ptrain.swarm.presence_buckets import LOST, MERGE, PresenceBucket, home


def test_peers_of_the_half_that_was_not_asked_stay_on_the_page(
    signed: SignedManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a swarm that shrank: one of two buckets is so sparse that the next lookup starts at the root, and this one
    ends."""
    everybody = [
        Presence(PeerId(f"12D3KooW{n:04}"), signed.run_id, (), PeerState.TRAINING, 7, 7.0, True, "", 0.0, 75.0)
        for n in range(76)
    ]
    halves = [[each for each in everybody if home(signed.run_id, each.peer, 1).number == number] for number in range(2)]
    assert LOST <= len(min(halves, key=len)) < MERGE
    view = SwarmView(signed, wall=lambda: 5.0)
    node: Any = SimpleNamespace(protocol=SimpleNamespace(routing_table=SimpleNamespace(uid_to_peer_id={"a": "b"})))
    directory = DhtDirectory(node, signed.run_id, Random(1))
    shown: list[int] = []

    async def records(bucket: PresenceBucket) -> list[Presence]:
        if bucket.level == 0:
            return everybody
        return min(halves, key=len)

    async def nap(seconds: float) -> None:
        if view.document()["total_peers"]:
            shown.append(len([row for row in view.document()["peers"] if row["state"] != "gone"]))
        if len(shown) == 1:
            directory._buckets.level = 1
        if len(shown) == 3:
            raise TimeoutError

    monkeypatch.setattr(directory, "_records", records)
    monkeypatch.setattr(presence_watch.asyncio, "sleep", nap)
    watched: Any = SimpleNamespace(has_company=True, directory=directory, learn=lambda _: None)
    with pytest.raises(TimeoutError):
        asyncio.run(presence_watch.watch(watched, 1000, PeerCache(tmp_path / "peers.json"), lambda *_: None, view))
    assert shown == [76, 76, 76]


def test_who_is_not_found_any_more_is_gone_when_its_record_runs_out_though_no_lookup_succeeds(
    signed: SignedManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check peers that vanish together without a farewell, when lookups take longer than their deadline."""
    clock, shown = [0.0], list[tuple[float, str, int]]()
    fox = Presence(PeerId("12D3KooWfox"), signed.run_id, (), PeerState.TRAINING, 7, 7.0, True, "", 0.0, 75.0)
    view = SwarmView(signed, wall=lambda: clock[0])

    class Hanging:
        sees_all, size = True, 1

        async def lookup(self) -> list[Presence]:
            if clock[0] > presence_watch.LOOKUP_EVERY_S:
                raise NetworkError("no answer")
            return [fox]

    async def nap(seconds: float) -> None:
        document = view.document()
        shown.extend((clock[0], row["state"], document["total_peers"]) for row in document["peers"])
        clock[0] += seconds
        if clock[0] > 100.0:
            raise TimeoutError

    monkeypatch.setattr(presence_watch.asyncio, "sleep", nap)
    watched: Any = SimpleNamespace(has_company=True, directory=Hanging(), learn=lambda _: None)
    with pytest.raises(TimeoutError):
        asyncio.run(presence_watch.watch(watched, 1000, PeerCache(tmp_path / "peers.json"), lambda *_: None, view))
    assert {(state, total) for at, state, total in shown if at < 75.0} == {("training", 1)}
    assert {(state, total) for at, state, total in shown if at > 75.0} == {("gone", 0)}


def test_peers_show_which_time_is_right_after_the_clock_jumped(monkeypatch: pytest.MonkeyPatch) -> None:
    off_s, said = [0.0], list[str]()
    clock = WallClock(lambda: 1e9 + off_s[0], lambda: 0.0)
    monkeypatch.setattr(presence_watch, "wall", clock)
    records: list[Any] = [SimpleNamespace(issued_at=1e9 - age_s) for age_s in (1.0, 20.0, 9e9)]
    off_s[0] = 86_400.0
    presence_watch._judge_clock([], lambda _, text: said.append(text))
    assert not clock.is_judged
    for _ in range(2):
        presence_watch._judge_clock(records, lambda _, text: said.append(text))
    assert clock() == 1e9
    assert said == ["this machine's clock jumped; its 3 peers show that it is wrong now. Set it"]
