"""p2pd speaks no TLS with strangers: it neither offers it nor completes a handshake where a stranger names ``/wss``."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from quic_namer import name_address

from p2ptrain.base.errors import NetworkError
from p2ptrain.net import address
from p2ptrain.net.address import varint
from p2ptrain.net.identity import Identity
from p2ptrain.net.p2pd import daemon as daemon_module
from p2ptrain.net.p2pd.daemon import Daemon

pytestmark = pytest.mark.net

LISTEN, STRANGER = "/ip4/127.0.0.1/tcp/0", "127.0.0.1"
_WSS = 478  # github.com/multiformats/multiaddr, protocols.csv
HELLO, TLS, REFUSAL = b"\x13/multistream/1.0.0\n", b"\x0b/tls/1.0.0\n", b"\x03na\n"


def website(folder: Path) -> Path:
    """Write a website's certificate, which signed itself, with its key; return the file."""
    key, file = ec.generate_private_key(ec.SECP256R1()), folder / "website.pem"
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "website")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(STRANGER))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
        .add_extension(host, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(certificate.public_bytes(Encoding.PEM) + secret)
    return file


async def request_after_dial(folder: Path, certificate: Path) -> bytes:
    """Return what p2pd sends to the website that a fake node names as its address; empty if it sends nothing."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.put_nowait(await reader.read(3))
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(serve, STRANGER, 0, ssl=context)
    host, port = server.sockets[0].getsockname()
    named = b"\x04" + ipaddress.IPv4Address(host).packed + varint(6) + port.to_bytes(2, "big") + varint(_WSS)
    daemon = await Daemon.start(Identity.load_or_create(folder / "identity.key").path, [LISTEN])
    try:
        async with asyncio.timeout(60):
            own = address.port_of(await daemon.own_addresses())
            peer = await name_address(STRANGER, own, STRANGER, named)
            while any(each.peer == peer for each in await daemon.connections()):
                await asyncio.sleep(0.02)
            with pytest.raises(NetworkError, match="wss"):
                await daemon.open_stream(peer, "/none")
        return b"" if heard.empty() else heard.get_nowait()
    finally:
        await daemon.close()
        server.close()


def test_p2pd_trusts_no_website_that_a_stranger_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = website(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asyncio.run(request_after_dial(tmp_path, certificate)) == b""


@pytest.mark.skipif(sys.platform == "darwin", reason="Go reads SSL_CERT_FILE everywhere but on macOS")
def test_with_the_systems_certificates_it_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake node is believed; otherwise the other test would prove nothing."""
    certificate, launched = website(tmp_path), daemon_module.launched
    trusting = {"SSL_CERT_FILE": str(certificate)}
    monkeypatch.setattr(daemon_module, "launched", lambda *command, **rest: launched(*command, **(rest | trusting)))
    assert asyncio.run(request_after_dial(tmp_path, certificate)) == b"GET"


def test_p2pd_offers_no_tls(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = await Daemon.start(Identity.load_or_create(tmp_path / "identity.key").path, [LISTEN])
        try:
            async with asyncio.timeout(60):
                port = address.port_of(await daemon.own_addresses())
                reader, writer = await asyncio.open_connection(STRANGER, port)
                writer.write(HELLO + TLS)
                assert await reader.readexactly(len(HELLO + REFUSAL)) == HELLO + REFUSAL
                writer.close()
        finally:
            await daemon.close()

    asyncio.run(main())
