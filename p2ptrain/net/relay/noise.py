"""Noise as libp2p uses it: the encrypted channel of a connection to a p2pd, opened without one (specification: noise).

``Noise_XX_25519_ChaChaPoly_SHA256`` (noiseprotocol.org, revision 34), no prologue::

    -> e        <- e, ee, s, es, payload        -> s, se, payload

A payload has the sender's libp2p key and its signature under the sender's static Noise key, so after the second message
the initiator knows who answers. Each message, also later, has its length ahead in two bytes.

``probe`` dials an address like an unknown peer. p2pd cannot do this, because it opens no second connection to a
connected peer. A TCP connection is not enough either: machines at home share a public address, and the router forwards
the port to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, key_of
from p2ptrain.net.identity import peer_id_of
from p2ptrain.net.relay import circuit_v2

PROBE_DEADLINE_S = 5.0
"""Timeout for three round trips; a firewall that drops packets exhausts it. Guess: measure successful probes."""

_MULTISTREAM, _NOISE, _YAMUX = b"\x13/multistream/1.0.0\n", b"\x07/noise\n", b"\x0d/yamux/1.0.0\n"
_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"  # as long as a hash, which it therefore stands for
_SIGNED_AHEAD = b"noise-libp2p-static-key:"
_KEY, _SIGNATURE = 1, 2  # fields of libp2p's NoiseHandshakePayload
_KEY_BYTES, _TAG_BYTES = 32, 16
_MAX_PLAIN_BYTES = 65_535 - _TAG_BYTES


class Cipher:
    """One direction of a channel: each message is encrypted under the next nonce."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._count = 0

    def encrypt(self, plain: bytes, data: bytes = b"") -> bytes:
        return self._cipher.encrypt(self._nonce(), plain, data)

    def decrypt(self, secret: bytes, data: bytes = b"") -> bytes:
        """Decrypt the next message. Raises ValueError if it was changed."""
        try:
            return self._cipher.decrypt(self._nonce(), secret, data)
        except InvalidTag:
            raise ValueError("a Noise message cannot be decrypted") from None

    def _nonce(self) -> bytes:
        self._count += 1
        return struct.pack("<IQ", 0, self._count - 1)


class Handshake:
    """The initiator's state of a handshake; ``answered`` must follow ``begin``, and ``finish`` it."""

    def __init__(self) -> None:
        self._ephemeral = X25519PrivateKey.generate()
        self._theirs = b""
        self._chain = self._hash = _NAME
        self._mix_hash(b"")
        self._cipher = Cipher(bytes(_KEY_BYTES))

    def begin(self) -> bytes:
        """Return the first message."""
        public = self._ephemeral.public_key().public_bytes_raw()
        self._mix_hash(public)
        self._mix_hash(b"")
        return public

    def answered(self, message: bytes) -> PeerId:
        """Return the peer that sent this second message. Raises ValueError if the message does not prove it."""
        ends = _KEY_BYTES, 2 * _KEY_BYTES + _TAG_BYTES
        self._theirs, static, payload = message[: ends[0]], message[ends[0] : ends[1]], message[ends[1] :]
        if len(payload) < _TAG_BYTES:
            raise ValueError("a Noise message is too short")
        self._mix_hash(self._theirs)
        self._mix_key(self._ephemeral, self._theirs)
        static = self._decrypt(static)
        self._mix_key(self._ephemeral, static)
        return owner(self._decrypt(payload), static)

    def finish(self, identity: Ed25519PrivateKey) -> tuple[bytes, Cipher, Cipher]:
        """Return the third message and the two directions' ciphers, ours first."""
        static = X25519PrivateKey.generate()
        public = static.public_key().public_bytes_raw()
        message = self._encrypt(public)
        self._mix_key(static, self._theirs)
        message += self._encrypt(proof(identity, public))
        ours, theirs = map(Cipher, _derived(self._chain, b""))
        return message, ours, theirs

    def _mix_hash(self, data: bytes) -> None:
        digest = Hash(SHA256())
        digest.update(self._hash + data)
        self._hash = digest.finalize()

    def _mix_key(self, ours: X25519PrivateKey, theirs: bytes) -> None:
        """Mix in a shared secret. Raises ValueError if it is zero, as for a point of small order."""
        self._chain, key = _derived(self._chain, ours.exchange(X25519PublicKey.from_public_bytes(theirs)))
        self._cipher = Cipher(key)

    def _encrypt(self, plain: bytes) -> bytes:
        secret = self._cipher.encrypt(plain, self._hash)
        self._mix_hash(secret)
        return secret

    def _decrypt(self, secret: bytes) -> bytes:
        plain = self._cipher.decrypt(secret, self._hash)
        self._mix_hash(secret)
        return plain


