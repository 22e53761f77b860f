"""The signed form of a manifest, which bootstraps and peers serve, and a joining peer verifies.

A joining peer knows the RunId from its link. The RunId is a digest of the manifest, so bytes from any untrusted peer
are either the right manifest or rejected. The Ed25519 signature (RFC 8032) also proves that the holder of run.key
signed it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain.base.errors import ManifestError
from p2ptrain.base.ids import RunId
from p2ptrain.framing import MAX_MANIFEST_BYTES
from p2ptrain.manifest.document import (
    INSTALL_THEIRS,
    canonical_bytes,
    canonical_json,
    parse_data,
    run_id,
)
from p2ptrain.manifest.faults import shown
from p2ptrain.manifest.schema import Manifest

_DOMAIN = b"p2ptrain manifest\0"  # A purpose before the signed bytes keeps other signatures of the key from passing.
_ASK_AGAIN = "Ask the run's author for a new manifest or link."


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest and its author's signature, valid if it was made by ``sign`` or ``from_bytes``."""

    manifest: Manifest
    signature: str
    """Ed25519 signature of the domain and the canonical bytes: 128 hexadecimal digits."""

    @property
    def run_id(self) -> RunId:
        return run_id(self.manifest)

    def to_bytes(self) -> bytes:
        """Encode as canonical JSON ``{"manifest": …, "signature": …}``."""
        return canonical_json({"manifest": self.manifest.model_dump(), "signature": self.signature})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode untrusted bytes.

        Raises ManifestError if they are too long, not canonical, of another protocol version, against the schema, or
        have an invalid signature.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(
                f"The signed manifest has {len(data):,} bytes, but at most {MAX_MANIFEST_BYTES:,} are allowed.",
                _ASK_AGAIN,
            )
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):  # ValueError covers invalid UTF-8, invalid JSON and huge integers.
            document = None
        match document:
            case {"manifest": dict() as fields, "signature": str() as signature} if len(document) == 2:
                try:
                    signed = cls(parse_data(fields), signature)
                except ManifestError as error:
                    raise ManifestError(error.problem, _remedy(data, error.remedy)) from None
            case _:
                raise ManifestError(f"The signed manifest is damaged; it begins with {shown(data[:16])}.", _ASK_AGAIN)
        if signed.to_bytes() != data:
            raise ManifestError("The signed manifest is not in canonical form.", _remedy(data, _ASK_AGAIN))
        signed._check_signature()
        return signed

    def verify(self, expected_run_id: RunId) -> None:
        """Raise ManifestError unless this is the manifest of the expected run."""
        if self.run_id != expected_run_id:
            raise ManifestError(
                f"The manifest belongs to run {self.run_id}, but {expected_run_id} was requested.", _ASK_AGAIN
            )

    def _check_signature(self) -> None:
        try:
            _check(self.manifest.run.public_key, self.signature, canonical_bytes(self.manifest))
        except (InvalidSignature, ValueError):  # ValueError: the signature is not hexadecimal.
            raise ManifestError(
                f"The signature does not match the manifest and run.public_key {self.manifest.run.public_key}.",
                _ASK_AGAIN,
            ) from None


def genuine_run(data: bytes) -> RunId | None:
    """Return the run of a signed manifest, even if this p2ptrain cannot use it; None if the bytes are not genuine.

    Genuine bytes that ``from_bytes`` rejects were written by another version of p2ptrain.
    """
    try:
        document = json.loads(data) if len(data) <= MAX_MANIFEST_BYTES else {}
        manifest = canonical_json(document["manifest"])
        _check(document["manifest"]["run"]["public_key"], document["signature"], manifest)
        is_whole = len(document) == 2 and canonical_json(document) == data
    except (ValueError, LookupError, TypeError, RecursionError, InvalidSignature):
        return None
    return RunId(hashlib.sha256(manifest).hexdigest()) if is_whole else None


def _remedy(data: bytes, otherwise: str) -> str:
    """Return the remedy for a rejected manifest; a genuine one belongs to another version of p2ptrain."""
    return otherwise if genuine_run(data) is None else INSTALL_THEIRS


def _check(public_key: str, signature: str, manifest: bytes) -> None:
    """Verify a signature. Raises InvalidSignature, or ValueError if key or signature is not hexadecimal."""
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
    key.verify(bytes.fromhex(signature), _DOMAIN + manifest)


def public_key_of(key: Ed25519PrivateKey) -> str:
    """Return the value of ``run.public_key`` for this key."""
    return key.public_key().public_bytes_raw().hex()


def sign(manifest: Manifest, key: Ed25519PrivateKey) -> SignedManifest:
    """Sign a manifest; the result is deterministic. Raises ManifestError if the key is not the manifest's."""
    own = public_key_of(key)
    if own != manifest.run.public_key:
        raise ManifestError(
            f"run.public_key is {manifest.run.public_key}, but run.key is the secret half of {own}.",
            "Set run.public_key to the second value, or restore the run.key that belongs to the first.",
        )
    return SignedManifest(manifest, key.sign(_DOMAIN + canonical_bytes(manifest)).hex())
