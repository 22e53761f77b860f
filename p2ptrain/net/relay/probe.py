"""A probe that dials an address like an unknown peer: TCP, libp2p's protocol negotiation and its TLS handshake.

p2pd cannot do this, because it opens no second connection to a connected peer. A successful TCP connection is not
enough either: machines at home share a public address, and the router forwards the port to one of them. The probe
therefore completes the handshake up to the certificate, which holds the peer id and is signed by it (libp2p
specification, tls), and disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.net.identity import peer_id_of, public_key

PROBE_DEADLINE_S = 5.0
"""Timeout for four round trips; a firewall that drops packets exhausts it. Guess: measure successful probes."""

_HELLO = b"\x13/multistream/1.0.0\n"
_TLS = b"\x0b/tls/1.0.0\n"
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_AHEAD = b"libp2p-tls-handshake:"
_NO_PROOF = (
    ValueError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""Exceptions that an invalid certificate may raise; few of them are ValueErrors."""


async def probe(host: str, port: int, deadline_s: float = PROBE_DEADLINE_S) -> PeerId:
    """Return the peer that answers. Raises NetworkError if there is no answer, or no libp2p node with TLS."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_HELLO + _TLS)
                if await reader.readexactly(len(_HELLO + _TLS)) != _HELLO + _TLS:
                    raise NetworkError("another program answers")
                await writer.start_tls(_context(), server_hostname=None)
                certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            finally:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        raise NetworkError("nobody answers") from None
    except ConnectionRefusedError:
        raise NetworkError("the connection is refused") from None
    except (OSError, EOFError) as error:  # ssl.SSLError is an OSError
        raise NetworkError(f"no connection: {error}") from None
    peer = owner(certificate or b"")
    if peer is None:
        raise NetworkError("another program answers")
    return peer


def owner(certificate: bytes) -> PeerId | None:
    """Return the peer that a libp2p certificate (DER) names; None if its signature is invalid."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        extension = parsed.extensions.get_extension_for_oid(_EXTENSION).value
        if not isinstance(extension, x509.UnrecognizedExtension):
            return None
        key, signature = _signed_key(extension.value)
        signed = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        peer = peer_id_of(key)
        verifier = None if peer is None else public_key(peer)
        if verifier is None:
            return None
        verifier.verify(signature, _SIGNED_AHEAD + signed)
    except _NO_PROOF:
        return None
    return peer


def _signed_key(raw: bytes) -> tuple[bytes, bytes]:
    """Decode ``SEQUENCE { publicKey OCTET STRING, signature OCTET STRING }`` (DER). Raises ValueError."""
    key_length = raw[3] if len(raw) > 3 else 0
    key, rest = raw[4 : 4 + key_length], raw[4 + key_length :]
    if raw[:3:2] != b"\x30\x04" or raw[1] != len(raw) - 2 or rest[:1] != b"\x04" or rest[1:2] != bytes([len(rest) - 2]):
        raise ValueError("not a signed Ed25519 key")
    return key, rest[2:]


def _context() -> ssl.SSLContext:
    """Return a client context that accepts any certificate; ``owner`` checks it instead."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["libp2p"])
    return context