class NoiseChannel:
    """An encrypted channel; reads and writes like the asyncio streams below it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ours: Cipher, theirs: Cipher):
        self._reader = reader
        self._writer = writer
        self._ours = ours
        self._theirs = theirs
        self._read = bytearray()

    async def readexactly(self, size: int) -> bytes:
        """Read that many bytes. Raises OSError, EOFError and ValueError."""
        while len(self._read) < size:
            self._read += self._theirs.decrypt(await _receive(self._reader))
        found = bytes(self._read[:size])
        del self._read[:size]
        return found

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), _MAX_PLAIN_BYTES):
            _send(self._writer, self._ours.encrypt(data[start : start + _MAX_PLAIN_BYTES]))

    def abort(self) -> None:
        self._writer.transport.abort()


async def probe(host: str, port: int, deadline_s: float = PROBE_DEADLINE_S) -> PeerId:
    """Return the peer that answers. Raises NetworkError if there is no answer, or no libp2p node with Noise."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return (await greet(reader, writer))[1]
            finally:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        raise NetworkError("nobody answers") from None
    except ConnectionRefusedError:
        raise NetworkError("the connection is refused") from None
    except (OSError, EOFError) as error:
        raise NetworkError(f"no connection: {error}") from None
    except ValueError:
        raise NetworkError("another program answers") from None


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Handshake, PeerId]:
    """Negotiate Noise on a new connection and learn which peer answers. Raises OSError, EOFError and ValueError."""
    writer.write(_MULTISTREAM + _NOISE)
    if await reader.readexactly(len(_MULTISTREAM + _NOISE)) != _MULTISTREAM + _NOISE:
        raise ValueError("another program answers")
    handshake = Handshake()
    _send(writer, handshake.begin())
    return handshake, handshake.answered(await _receive(reader))


async def open_channel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: Ed25519PrivateKey
) -> NoiseChannel:
    """Open a channel that carries yamux, as the peer of this key. Raises OSError, EOFError and ValueError."""
    handshake, _ = await greet(reader, writer)
    message, ours, theirs = handshake.finish(identity)
    _send(writer, message)
    channel = NoiseChannel(reader, writer, ours, theirs)
    channel.write(_MULTISTREAM + _YAMUX)
    if await channel.readexactly(len(_MULTISTREAM + _YAMUX)) != _MULTISTREAM + _YAMUX:
        raise ValueError("p2pd does not speak yamux")
    return channel


def proof(identity: Ed25519PrivateKey, static: bytes) -> bytes:
    """Return the payload that proves that a static Noise key is the peer's."""
    key = b"\x08\x01\x12\x20" + identity.public_key().public_bytes_raw()
    return circuit_v2.field(_KEY, key) + circuit_v2.field(_SIGNATURE, identity.sign(_SIGNED_AHEAD + static))


def owner(payload: bytes, static: bytes) -> PeerId:
    """Return the peer that a payload proves to own a static Noise key. Raises ValueError if it proves nothing."""
    found = circuit_v2.fields(payload)
    key, signature = found.get(_KEY), found.get(_SIGNATURE)
    peer = peer_id_of(key) if isinstance(key, bytes) else None
    public = None if peer is None else key_of(peer)
    if peer is None or public is None or not isinstance(signature, bytes):
        raise ValueError("not a signed Ed25519 key")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _SIGNED_AHEAD + static)
    except InvalidSignature:
        raise ValueError("the signature of a Noise key does not hold") from None
    return peer


def _derived(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    keys = HKDF(SHA256(), 2 * _KEY_BYTES, salt=chain, info=None).derive(secret)
    return keys[:_KEY_BYTES], keys[_KEY_BYTES:]


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))


def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(2, "big") + message)
