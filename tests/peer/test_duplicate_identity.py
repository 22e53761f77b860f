"""Two processes with one identity: which one yields, what both owners read, and how a copied home gets its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import HomeError
from p2ptrain.cli import cli
from p2ptrain.manifest import create_run, load_run, sign_run
from p2ptrain.net.identity import Identity, verify
from p2ptrain.swarm import PeerState, Presence
from peer.duplicate_identity import IdentityWatch
from peer.home import Home
from peer.messages import line


class Process:
    """A process with the identity of a home, whose clock is that of the test."""

    def __init__(self, home: Home, identity: Identity, began: float, address: str) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.now = began
        self.stops = 0
        self.watch = IdentityWatch(home, self, lambda: 1e9 + self.now, lambda: self.now)
        self.watch.stop_by(self.stop)
        self.identity, self.address = identity, address

    def note(self, kind: str, **fields: Any) -> None:
        self.notes.append((kind, fields))

    def stop(self) -> None:
        self.stops += 1

    def announce(self, now: float, state: PeerState = PeerState.TRAINING) -> Presence:
        """Return the record of this time."""
        self.now = now
        me, since = self.identity.peer_id, self.watch.since
        record = Presence(me, "run", (self.address,), state, 7, 1.0, True, "", 1e9 + now, 75.0, since=since)
        return self.identity.sign(record)


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "one" / "identity.key")


@pytest.fixture
def pair(tmp_path: Path, identity: Identity) -> tuple[Process, Process]:
    """An older process, and one with a copy of its home."""
    (tmp_path / "two").mkdir()
    first = Process(Home(tmp_path / "one"), identity, 0.0, "/ip4/11.0.1.2/tcp/4001")
    return first, Process(Home(tmp_path / "two"), identity, 10.0, "/ip4/11.0.2.2/tcp/4001")


def test_the_younger_process_yields_once_the_other_renews_its_record(
    pair: tuple[Process, Process], tmp_path: Path
) -> None:
    first, second = pair
    for now in (5.0, 20.0, 40.0):
        record = first.announce(now)
        assert verify(record)
        first.watch.see(record)  # its own
        second.watch.see(record)
        assert second.stops == (now > 5.0)
        first.watch.see(second.announce(now + 6.0))
    assert first.stops == 0
    assert first.watch.error() is None
    assert isinstance(second.watch.error(), HomeError)
    told, other = (line(*each.notes[0]) for each in (first, second))
    assert told is not None
    assert other is not None
    assert "at 11.0.2.2 " in told
    assert "goes on" in told
    assert "at 11.0.1.2 " in other
    assert f"p2ptrain identity --new {tmp_path / 'two'}" in other


def test_a_process_that_starts_to_watch_late_stops_at_once(pair: tuple[Process, Process]) -> None:
    first, second = pair
    for now in (15.0, 35.0):
        second.watch.see(first.announce(now))
    stops: list[bool] = []
    second.watch.stop_by(lambda: stops.append(True))
    assert stops == [True]


def test_records_of_earlier_processes_of_the_home_do_not_count(tmp_path: Path, identity: Identity) -> None:
    home = Home(tmp_path / "one")
    killed = Process(home, identity, 0.0, "")
    records = [killed.announce(float(now)) for now in (50, 70)]
    again = Process(home, identity, 71.0, "")
    set_back = Process(home, identity, 40.0, "")
    for record in (*records, records[0]):
        again.watch.see(record)
    for _ in range(3):
        set_back.watch.see(records[1])
    assert again.notes == set_back.notes == []


def test_a_farewell_stops_nobody_and_notes_are_rare(pair: tuple[Process, Process]) -> None:
    first, second = pair
    for now in (11.0, 12.0):
        first.watch.see(second.announce(now, PeerState.LEAVING))
    assert not first.notes
    for now in range(20, 90, 20):
        first.now = float(now)
        first.watch.see(second.announce(float(now), PeerState.JOINING))
    assert len(first.notes) == 1


@pytest.fixture
def home(tmp_path: Path) -> Home:
    create_run(tmp_path / "run", "demo")
    sign_run(tmp_path / "run")
    home = Home(tmp_path / "home")
    home.path.mkdir()
    home.save_manifest(load_run(tmp_path / "run"))
    return home


def test_a_copied_home_gets_an_identity_of_its_own(home: Home) -> None:
    old = Identity.load_or_create(home.identity).peer_id
    assert CliRunner().invoke(cli, ["identity", str(home.path)]).output.strip() == old
    checkpoint = home.checkpoints / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 7, "tokens": 4096}))
    home.contributions.write_text("a receipt\n")
    done = CliRunner().invoke(cli, ["identity", "--new", str(home.path)])
    assert done.exit_code == 0, done.output
    new = Identity.load_or_create(home.identity).peer_id
    assert new != old
    assert new in done.output
    assert checkpoint.exists()
    assert not home.contributions.exists()
    folder = home.path / f"before-{old[-6:]}"
    assert (folder / "contributions.jsonl").read_text() == "a receipt\n"
    assert Identity.load_or_create(folder / "identity.key").peer_id == old
    assert home.foreign_tokens() == 4096


def test_a_running_peer_keeps_its_identity(home: Home) -> None:
    with home.locked():
        done = CliRunner().invoke(cli, ["identity", "--new", str(home.path)])
    assert done.exit_code != 0
    assert isinstance(done.exception, HomeError)
