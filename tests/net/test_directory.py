"""What the DHT may hold, and the peer cache on disk. No network."""

import json
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import get_dht_time

from p2ptrain import wire
from p2ptrain.ids import RunId
from p2ptrain.net import directory
from p2ptrain.net.directory import MAX_CACHED, PeerCache, PresenceValidator, presence_key
from p2ptrain.net.identity import Identity
from p2ptrain.swarm.messages import PeerState, Presence

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
PLACES = ("/ip4/203.0.113.7/tcp/31337",)


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity.key")


def presence_of(identity: Identity, run: RunId = RUN, issued_at: float | None = None) -> Presence:
    at = get_dht_time() if issued_at is None else issued_at
    return identity.sign(Presence(identity.peer_id, run, PLACES, PeerState.TRAINING, 1, 2.0, "fox", at, 60.0))


def record_of(presence: Presence, run: RunId = RUN) -> DHTRecord:
    return DHTRecord(
        key=DHTID.generate(source=presence_key(run)).to_bytes(),
        subkey=msgpack.packb(presence.peer),
        value=msgpack.packb(wire.encode_presence(presence)),
        expiration_time=presence.issued_at + presence.lifetime_s,
    )


def test_a_signed_record_in_its_place_passes(identity: Identity):
    assert PresenceValidator(RUN).validate(record_of(presence_of(identity)))


def test_everything_else_is_rejected(identity: Identity, tmp_path: Path):
    other = Identity.load_or_create(tmp_path / "other.key")
    presence = presence_of(identity)
    good = record_of(presence)
    future = presence_of(identity, issued_at=get_dht_time() + 3000.0)
    rejected = {
        "another key": replace(good, key=DHTID.generate(source="x").to_bytes()),
        "another's subkey": replace(good, subkey=msgpack.packb(other.peer_id)),
        "no subkey": replace(good, subkey=msgpack.packb(None)),
        "forged": record_of(replace(presence, step=2)),
        "stolen": record_of(replace(presence, peer=other.peer_id)),
        "unsigned": record_of(replace(presence, signature=b"")),
        "another run": record_of(presence_of(identity, OTHER_RUN)),
        "kept too long": replace(good, expiration_time=good.expiration_time + 3600),
        "from the future": record_of(future),
        "oversized": replace(good, value=msgpack.packb(b"x" * 2000)),
        "not a presence": replace(good, value=msgpack.packb(b"x" * 20)),
        "not bytes": replace(good, value=msgpack.packb({"a": 1})),
        "garbage": replace(good, value=b"\xc1"),
        "empty": replace(good, value=b""),
    }
    validator = PresenceValidator(RUN)
    assert [what for what, record in rejected.items() if validator.validate(record)] == []


def test_a_node_stores_a_bounded_number_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory, "MAX_STORED_PEERS", 2)
    a, b, c = (Identity.load_or_create(tmp_path / name) for name in "abc")
    validator = PresenceValidator(RUN)
    now = get_dht_time()
    assert validator.validate(record_of(presence_of(a)))
    assert validator.validate(record_of(presence_of(b)))
    assert not validator.validate(record_of(presence_of(c)))
    assert validator.validate(record_of(presence_of(a)))
    monkeypatch.setattr(directory, "get_dht_time", lambda: now + 100.0)
    assert validator.validate(record_of(presence_of(c, issued_at=now + 100.0)))


def test_the_cache_returns_what_was_saved_latest_first(tmp_path: Path):
    identities = [Identity.load_or_create(tmp_path / f"{number}.key") for number in range(3)]
    records = [presence_of(identity, issued_at=1000.0 + number) for number, identity in enumerate(identities)]
    older = presence_of(identities[2], issued_at=1.0)
    cache = PeerCache(tmp_path / "peers.json")
    cache.save([*records, older])
    assert cache.load(RUN) == records[::-1]
    assert cache.load(OTHER_RUN) == []
    assert not (tmp_path / "peers.json.new").exists()


def test_the_cache_is_bounded(identity: Identity, tmp_path: Path):
    records = [replace(presence_of(identity), peer=f"peer{number}") for number in range(MAX_CACHED + 5)]
    cache = PeerCache(tmp_path / "peers.json")
    cache.save(records)
    assert len(json.loads((tmp_path / "peers.json").read_text())) == MAX_CACHED


def test_a_missing_or_damaged_cache_is_an_empty_one(identity: Identity, tmp_path: Path):
    path = tmp_path / "peers.json"
    cache = PeerCache(path)
    assert cache.load(RUN) == []
    cache.save([presence_of(identity)])
    good = json.loads(path.read_text())
    damaged = [
        good[0] | {"step": 7},
        good[0] | {"surprise": 1},
        good[0] | {"state": "dreaming"},
        good[0] | {"addresses": 3},
        good[0] | {"signature": "zz"},
        {},
        None,
    ]
    for text in ("", "{", "[[[]]]", '{"a": 1}', json.dumps(damaged)):
        path.write_text(text)
        assert cache.load(RUN) == []
    path.write_text(json.dumps([*damaged, *good]))
    assert len(cache.load(RUN)) == 1
