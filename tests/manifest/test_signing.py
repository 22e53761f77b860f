"""Signed manifests from untrusted sources: only the right one is accepted."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import PROTOCOL_VERSION, RunId
from p2ptrain.framing import MAX_MANIFEST_BYTES
from p2ptrain.manifest import Manifest, SignedManifest, genuine_run, preset, with_changes
from p2ptrain.manifest.document import canonical_json
from p2ptrain.manifest.signing import public_key_of, sign

few = settings(max_examples=50)
OWN_KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
SIGNED = sign(preset("demo", public_key_of(OWN_KEY)), OWN_KEY).to_bytes()


def refusal(data: bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        SignedManifest.from_bytes(data)
    return caught.value.problem


def test_round_trip(manifest: Manifest, key: Ed25519PrivateKey) -> None:
    signed = sign(manifest, key)
    again = SignedManifest.from_bytes(signed.to_bytes())
    assert again == signed
    again.verify(signed.run_id)


def test_signing_is_deterministic(manifest: Manifest, key: Ed25519PrivateKey) -> None:
    assert sign(manifest, key).to_bytes() == sign(manifest, key).to_bytes()


def test_another_run_is_refused_and_both_are_named() -> None:
    signed = SignedManifest.from_bytes(SIGNED)
    with pytest.raises(ManifestError) as caught:
        signed.verify(RunId("f" * 64))
    assert signed.run_id in caught.value.problem
    assert "f" * 64 in caught.value.problem


def test_a_foreign_key_does_not_sign(manifest: Manifest) -> None:
    with pytest.raises(ManifestError) as caught:
        sign(manifest, OWN_KEY)
    assert manifest.run.public_key in caught.value.problem
    assert public_key_of(OWN_KEY) in caught.value.problem


def test_a_changed_field_breaks_the_signature() -> None:
    changed = with_changes(SignedManifest.from_bytes(SIGNED).manifest, {"outer.inner_steps": 11})
    forged = SignedManifest(changed, json.loads(SIGNED)["signature"])
    assert "signature does not match" in refusal(forged.to_bytes())


@pytest.mark.parametrize("signature", ["", "zz", "00" * 64, "00" * 63])
def test_a_bad_signature_is_refused(signature: str) -> None:
    document = json.loads(SIGNED) | {"signature": signature}
    assert "signature does not match" in refusal(canonical_json(document))


def test_the_same_content_in_other_bytes_is_refused() -> None:
    assert "canonical" in refusal(json.dumps(json.loads(SIGNED)).encode())
    assert "canonical" in refusal(SIGNED + b"\n")
    assert "canonical" in refusal(SIGNED.replace(b'"seed":1', b'"seed":2,"seed":1'))
    assert "canonical" in refusal(SIGNED.replace(b'"gradient_clip":1.0', b'"gradient_clip":1'))


def test_a_field_left_to_its_default_is_refused() -> None:
    document = json.loads(SIGNED)
    del document["manifest"]["corpus"]["validation_fraction"]
    assert "canonical" in refusal(canonical_json(document))


def test_another_protocol_version_is_refused_by_number() -> None:
    document = json.loads(SIGNED)
    document["manifest"]["run"]["protocol"] = PROTOCOL_VERSION + 1
    document["manifest"]["novelty"] = {}
    assert f"protocol version {PROTOCOL_VERSION + 1}" in refusal(canonical_json(document))


def signed_by_another_p2ptrain(fields: dict[str, Any]) -> bytes:
    signature = OWN_KEY.sign(b"p2ptrain manifest\0" + canonical_json(fields)).hex()
    return canonical_json({"manifest": fields, "signature": signature})


@pytest.mark.parametrize(
    "change", ["another version", "an earlier version", "a new section", "a new word", "a field fewer"]
)
def test_nothing_is_to_be_mended_in_what_its_author_signed(change: str) -> None:
    fields = json.loads(SIGNED)["manifest"]
    match change:
        case "another version":
            fields["run"]["protocol"] += 1
        case "an earlier version":
            fields["run"] |= {"protocol": 8, "tokens_per_peer": fields["run"].pop("tokens")}
        case "a new section":
            fields["novelty"] = {}
        case "a new word":
            fields["training"]["optimizer"] = "novel"
        case "a field fewer":
            del fields["corpus"]["validation_fraction"]
    data = signed_by_another_p2ptrain(fields)
    with pytest.raises(ManifestError) as caught:
        SignedManifest.from_bytes(data)
    assert caught.value.remedy.startswith("Install the p2ptrain version of the run's author")
    assert genuine_run(data) == hashlib.sha256(canonical_json(fields)).hexdigest()


def test_genuine_is_what_the_author_signed_byte_for_byte() -> None:
    assert genuine_run(SIGNED) == SignedManifest.from_bytes(SIGNED).run_id
    document = json.loads(SIGNED)
    assert genuine_run(SIGNED + b" ") is None
    assert genuine_run(canonical_json(document | {"extra": 0})) is None
    assert genuine_run(canonical_json(document | {"signature": "00" * 64})) is None
    assert genuine_run(SIGNED.replace(b'"seed":1', b'"seed":2')) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"manifest":{},"signature":""}',
        b'{"manifest":[],"signature":""}',
        b'{"manifest":{"run":{"protocol":NaN}},"signature":""}',
        b"[" * 60_000,
        b"1" * 60_000,
        SIGNED[:-1],
        b'{"extra":0,' + SIGNED[1:],
        SIGNED.replace(b'"seed"', b'"\\ud800"'),
        SIGNED.replace(b'"outer"', b'"\\ud800"'),
        SIGNED.replace(b'"name":"demo"', b'"name":"\\ud800"'),
        SIGNED.replace(b'"LlamaForCausalLM"', b'"\\ud800"'),
        SIGNED.replace(b'"kind":"bytes"', b'"kind":[]'),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    assert refusal(data)
    assert genuine_run(data) is None


def test_the_size_cap_comes_before_parsing() -> None:
    assert f"at most {MAX_MANIFEST_BYTES:,}" in refusal(b"[" * (MAX_MANIFEST_BYTES + 1))


@few
@given(st.binary(max_size=100))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refusal(data)


@few
@given(position=st.integers(0, len(SIGNED) - 1), value=st.integers(0, 255))
def test_one_changed_byte_anywhere_is_refused(position: int, value: int) -> None:
    data = SIGNED[:position] + bytes([value]) + SIGNED[position + 1 :]
    if data != SIGNED:
        assert refusal(data)
