"""Records in the DHT, the directory over a fake DHT node (and once a real one), and the peer cache on disk."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgpack
import people
import pytest
import uvloop
import virtual_time
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time
from people import AUTHOR

from p2ptrain import wire
from p2ptrain.admission import Gate
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import RunId, peer_of
from p2ptrain.net import access_list_store as access_list_module
from p2ptrain.net import dht_protocol, directory
from p2ptrain.net.access_list_store import LIFETIME_S, AccessListStore, access_list_key
from p2ptrain.net.directory import (
    MAX_CACHED,
    MAX_RECORDS,
    OWN_CHECKS,
    DhtDirectory,
    PeerCache,
    PresenceValidator,
    finished_key,
    presence_key,
)
from p2ptrain.net.identity import Identity
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import RateLimit
from p2ptrain.statements import packed
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.presence_buckets import LOST, MAX_GETS, MAX_LEVEL, MERGE, PresenceBucket, home

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
PLACES = ("/ip4/203.0.113.7/tcp/31337",)


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity.key")


def presence_of(identity: Identity, run: RunId = RUN, issued_at: float | None = None) -> Presence:
    at = get_dht_time() if issued_at is None else issued_at
    return identity.sign(Presence(identity.peer_id, run, PLACES, PeerState.TRAINING, 1, 2.0, True, "fox", at, 60.0))


def key_of(bucket: PresenceBucket, run: RunId = RUN) -> bytes:
    return DHTID.generate(source=presence_key(run, bucket)).to_bytes()


def record_of(presence: Presence, level: int = 0) -> DHTRecord:
    return DHTRecord(
        key=key_of(home(RUN, presence.peer, level)),
        subkey=msgpack.packb(presence.peer),
        value=msgpack.packb(wire.encode_presence(presence)),
        expiration_time=presence.issued_at + presence.lifetime_s,
    )


def test_a_signed_record_in_its_places_passes(identity: Identity):
    validator = PresenceValidator(RUN)
    presence = presence_of(identity)
    assert all(validator.validate(record_of(presence, level)) for level in range(MAX_LEVEL + 1))


def test_everything_else_is_rejected(identity: Identity, tmp_path: Path):
    other = Identity.load_or_create(tmp_path / "other.key")
    presence = presence_of(identity)
    good = record_of(presence)
    future = presence_of(identity, issued_at=get_dht_time() + 3000.0)
    rejected = {
        "another key": replace(good, key=DHTID.generate(source="x").to_bytes()),
        "another bucket": replace(good, key=key_of(PresenceBucket(3, (home(RUN, identity.peer_id, 3).number + 1) % 8))),
        "too deep a bucket": replace(good, key=key_of(home(RUN, identity.peer_id, MAX_LEVEL + 1))),
        "another run's bucket": replace(good, key=key_of(PresenceBucket(0, 0), OTHER_RUN)),
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
        "bottomless": replace(good, value=b"\x91" * 1000 + b"\xc0"),
        "bottomless inside": replace(good, value=msgpack.packb(b"\x91" * 999 + b"\xc0")),
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
    monkeypatch.setattr(directory, "wall", lambda: now + 100.0)
    assert validator.validate(record_of(presence_of(c, issued_at=now + 100.0)))


def farewell_of(identity: Identity, progress: float = 9.0, state: PeerState = PeerState.LEAVING) -> Presence:
    return identity.sign(replace(presence_of(identity), state=state, progress=progress))


def kept(presence: Presence, days: float = 30.0) -> DHTRecord:
    key = DHTID.generate(source=finished_key(RUN)).to_bytes()
    return replace(record_of(presence), key=key, expiration_time=presence.issued_at + days * 86_400.0)


def test_farewells_are_kept_for_a_month_and_everything_else_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory, "MAX_FINISHED", 2)
    a, b, c = (Identity.load_or_create(tmp_path / name) for name in "abc")
    validator = PresenceValidator(RUN)
    assert not validator.validate(kept(farewell_of(a))), "the run's end is not known yet"
    validator.end = 9.0
    assert not validator.validate(kept(farewell_of(a, progress=8.9))), "it would take a place and tell nobody the end"
    assert not validator.validate(kept(farewell_of(a, state=PeerState.TRAINING)))
    assert not validator.validate(kept(farewell_of(a), days=31.0))
    assert not validator.validate(kept(replace(farewell_of(a), progress=10.0)))
    assert not validator.validate(replace(kept(farewell_of(a)), subkey=msgpack.packb(b.peer_id)))
    assert not validator.validate(replace(record_of(farewell_of(a)), expiration_time=get_dht_time() + 3600.0))
    assert all(validator.validate(kept(farewell_of(each))) for each in (a, b, a))
    assert not validator.validate(kept(farewell_of(c))), "there is room for two"
    now = get_dht_time()
    monkeypatch.setattr(directory, "wall", lambda: now + 31 * 86_400.0)
    assert validator.validate(kept(farewell_of(c)))


# --- the directory ----------------------------------------------------------------------------------------------------


class PretendedNode:
    """A DHT with one node. Stores what its validators accept; with ``honest = False``, anything."""

    def __init__(self) -> None:
        self.protocol = SimpleNamespace(routing_table=SimpleNamespace(uid_to_peer_id={"somebody": "else"}))
        self.honest = True
        self.validator = PresenceValidator(RUN)
        self.validator.end = 9.0
        self.gets: list[str] = []
        self.before_get: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.held: dict[str, dict[str, ValueWithExpiration]] = {}

    async def store_many(self, keys, values, expiration_time, subkeys):
        stored = {}
        times = expiration_time if isinstance(expiration_time, list) else [expiration_time] * len(keys)
        for key, value, subkey, until in zip(keys, values, subkeys, times, strict=True):
            place = DHTID.generate(source=key).to_bytes()
            record = DHTRecord(place, msgpack.packb(subkey), msgpack.packb(value), until)
            stored[key, subkey] = not self.honest or self.validator.validate(record)
            if stored[key, subkey]:
                self.held.setdefault(key, {})[subkey] = ValueWithExpiration(value, until)
        return stored

    async def get(self, key, latest):
        assert latest
        self.gets.append(key)
        await self.before_get()
        return ValueWithExpiration(self.held[key], 0.0) if key in self.held else None

    def put(self, presence: Presence, bucket: PresenceBucket) -> None:
        value = ValueWithExpiration(wire.encode_presence(presence), presence.issued_at + presence.lifetime_s)
        self.held.setdefault(presence_key(RUN, bucket), {})[presence.peer] = value


@pytest.fixture(scope="module")
def crowd() -> list[Identity]:
    """Return peers that are always the same, and so are their buckets."""
    keys = [Ed25519PrivateKey.from_private_bytes(number.to_bytes(32)) for number in range(240)]
    return [Identity(Path(), peer_of(key.public_key().public_bytes_raw()), key) for key in keys]


def directory_over(node: Any, seed: int = 1) -> DhtDirectory:
    directory = DhtDirectory(node, RUN, Random(seed))
    directory.end = 9.0
    return directory


def peers_of(records: list[Presence]) -> set[str]:
    return {record.peer for record in records}


def test_a_small_swarm_sees_all_and_costs_one_key(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        directories = [directory_over(node, seed) for seed in range(10)]
        for each, identity in zip(directories, crowd, strict=False):
            await each.announce(presence_of(identity))
        assert list(node.held) == [presence_key(RUN, PresenceBucket(0, 0))]
        for each in directories:
            assert peers_of(await each.lookup()) == {identity.peer_id for identity in crowd[:10]}
            assert each.sees_all
            assert each.size == 10
        assert len(node.gets) == 20  # one each before the first announcement, and one each now

    virtual_time.run(main())


@pytest.mark.parametrize("number", [1, 200])
def test_what_others_announced_in_our_name_is_found(crowd: list[Identity], number: int):
    """Check a small swarm, and one whose lookups are samples."""

    async def main() -> None:
        node = PretendedNode()
        me, seen = crowd[0], list[Presence]()
        for identity in crowd[:number]:
            for level in range(3):
                node.put(presence_of(identity), home(RUN, identity.peer_id, level))
        watcher = directory_over(node)
        watcher.me, watcher.on_own = me.peer_id, seen.append
        watcher._buckets.level = 2 if number > 1 else 0
        for _ in range(5):
            await watcher.lookup()
        assert peers_of(seen) == {me.peer_id}

    virtual_time.run(main())


def test_two_processes_with_one_identity_meet_though_each_looks_up_after_its_own_announcement(crowd: list[Identity]):
    async def main() -> None:
        node, me = PretendedNode(), crowd[0]
        seen: list[list[float]] = [[], []]
        pair = [directory_over(node, seed) for seed in range(2)]
        for each, found in zip(pair, seen, strict=True):
            each.me, each.on_own = me.peer_id, lambda presence, found=found: found.append(presence.issued_at)
        issued: list[list[float]] = [[], []]
        for turn in range(OWN_CHECKS + 2):
            for number, each in enumerate(pair):
                record = presence_of(me, issued_at=get_dht_time() + (2 * turn + number) / 1000)
                issued[number].append(record.issued_at)
                await each.announce(record)
                await each.lookup()
        assert set(seen[0]) & set(issued[1])
        assert set(seen[1]) & set(issued[0])
        before = len(node.gets)
        await pair[0].announce(presence_of(me))
        assert len(node.gets) == before, "a process that has run for a while looks nothing up"

    virtual_time.run(main())


def test_a_finished_peer_is_found_long_after_its_presence(crowd: list[Identity], monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        node = PretendedNode()
        leaver = directory_over(node)
        await leaver.announce(farewell_of(crowd[0]))
        await leaver.keep_finished(farewell_of(crowd[0]))
        now = get_dht_time()
        monkeypatch.setattr(directory, "wall", lambda: now + 86_400.0)
        late = directory_over(node, 2)
        assert await late.lookup() == []
        assert peers_of(await late.finished()) == {crowd[0].peer_id}
        other = PretendedNode()
        await directory_over(other).keep_sealed(await late.sealed_finished())
        assert peers_of(await directory_over(other).finished()) == {crowd[0].peer_id}
        other.honest = False
        await directory_over(other).keep_finished(farewell_of(crowd[1], progress=8.9))
        assert peers_of(await directory_over(other).finished()) == {crowd[0].peer_id}

    virtual_time.run(main())


def test_who_comes_back_to_the_root_has_seen_a_half_and_says_so(crowd: list[Identity]):
    """Check the estimated size: it follows from the level of this lookup, not from the level of the next one."""

    async def main() -> None:
        node = PretendedNode()
        for identity in crowd[:70]:
            for level in range(2):
                node.put(presence_of(identity), home(RUN, identity.peer_id, level))
        watcher = directory_over(node)
        watcher._buckets.level = 1
        found = await watcher.lookup()
        assert LOST <= len(found) < MERGE
        assert watcher._buckets.level == 0
        assert not watcher.sees_all
        assert watcher.size == 2 * len(found)
        assert len(await watcher.lookup()) == 70
        assert watcher.sees_all

    virtual_time.run(main())


def test_a_newcomer_to_a_crowd_learns_its_size_and_announces_itself_where_others_look(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        for identity in crowd[1:]:
            for level in range(4):
                node.put(presence_of(identity), home(RUN, identity.peer_id, level))
        newcomer = directory_over(node)
        await newcomer.announce(presence_of(crowd[0]))
        assert len(node.gets) == 2  # the root, two levels that are too full, and one that is not
        assert not newcomer.sees_all
        assert 180 <= newcomer.size <= 300
        where = {key for key, held in node.held.items() if crowd[0].peer_id in held}
        assert {presence_key(RUN, home(RUN, crowd[0].peer_id, level)) for level in (1, 2, 3)} <= where
        for _ in range(4):
            node.gets.clear()
            found = await newcomer.lookup()
            assert len(peers_of(found)) == len(found) <= MAX_RECORDS
            assert len(node.gets) == 1

    virtual_time.run(main())


def test_a_lookup_is_bounded_and_takes_anyone(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        for identity in crowd:
            node.put(presence_of(identity), PresenceBucket(0, 0))
        seen: set[str] = set()
        for seed in range(16):
            found = await directory_over(node, seed).lookup()
            assert len(found) == MAX_RECORDS
            seen |= peers_of(found)
        assert len(node.gets) <= 16 * MAX_GETS
        assert seen == {identity.peer_id for identity in crowd}

    virtual_time.run(main())


def test_a_lookup_verifies_again(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        good = presence_of(crowd[0])
        unfit = [
            replace(presence_of(crowd[1]), step=9),
            replace(presence_of(crowd[2]), peer=crowd[3].peer_id),
            presence_of(crowd[4], OTHER_RUN),
            presence_of(crowd[5], issued_at=get_dht_time() - 61.0),
        ]
        for presence in (*unfit, good):
            node.put(presence, PresenceBucket(0, 0))
        held = node.held[presence_key(RUN, PresenceBucket(0, 0))]
        held |= dict.fromkeys(("garbage", "more"), ValueWithExpiration({"a": 1}, get_dht_time() + 9.0))
        assert await directory_over(node).lookup() == [good]

    virtual_time.run(main())


def test_a_record_in_anothers_bucket_is_not_found(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        for identity in crowd:
            node.put(presence_of(identity), PresenceBucket(0, 0))
        each = directory_over(node)
        await each.lookup()
        node.held.clear()
        node.gets.clear()
        stray = presence_of(crowd[0])
        for number in range(4):
            if PresenceBucket(2, number) != home(RUN, stray.peer, 2):
                node.put(stray, PresenceBucket(2, number))
        for _ in range(3):
            assert await each.lookup() == []
        assert node.gets[0].startswith(f"p2ptrain.{RUN}.presence.2.")

    virtual_time.run(main())


def test_one_that_leaves_says_so_wherever_it_said_that_it_is_here(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        leaver = directory_over(node)
        await leaver.announce(presence_of(crowd[0]))  # at the root, in an empty swarm
        for identity in crowd[1:]:
            for level in range(4):
                node.put(presence_of(identity), home(RUN, identity.peer_id, level))
        await leaver.lookup()
        await leaver.announce(presence_of(crowd[0], issued_at=get_dht_time() + 1.0))
        gone = replace(presence_of(crowd[0]), state=PeerState.LEAVING, issued_at=get_dht_time() + 2.0)
        gone = crowd[0].sign(gone)
        await leaver.announce(gone)
        said = {key: held[crowd[0].peer_id].value for key, held in node.held.items() if crowd[0].peer_id in held}
        assert len(said) >= 4
        assert set(said.values()) == {wire.encode_presence(gone)}

    virtual_time.run(main())


def test_a_dht_that_does_not_answer_is_a_network_error(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        for identity in crowd:
            node.put(presence_of(identity), PresenceBucket(0, 0))
        each = directory_over(node)

        async def freeze() -> None:
            await asyncio.sleep(3600.0)

        async def freeze_later() -> None:
            if len(node.gets) > 1:
                await freeze()

        node.before_get = freeze
        with pytest.raises(NetworkError, match="the lookup took more than 15 s"):
            await each.lookup()
        node.gets.clear()
        node.before_get = freeze_later
        assert len(await each.lookup()) == MAX_RECORDS  # records in time count
        assert each.size == len(crowd)

        node.store_many = lambda *_, **__: freeze()  # type: ignore[method-assign]
        with pytest.raises(NetworkError, match="storing our presence record took more than 15 s"):
            await each.announce(presence_of(crowd[0]))

    virtual_time.run(main())


@pytest.mark.parametrize("error", [AssertionError(), KeyError("a node"), RecursionError("too deep")])
def test_what_hivemind_stumbles_over_is_a_network_error(crowd: list[Identity], error: Exception):
    """Check errors that hivemind raises on a stranger's answer."""

    async def main() -> None:
        node = PretendedNode()
        for identity in crowd:
            node.put(presence_of(identity), PresenceBucket(0, 0))
        each = directory_over(node)

        async def stumble(*_: Any, **__: Any) -> None:
            raise error

        async def stumble_later() -> None:
            if len(node.gets) > 1:
                await stumble()

        node.before_get = stumble
        with pytest.raises(NetworkError, match=f"the lookup failed in hivemind: {type(error).__name__}"):
            await each.lookup()
        node.gets.clear()
        node.before_get = stumble_later
        assert len(await each.lookup()) == MAX_RECORDS  # earlier records count
        node.store_many = stumble  # type: ignore[method-assign]
        with pytest.raises(
            NetworkError, match=f"storing our presence record failed in hivemind: {type(error).__name__}"
        ):
            await each.announce(presence_of(crowd[0]))

    virtual_time.run(main())


