"""Two processes with one identity: which one yields, what both owners read, and how a copied home gets its own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from p2ptrain.base.errors import HomeError
from p2ptrain.cli import cli
from p2ptrain.manifest import create_run, load_run, sign_run
from p2ptrain.net.identity import Identity, verify
from p2ptrain.swarm import PeerState, Presence
from peer import duplicate_identity
from peer.duplicate_identity import IdentityWatch, rank_of
from peer.home import Home
from peer.messages import line


class Process:
    """A process with the identity of a home, whose clock is that of the test."""

    def __init__(self, home: Home, identity: Identity, place: int, address: str) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.now = 0.0
        self.stops = 0
        self.watch = IdentityWatch(home, self, lambda: 1e9 + self.now, lambda: self.now, Drawn(place))
        self.watch.stop_by(self.stop)
        self.identity, self.address = identity, address

    def note(self, kind: str, **fields: Any) -> None:
        self.notes.append((kind, fields))

    def stop(self) -> None:
        self.stops += 1

    def announce(self, state: PeerState = PeerState.TRAINING, step: int = 0) -> Presence:
        me = self.identity.peer_id
        record = Presence(me, "run", (self.address,), state, step, 1.0, True, "", 0.0, 75.0)
        return self.identity.sign(self.watch.stamped(record))


class Drawn(Random):
    """Randomness that draws one number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def randrange(self, *_: Any) -> int:
        return self.number


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "one" / "identity.key")


def pair(tmp_path: Path, identity: Identity, places: tuple[int, int] = (5, 9)) -> tuple[Process, Process]:
    (tmp_path / "two").mkdir()
    first = Process(Home(tmp_path / "one"), identity, places[0], "/ip4/11.0.1.2/tcp/4001")
    return first, Process(Home(tmp_path / "two"), identity, places[1], "/ip4/11.0.2.2/tcp/4001")


def meet(one: Process, other: Process, *states: PeerState) -> None:
    """Let two processes announce themselves, a second or two later, and see each other's records."""
    one.now, other.now = one.now + 1, other.now + 1.5
    records = [each.announce(*states[place : place + 1]) for place, each in enumerate((one, other))]
    for record in records:
        assert verify(record)
        one.watch.see(record)
        other.watch.see(record)


def test_the_one_that_has_not_trained_yet_yields_and_both_are_told(tmp_path: Path, identity: Identity) -> None:
    first, second = pair(tmp_path, identity)
    first.announce()
    meet(first, second, PeerState.TRAINING, PeerState.JOINING)
    assert (first.stops, second.stops) == (0, 1)
    assert first.watch.error() is None
    assert isinstance(second.watch.error(), HomeError)
    told, other = (line(*each.notes[0]) for each in (first, second))
    assert told is not None
    assert other is not None
    assert "at 11.0.2.2 " in told
    assert "goes on" in told
    assert "at 11.0.1.2 " in other
    assert f"p2ptrain identity --new {tmp_path / 'two'}" in other


@pytest.mark.parametrize("places", [(5, 9), (9, 5)])
def test_of_two_that_train_one_yields(tmp_path: Path, identity: Identity, places: tuple[int, int]) -> None:
    first, second = pair(tmp_path, identity, places)
    meet(first, second)
    assert {first.stops, second.stops} == {0, 1}


def test_of_equal_ranks_both_yield(tmp_path: Path, identity: Identity) -> None:
    first, second = pair(tmp_path, identity, (7, 7))
    meet(first, second)
    assert (first.stops, second.stops) == (1, 1)


def test_the_older_process_goes_on(tmp_path: Path, identity: Identity) -> None:
    first, second = pair(tmp_path, identity, (1, 110))
    first.announce()
    first.now = second.now = 30.0
    meet(first, second)
    assert (first.stops, second.stops) == (0, 1)


def test_ranks_grow_with_age_and_times_with_each_record(tmp_path: Path, identity: Identity) -> None:
    first, _ = pair(tmp_path, identity)
    assert rank_of(first.announce(PeerState.JOINING).issued_at) == 5
    times, ranks = [], []
    for age in (0, 0, 19, 20, 79, 80, 1279, 1280, 1e6):
        first.now = float(age)
        times.append(first.announce().issued_at)
        ranks.append(rank_of(times[-1]) // 111)
    assert ranks == [1, 1, 1, 2, 3, 4, 7, 8, 8]
    assert times == sorted(set(times))


def test_what_yields_repeats_the_others_record_until_it_ends(tmp_path: Path, identity: Identity) -> None:
    first, second = pair(tmp_path, identity)
    first.announce(step=41)
    second.now = 1.0
    second.watch.see(replace(first.announce(step=42), issued_at=1e9 + 1 + 900e-6))
    second.now = 3.0
    record = second.announce(PeerState.LEAVING)
    assert (record.state, record.step, rank_of(record.issued_at)) == (PeerState.TRAINING, 42, 0)
    assert record.addresses == (first.address, "/ip4/11.0.2.2/tcp/0")
    first.watch.see(record)
    assert (first.stops, [kind for kind, _ in first.notes]) == (0, ["same identity"])
    assert "at 11.0.2.2 " in str(line(*first.notes[0]))


def test_records_of_earlier_processes_of_the_home_do_not_count(tmp_path: Path, identity: Identity) -> None:
    first, _ = pair(tmp_path, identity)
    first.now = 50.0
    last = first.announce()
    again = Process(Home(tmp_path / "one"), identity, 3, first.address)
    again.now = 51.0  # a clock that was set back must not matter either
    for record in (last, again.announce()):
        again.watch.see(record)
    assert not again.notes
    later = Process(Home(tmp_path / "one"), identity, 3, first.address)
    later.watch.see(first.announce())
    assert later.notes == []
    first.now = 90.0
    later.watch.see(first.announce())
    assert [kind for kind, _ in later.notes] == ["same identity"]


def test_no_start_after_a_crash_takes_its_own_last_record_for_anothers(tmp_path: Path, identity: Identity) -> None:
    """Check many times of records: what was written and read again is the same time, whatever its last bits."""
    home = Home(tmp_path / "one")
    for number in range(200):
        killed = Process(home, identity, 3, "")
        killed.now = 8e8 + 7.013 * number
        presence = killed.announce()
        again = Process(home, identity, 3, "")
        again.watch.see(presence)
        assert (again.notes, again.stops) == ([], 0), presence.issued_at


def test_a_farewell_stops_nobody_and_notes_are_rare(tmp_path: Path, identity: Identity) -> None:
    first, second = pair(tmp_path, identity, (9, 5))
    second.now = 1.0
    first.watch.see(second.announce(PeerState.LEAVING))
    assert not first.notes
    first.announce()
    for now in range(2, 60, 20):
        first.now = second.now = float(now)
        first.watch.see(second.announce(PeerState.JOINING))
    assert len(first.notes) == 1


def test_lingering_repeats_the_record(tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(tmp_path, identity)
    monkeypatch.setattr(duplicate_identity, "REPEAT_S", 0.0)
    times = []

    async def announce() -> None:
        times.append(second.now)
        second.now += 20.0

    asyncio.run(second.watch.linger(announce))
    assert times == []
    meet(first, second, PeerState.TRAINING, PeerState.JOINING)
    asyncio.run(second.watch.linger(announce))
    assert len(times) == 3


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
