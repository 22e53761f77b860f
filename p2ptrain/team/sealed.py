"""Encrypted, authenticated line between two computers of a team, over TCP, with a key that both know.

::

    rank                                                     leader
    greeting | u8 purpose | u16 rank | 16 generation | X  -->
                                        <--  Y | HMAC(key, "leader" | hello | Y)
    HMAC(key, "rank" | hello | Y)         -->
    records: u32 length | ChaCha20-Poly1305(direction's key, counter, plaintext, length)

X and Y are fresh X25519 public keys and serve as the nonces of both challenges. The key of each direction is
HMAC(key, direction | hello | Y | X25519(x, Y)), so a key that is stolen later opens no recorded line. HMAC is
HMAC-SHA-256. A record that was altered, repeated, reordered or cut ends the line.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.team.connection import Blob, receive_all, send_all, wait_for_byte

GREETING_S = 5.0
"""Deadline of each handshake."""
MOST_RECORD_BYTES = 1 << 18
GENERATION_BYTES = 16
NO_GENERATION = bytes(GENERATION_BYTES)

_GREETING = b"p2ptrain LAN 1\n"
_HELLO = struct.Struct(f">{len(_GREETING)}sBH{GENERATION_BYTES}s32s")
_LENGTH = struct.Struct(">I")
_TAG_BYTES, _PROOF_BYTES = 16, 32


class Purpose(IntEnum):
    """What a line is for."""

    CONTROL = 1
    """Between a leader and the ``p2ptrain rank`` command of another computer, as long as both run."""
    STORE = 2
    """Rendezvous of one generation."""
    SHARD = 3
    """Requests to one rank's shard."""


@dataclass(frozen=True, slots=True)
class Hello:
    purpose: Purpose
    rank: int
    generation: bytes = NO_GENERATION


class WrongKeyError(NetworkError):
    """The other side does not know the team's key."""