def test_who_cancels_a_lookup_has_cancelled_it(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        node.before_get = lambda: asyncio.sleep(3600.0)
        lookup = asyncio.create_task(directory_over(node).lookup())
        await asyncio.sleep(1.0)
        lookup.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lookup

    virtual_time.run(main())


def test_a_record_that_nobody_takes_is_a_network_error(crowd: list[Identity]):
    async def main() -> None:
        each = directory_over(PretendedNode())
        with pytest.raises(NetworkError, match="no node stored our presence record"):
            await each.announce(replace(presence_of(crowd[0]), step=2))

    virtual_time.run(main())


def test_a_lone_node_keeps_its_record_and_cannot_look_up(crowd: list[Identity]):
    async def main() -> None:
        node = PretendedNode()
        node.protocol.routing_table.uid_to_peer_id = {}
        each = directory_over(node)
        await each.announce(presence_of(crowd[0]))
        assert list(node.held) == [presence_key(RUN, PresenceBucket(0, 0))]
        with pytest.raises(NetworkError, match="no other node is known"):
            await each.lookup()

    virtual_time.run(main())


@pytest.mark.net
def test_a_crowd_is_found_over_a_real_dht(crowd: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check two real nodes and the records of 120 peers, too many for one bucket, of which one runs."""
    monkeypatch.setattr(dht_protocol, "EACH", RateLimit(1e6, 1e6))  # one node announces them all

    async def main() -> None:
        nodes: list[Node] = []
        try:
            for name in ("first", "second"):
                identity = Identity.load_or_create(tmp_path / name)
                known = [f"{nodes[0].addresses[0]}/p2p/{nodes[0].peer_id}"] if nodes else []
                listen = ["/ip4/127.0.0.1/tcp/0"]
                nodes.append(await Node.start(identity, RUN, listen=listen, bootstraps=known, local=True))
            async with asyncio.timeout(30.0):
                while not all(node.has_company for node in nodes):
                    await asyncio.sleep(0.02)
            peers = crowd[:120]
            teller = directory_over(nodes[0].dht)
            for _ in range(2):  # the second lookup knows the size
                for identity in peers:
                    await teller.announce(presence_of(identity))
                assert await teller.lookup()
            assert not teller.sees_all

            newcomer = directory_over(nodes[1].dht)
            found: set[str] = set()
            for _ in range(12):
                found |= peers_of(await newcomer.lookup())
                assert 90 <= newcomer.size <= 150
            assert not newcomer.sees_all
            assert found == {identity.peer_id for identity in peers}
        finally:
            for node in nodes:
                await node.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# --- the cache --------------------------------------------------------------------------------------------------------


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
    flipped = good[0][:-2] + f"{255 - int(good[0][-2:], 16):02x}"
    damaged = [flipped, good[0][:-2], good[0] + "00", "zz", "", 7, {}, None]
    for text in ("", "{", "[[[]]]", '{"a": 1}', json.dumps(damaged)):
        path.write_text(text)
        assert cache.load(RUN) == []
    path.write_text(json.dumps([*damaged, *good]))
    assert len(cache.load(RUN)) == 1


# --- runs that require admission ----------------------------------------------------------------------------------


GATE_NOW = int(get_dht_time())


def gate_for(policy: str = "invite", **more: Any) -> Gate:
    return Gate(policy, RUN, AUTHOR.public_key().public_bytes_raw(), **more)


def certificate_of(identity: Identity) -> bytes:
    """Return a certificate as the invite issuer signs it now."""
    return people.certificate(
        people.Somebody(identity._key), by=people.credential(1000, GATE_NOW + 3600), at=GATE_NOW
    ).encode()


def sealed(presence: Presence, certificate: bytes) -> DHTRecord:
    return replace(record_of(presence), value=msgpack.packb(packed([wire.encode_presence(presence), certificate])))


def test_only_members_are_stored(identity: Identity, tmp_path: Path):
    other = Identity.load_or_create(tmp_path / "other.key")
    validator = PresenceValidator(RUN, gate_for())
    good = sealed(presence_of(identity), certificate_of(identity))
    assert validator.validate(good)
    rejected = {
        "as in an open run": record_of(presence_of(identity)),
        "no badge": sealed(presence_of(identity), b""),
        "another's badge": sealed(presence_of(other), certificate_of(identity)),
        "a forged presence": sealed(replace(presence_of(identity), step=2), certificate_of(identity)),
        "garbage": replace(good, value=msgpack.packb(packed([b"", b""]))),
        "too long": replace(good, value=msgpack.packb(packed([b"x" * 2000, certificate_of(identity)]))),
    }
    for what, record in rejected.items():
        assert not validator.validate(record), what
    assert not PresenceValidator(RUN).validate(good), "an open run has no such records"
    assert validator.gate is not None
    validator.gate.take(people.access_list(banned=(identity.peer_id,)).encode())
    assert not validator.validate(good), "a ban counts at once"


def test_an_allowlist_stores_who_is_on_it(identity: Identity, tmp_path: Path):
    other = Identity.load_or_create(tmp_path / "other.key")
    validator = PresenceValidator(
        RUN, gate_for("allowlist", access_list=people.access_list(admitted=(identity.peer_id,)))
    )
    assert validator.validate(sealed(presence_of(identity), b""))
    assert not validator.validate(sealed(presence_of(other), b""))


def test_members_find_members(crowd: list[Identity]):
    """Check also a node that stores anything: lookups verify again."""

    async def main() -> None:
        node = PretendedNode()
        node.honest = False
        for identity, certificate in (
            (crowd[0], certificate_of(crowd[0])),
            (crowd[1], b""),
            (crowd[2], certificate_of(crowd[0])),
        ):
            directory = directory_over(node)
            directory.gate = gate_for(certificate=certificate)
            await directory.announce(presence_of(identity))
        asker = directory_over(node)
        asker.gate = gate_for()
        assert peers_of(await asker.lookup()) == {crowd[0].peer_id}
        assert asker.gate.counts(crowd[0].peer_id, GATE_NOW)

    virtual_time.run(main())


# --- access list in the DHT ---------------------------------------------------------------------------------------


class AccessListNode:
    """A DHT with one node and a validator."""

    def __init__(self, gate: Gate) -> None:
        self.validator = PresenceValidator(RUN, gate)
        self.held: dict[int, ValueWithExpiration] = {}
        self.stored = 0

    async def get(self, key, latest):
        assert key == access_list_key(RUN)
        return ValueWithExpiration(self.held, 0.0) if self.held else None

    async def store(self, key, value, expiration_time, subkey):
        place = DHTID.generate(source=key).to_bytes()
        record = DHTRecord(place, msgpack.packb(subkey), msgpack.packb(value), expiration_time)
        if not self.validator.validate(record):
            return False
        self.stored += 1
        self.held[subkey] = ValueWithExpiration(value, expiration_time)
        return True


class Chance(Random):
    """Random generator that always draws the same number."""

    def __init__(self, drawn: float) -> None:
        super().__init__(0)
        self._drawn = drawn

    def random(self) -> float:
        return self._drawn


def shelf_over(node: Any, gate: Gate, news: list[int], drawn: float = 0.99) -> AccessListStore:
    return AccessListStore(lambda: node, gate, lambda: news.append(gate.access_list.serial), Chance(drawn))


def test_the_newest_rulings_reach_everybody_and_stay(monkeypatch: pytest.MonkeyPatch):
    clock = [get_dht_time()]
    for module in (directory, access_list_module):
        monkeypatch.setattr(module, "wall", lambda: clock[0])

    async def main() -> None:
        node, news = AccessListNode(gate_for()), []
        author = gate_for(access_list=people.access_list(serial=5, banned=(people.GUEST.peer,)))
        reader = gate_for()
        await shelf_over(node, reader, news).look()
        assert (node.stored, news) == (0, [])  # no access list exists, so there is nothing to store
        await shelf_over(node, author, []).look()
        await shelf_over(node, reader, news).look()
        assert (node.stored, news) == (1, [5])
        assert reader.access_list == author.access_list
        clock[0] += LIFETIME_S / 2 + 1.0
        await shelf_over(node, reader, news).look()  # the author is offline, and the record ages
        assert node.stored == 2
        node.held.clear()
        await shelf_over(node, reader, news).look()  # all nodes that stored it are gone
        assert node.stored == 3
        assert news == [5]

    asyncio.run(main())


def test_nobody_puts_other_rulings_on_the_shelf():
    async def main() -> None:
        current = people.access_list(serial=7, banned=(people.GUEST.peer,))
        node = AccessListNode(gate_for(access_list=current))
        until = get_dht_time() + 60.0
        rejected = {
            "older": (people.access_list(serial=6), 6, until),
            "forged": (people.access_list(serial=9, author=people.STRANGER.key), 9, until),
            "under another's number": (current, 8, until),
            "for too long": (current, 7, until + 2 * LIFETIME_S),
            "until no time": (current, 7, math.nan),
        }
        for what, (document, serial, expiration) in rejected.items():
            assert not await node.store(access_list_key(RUN), document.encode(), expiration, serial), what
        assert not await node.store(access_list_key(RUN), b"x" * 100_000, until, 7)
        assert await node.store(access_list_key(RUN), current.encode(), until, 7)

    asyncio.run(main())


def test_a_lying_node_lifts_no_ban():
    async def main() -> None:
        mine, news = gate_for(access_list=people.access_list(serial=7, banned=(people.GUEST.peer,))), []
        node = AccessListNode(mine)
        for document in (people.access_list(serial=6), people.access_list(serial=8, author=people.STRANGER.key)):
            node.held[document.serial] = ValueWithExpiration(document.encode(), get_dht_time() + 3000.0)
        node.held[99] = ValueWithExpiration("garbage", get_dht_time() + 3000.0)
        await shelf_over(node, mine, news).look()
        assert news == []
        assert mine.access_list.banned == (people.GUEST.peer,)
        assert node.stored == 1  # and puts the right ones back

    asyncio.run(main())


def test_a_node_that_claims_to_keep_the_rulings_does_not_keep_them_from_being_stored_for_ever():
    async def main() -> None:
        mine = gate_for(access_list=people.access_list(serial=7, banned=(people.GUEST.peer,)))
        node = AccessListNode(mine)
        node.held[7] = ValueWithExpiration(mine.access_list.encode(), get_dht_time() + 1e9)
        await shelf_over(node, mine, []).look()
        assert node.stored == 0
        await shelf_over(node, mine, [], drawn=0.0).look()
        assert node.stored == 1

    asyncio.run(main())


def test_what_hivemind_stumbles_over_is_a_network_error_here_too():
    class Stumbling:
        async def get(self, key, latest):
            raise AssertionError

        async def store(self, *_, **__):
            raise AssertionError

    async def main() -> None:
        shelf = shelf_over(Stumbling(), gate_for(access_list=people.access_list(serial=7)), [])
        with pytest.raises(NetworkError, match="the lookup failed in hivemind"):
            await shelf.look()
        with pytest.raises(NetworkError, match="storing the access list failed in hivemind"):
            await shelf.store()

    asyncio.run(main())


def test_a_silent_dht_is_a_network_error():
    class Silent:
        async def get(self, key, latest):
            await asyncio.sleep(1000.0)

    async def main() -> None:
        with pytest.raises(NetworkError, match="took more than"):
            await shelf_over(Silent(), gate_for(), []).look()

    virtual_time.run(main())
