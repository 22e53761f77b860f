"""Signed statements: what the holder of a key said, in bytes that anybody may keep and check later. Pure.

A statement is a msgpack array of integers, texts, byte strings and arrays of them. Its signature (Ed25519, RFC 8032)
covers a purpose and the fields, so no statement of a key passes for another kind of statement, nor for a presence
record or a manifest of the same key. What strangers send is read only in the one spelling that we write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain.base.errors import RemoteError

Sign = Callable[[bytes, list[Any]], bytes]
"""Sign fields for a purpose, with a key that the caller keeps."""

KEY_BYTES = 32
SIGNATURE_BYTES = 64

_MAX_ITEMS = 4096
"""In one array: far more than any statement has, and little memory."""


def signature(key: Ed25519PrivateKey, purpose: bytes, fields: list[Any]) -> bytes:
    """Sign the fields for a purpose."""
    return key.sign(_covered(purpose, fields))


def holds(key: bytes, signed: bytes, purpose: bytes, fields: list[Any]) -> bool:
    """Whether ``signed`` is the signature of ``key`` (32 bytes, public) under these fields for this purpose."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed, _covered(purpose, fields))
    except (InvalidSignature, ValueError):  # ValueError: these bytes are no key
        return False
    return True


def packed(fields: list[Any]) -> bytes:
    """The bytes of a statement."""
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return body


def unpacked(body: bytes, most_bytes: int) -> list[Any]:
    """Inverse of ``packed``; RemoteError for what is longer, or is not what ``packed`` writes."""
    if len(body) > most_bytes:
        raise RemoteError(f"a statement of {len(body)} bytes where {most_bytes} are allowed")
    try:
        fields = msgpack.unpackb(body, max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0)
        is_ours = type(fields) is list and packed(fields) == body
    except (ValueError, TypeError, OverflowError, RecursionError):  # msgpack's own exceptions are ValueErrors
        is_ours = False
    if not is_ours:
        raise RemoteError(f"a statement was due, not {body[:16].hex()}…")
    return list(fields)


def is_count(value: object, most: int = 2**53) -> bool:
    """Whether a field is a whole number from 0 to ``most``; True and False are none."""
    return type(value) is int and 0 <= value <= most


def is_blob(value: object, size: int) -> bool:
    """Whether a field is a byte string of that size."""
    return type(value) is bytes and len(value) == size


def _covered(purpose: bytes, fields: list[Any]) -> bytes:
    return purpose + b"\0" + packed(fields)
