"""The key file, the peer id and signatures."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.base.errors import HomeError
from p2ptrain.base.ids import PeerId, RunId, key_of, multihash
from p2ptrain.net.identity import Identity, verify
from p2ptrain.swarm.messages import PeerState, Presence

# A fixed seed and its public key; tests/net/test_network.py compares our peer ids with p2pd's.
SEED = bytes(range(32))
PUBLIC = bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8")


def presence_of(identity: Identity) -> Presence:
    place = "/ip4/203.0.113.7/tcp/31337"
    return Presence(identity.peer_id, RunId("ab" * 32), (place,), PeerState.TRAINING, 1, 2.0, True, "fox", 1.7e9, 60.0)


def test_an_identity_is_created_once_and_found_again(tmp_path: Path):
    path = tmp_path / "home" / "identity.key"
    created = Identity.load_or_create(path)
    raw = path.read_bytes()
    assert Identity.load_or_create(path).peer_id == created.peer_id
    assert path.read_bytes() == raw
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_a_peer_id_is_the_multihash_of_the_public_key(tmp_path: Path):
    path = tmp_path / "identity.key"
    path.write_bytes(bytes.fromhex("08011240") + SEED + PUBLIC)
    identity = Identity.load_or_create(path)
    assert identity.peer_id.startswith("12D3KooW")
    assert multihash(identity.peer_id) == bytes.fromhex("002408011220") + PUBLIC


@pytest.mark.parametrize("raw", [b"", b"garbage", bytes.fromhex("08011240") + SEED + SEED, bytes(68), bytes(5000)])
def test_a_damaged_key_is_refused_and_kept(tmp_path: Path, raw: bytes):
    path = tmp_path / "identity.key"
    path.write_bytes(raw)
    with pytest.raises(HomeError, match="not an identity key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == raw


def test_an_unreadable_key_is_refused(tmp_path: Path):
    path = tmp_path / "identity.key"
    path.mkdir()
    with pytest.raises(HomeError, match="cannot be read"):
        Identity.load_or_create(path)


def test_a_home_that_cannot_be_written_is_the_owners_business(tmp_path: Path):
    (tmp_path / "home").write_text("a file where a folder is due")
    with pytest.raises(HomeError):
        Identity.load_or_create(tmp_path / "home" / "identity.key")


def test_a_signature_holds_for_what_was_signed_only(tmp_path: Path):
    mine = Identity.load_or_create(tmp_path / "mine")
    other = Identity.load_or_create(tmp_path / "other")
    signed = mine.sign(presence_of(mine))
    assert verify(signed)
    for forged in (
        replace(signed, step=2),
        replace(signed, addresses=()),
        replace(signed, state=PeerState.LEAVING),
        replace(signed, peer=other.peer_id),
        replace(signed, signature=b""),
        replace(signed, signature=bytes(64)),
        replace(signed, peer=PeerId("no peer id")),
        replace(signed, peer=PeerId("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")),
    ):
        assert not verify(forged)


def test_nobody_signs_for_another(tmp_path: Path):
    mine = Identity.load_or_create(tmp_path / "mine")
    with pytest.raises(ValueError, match="cannot sign"):
        mine.sign(replace(presence_of(mine), peer=PeerId("12D3KooWother")))


def test_the_key_stays_out_of_logs(tmp_path: Path):
    assert "Ed25519" not in repr(Identity.load_or_create(tmp_path / "key"))


@pytest.mark.parametrize(
    "spoil", [lambda p: p + " ", lambda p: " " + p, lambda p: p + "1", lambda p: p + "é", lambda p: p * 9]
)
def test_a_peer_id_has_one_spelling(tmp_path: Path, spoil):
    peer = Identity.load_or_create(tmp_path / "identity.key").peer_id
    assert key_of(peer) is not None
    assert key_of(spoil(peer)) is None