class SealedLine:
    """``connection.ByteLine`` with encryption. Owns its socket. One thread sends while another receives."""

    def __init__(self, connection: socket.socket, sending_key: bytes, receiving_key: bytes) -> None:
        self._receiving = connection
        self._sending = connection.dup()  # a timeout of its own
        self._seal = ChaCha20Poly1305(sending_key)
        self._unseal = ChaCha20Poly1305(receiving_key)
        self._sent = self._received = 0
        self._opened = memoryview(b"")
        """Bytes of the last record that nobody has read."""

    def send(self, data: Blob, until: float) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), MOST_RECORD_BYTES):
            plain = view[start : start + MOST_RECORD_BYTES]
            header = _LENGTH.pack(len(plain) + _TAG_BYTES)
            nonce, self._sent = self._sent.to_bytes(12, "big"), self._sent + 1
            send_all(self._sending, header + self._seal.encrypt(nonce, bytes(plain), header), until)

    def receive(self, size: int, until: float) -> bytearray:
        data, filled = bytearray(size), 0
        while filled < size:
            if not self._opened:
                self._read_record(until)
            taken = self._opened[: size - filled]
            data[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._opened = self._opened[len(taken) :]
        return data

    def wait(self) -> None:
        if not self._opened:
            wait_for_byte(self._receiving)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._receiving.shutdown(socket.SHUT_RDWR)
        self._receiving.close()
        self._sending.close()

    @property
    def other_host(self) -> str:
        """Address of the other side."""
        try:
            return str(self._receiving.getpeername()[0])
        except OSError:
            return "a computer that has gone"

    @property
    def own_host(self) -> str:
        """Address of this side. Raises NetworkError if the line has ended."""
        try:
            return str(self._receiving.getsockname()[0])
        except OSError as error:
            raise NetworkError(f"the line has ended: {error}") from error

    def _read_record(self, until: float) -> None:
        header = bytes(receive_all(self._receiving, _LENGTH.size, until))
        (length,) = _LENGTH.unpack(header)
        if not _TAG_BYTES < length <= MOST_RECORD_BYTES + _TAG_BYTES:
            raise RemoteError(f"a record of {length} bytes is beyond the limits")
        nonce, self._received = self._received.to_bytes(12, "big"), self._received + 1
        try:
            opened = self._unseal.decrypt(nonce, bytes(receive_all(self._receiving, length, until)), header)
        except InvalidTag:
            raise RemoteError("a record of a team's line was altered on its way") from None
        self._opened = memoryview(opened)


def dial_leader(host: str, port: int, key: bytes, hello: Hello, timeout_s: float = GREETING_S) -> SealedLine:
    """Connect to a leader. Raises NetworkError, and WrongKeyError if it has another key."""
    until, own = time.monotonic() + timeout_s, X25519PrivateKey.generate()
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise NetworkError(f"{host}:{port} does not answer: {error.strerror or error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        packed = _HELLO.pack(
            _GREETING, hello.purpose, hello.rank, hello.generation, own.public_key().public_bytes_raw()
        )
        send_all(connection, packed, until)
        answer = bytes(receive_all(connection, 32 + _PROOF_BYTES, until))
        other, theirs = answer[:32], answer[32:]
        if not hmac.compare_digest(theirs, _mac(key, b"leader", packed, other)):
            raise WrongKeyError(f"the leader at {host}:{port} has another key")
        send_all(connection, _mac(key, b"rank", packed, other), until)
        shared = _shared(own, other)
        return SealedLine(connection, *(_mac(key, each, packed, other, shared) for each in (b"up", b"down")))
    except BaseException:
        connection.close()
        raise


def accept_rank(connection: socket.socket, key_of: Callable[[Hello], bytes | None]) -> tuple[Hello, SealedLine]:
    """Greet a rank that has connected; the connection is closed on any error.

    Args:
        key_of: returns the key for a hello; None: nobody is expected there.

    Raises NetworkError, RemoteError for an invalid hello, and WrongKeyError.
    """
    until, own = time.monotonic() + GREETING_S, X25519PrivateKey.generate()
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        packed = bytes(receive_all(connection, _HELLO.size, until))
        hello, other = decode_hello(packed)
        key = key_of(hello)
        if key is None:
            raise NetworkError("nobody is expected there")
        mine = own.public_key().public_bytes_raw()
        send_all(connection, mine + _mac(key, b"leader", packed, mine), until)
        try:
            theirs = bytes(receive_all(connection, _PROOF_BYTES, until))
        except NetworkError:
            raise WrongKeyError("the other side has another key, or left") from None
        if not hmac.compare_digest(theirs, _mac(key, b"rank", packed, mine)):
            raise WrongKeyError("the other side has another key")
        shared = _shared(own, other)
        return hello, SealedLine(connection, *(_mac(key, each, packed, mine, shared) for each in (b"down", b"up")))
    except OSError as error:
        connection.close()
        raise NetworkError(str(error)) from error
    except BaseException:
        connection.close()
        raise


def decode_hello(packed: bytes) -> tuple[Hello, bytes]:
    """Return a hello and the public key in it. Raises RemoteError."""
    if len(packed) != _HELLO.size:
        raise RemoteError(f"a hello of {len(packed)} bytes instead of {_HELLO.size}")
    greeting, purpose, rank, generation, public = _HELLO.unpack(packed)
    if greeting != _GREETING:
        raise RemoteError("not the greeting of this version of p2ptrain")
    try:
        return Hello(Purpose(purpose), rank, generation), public
    except ValueError:
        raise RemoteError(f"no line has purpose {purpose}") from None


def generation_key(team_key: bytes, generation: bytes) -> bytes:
    """Return the key of the lines of one generation's rank processes."""
    return _mac(team_key, b"generation", generation)


def _shared(own: X25519PrivateKey, other: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise RemoteError("not a public key") from error


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA-256 over parts of fixed lengths, of which the first, a label, ends with a zero."""
    label, *others = parts
    return hmac.new(key, b"\0".join((label, b"".join(others))), hashlib.sha256).digest()
