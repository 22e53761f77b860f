"""A fake libp2p node that names a QUIC address of its choice in its identify answer, and nothing else.

It dials p2pd over TCP and speaks the least that identify needs: multistream-select, TLS 1.3 with a libp2p certificate,
yamux by ALPN (libp2p specifications: connections, tls, identify; hashicorp/yamux: spec.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import struct
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.ids import PeerId
from p2ptrain.net.address import varint
from p2ptrain.net.identity import peer_id_of

MULTISTREAM, TLS, IDENTIFY = b"/multistream/1.0.0", b"/tls/1.0.0", b"/ipfs/id/1.0.0"
_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_LISTEN_ADDRESS, _OBSERVED_ADDRESS = b"\x12", b"\x22"  # fields 2 and 4 of identify's message
_UDP, _QUIC_V1 = 273, 461  # github.com/multiformats/multiaddr, protocols.csv
_DATA, _WINDOW, _PING, _GO_AWAY = range(4)  # types of yamux frames
_SYN, _ACK, _FIN = 1, 2, 4


def quic_address(host: str, port: int) -> bytes:
    """Return the binary form of ``/ip4/HOST/udp/PORT/quic-v1``."""
    return b"\x04" + ipaddress.IPv4Address(host).packed + varint(_UDP) + port.to_bytes(2, "big") + varint(_QUIC_V1)


async def name_address(host: str, port: int, source: str, named: bytes) -> PeerId:
    """Dial p2pd from the address ``source``, name one address when it asks, hang up; return the fake node's id."""
    context, peer = _fresh_identity()
    reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
    try:
        opening = _line(MULTISTREAM) + _line(TLS)
        writer.write(opening)
        assert await reader.readexactly(len(opening)) == opening
        await writer.start_tls(context)
        identify = b"".join(field + varint(len(named)) + named for field in (_LISTEN_ADDRESS, _OBSERVED_ADDRESS))
        answer = _line(MULTISTREAM) + _line(IDENTIFY) + varint(len(identify)) + identify
        await _serve_identify(reader, writer, answer)
        await asyncio.sleep(0.5)  # until p2pd has noted what it read; it asks nothing else that would show that
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return peer


async def _serve_identify(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes) -> None:
    def send(kind: int, flags: int, stream: int, body: bytes = b"", length: int | None = None) -> None:
        writer.write(struct.pack("!BBHII", 0, kind, flags, stream, len(body) if length is None else length) + body)

    heard: dict[int, bytes] = {}
    while True:
        _, kind, flags, stream, length = struct.unpack("!BBHII", await reader.readexactly(12))
        if kind == _PING and flags & _SYN:
            send(_PING, _ACK, 0, length=length)
        if kind in (_DATA, _WINDOW) and flags & _SYN:
            send(_WINDOW, _ACK, stream, length=0)
        if kind == _DATA:
            heard[stream] = heard.get(stream, b"") + await reader.readexactly(length)
            if heard[stream].endswith(_line(IDENTIFY)):
                send(_DATA, _FIN, stream, answer)
                return await writer.drain()
        assert kind != _GO_AWAY


def _line(text: bytes) -> bytes:
    return bytes([len(text) + 1]) + text + b"\n"


def _fresh_identity() -> tuple[ssl.SSLContext, PeerId]:
    key, identity = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    raw, spki = serialization.Encoding.Raw, serialization.PublicFormat.SubjectPublicKeyInfo
    public = b"\x08\x01\x12\x20" + identity.public_key().public_bytes(raw, serialization.PublicFormat.Raw)
    peer = peer_id_of(public)
    assert peer is not None
    certified = key.public_key().public_bytes(serialization.Encoding.DER, spki)
    signature = identity.sign(b"libp2p-tls-handshake:" + certified)
    proof = b"".join(b"\x04" + bytes([len(each)]) + each for each in (public, signature))
    name = x509.Name([x509.NameAttribute(x509.NameOID.SERIAL_NUMBER, "1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
        .add_extension(x509.UnrecognizedExtension(_EXTENSION, b"\x30" + bytes([len(proof)]) + proof), critical=False)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["/yamux/1.0.0", "libp2p"])
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with tempfile.NamedTemporaryFile() as file:
        secret = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
        file.write(certificate.public_bytes(pem) + secret)
        file.flush()
        context.load_cert_chain(file.name)
    return context, peer
