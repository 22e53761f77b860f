"""Signed statements: bytes that anyone can store and verify later against a key. Pure.

A statement is a msgpack array of integers, texts, byte strings and arrays of them. Its signature (Ed25519, RFC 8032)
covers a purpose and the fields, so a statement never passes for another kind of statement, a presence record or a
manifest of the same key. Only the canonical encoding is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain.base.errors import RemoteError

Sign = Callable[[bytes, list[Any]], bytes]
"""Function that signs fields for a purpose with a key that the caller keeps."""

KEY_BYTES = 32
SIGNATURE_BYTES = 64

_MAX_ITEMS = 4096
"""Maximum items in one array: far more than any statement has, and little memory."""


def signature(key: Ed25519PrivateKey, purpose: bytes, fields: list[Any]) -> bytes:
    """Sign the fields for a purpose."""
    return key.sign(_covered(purpose, fields))


def holds(key: bytes, signed: bytes, purpose: bytes, fields: list[Any]) -> bool:
    """Return whether ``signed`` is the signature of ``key`` (32 bytes, public) over these fields for this purpose."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed, _covered(purpose, fields))
    except (InvalidSignature, ValueError):  # ValueError: not a key
        return False
    return True


def packed(fields: object) -> bytes:
    """Return the bytes of a statement, or of any part of one."""
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return body


def unpacked(body: bytes, most_bytes: int) -> list[Any]:
    """Parse the result of ``packed``. Raises RemoteError if it is too long or not canonical."""
    if len(body) > most_bytes:
        raise RemoteError(f"expected a statement of at most {most_bytes} bytes, got {len(body)}")
    try:
        fields = msgpack.unpackb(body, max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0)
        is_ours = type(fields) is list and packed(fields) == body
    except (ValueError, TypeError, OverflowError, RecursionError):  # msgpack's own exceptions are ValueErrors
        is_ours = False
    if not is_ours:
        raise RemoteError(f"expected a statement, got {body[:16].hex()}…")
    return list(fields)


def is_count(value: object, most: int = 2**53) -> bool:
    """Return whether a field is an integer from 0 to ``most``; booleans are not."""
    return type(value) is int and 0 <= value <= most


def is_blob(value: object, size: int) -> bool:
    """Return whether a field is a byte string of that size."""
    return type(value) is bytes and len(value) == size


def _covered(purpose: bytes, fields: list[Any]) -> bytes:
    return purpose + b"\0" + packed(fields)
