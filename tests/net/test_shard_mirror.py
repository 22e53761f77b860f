"""Mirrors of shards: folders, web servers on loopback, a data set of the hub, and what they do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hub
import pytest

from p2ptrain.base.errors import NetworkError, RemoteError, UserError
from p2ptrain.net.shard_mirror import MOST_REDIRECTS, Mirror, _public_socket
from p2ptrain.net.throttle import Throttles
from p2ptrain.tokens.index import SHARD_BYTES
from p2ptrain.tokens.store import ShardStore

DATA = bytes(range(256)) * 900
DIGEST = hashlib.sha256(DATA).hexdigest()
PATH = f"{DIGEST[:2]}/{DIGEST}"


@contextmanager
def web(answers: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve these statuses, headers and bodies by path; yield the address and the headers of requests."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append({"path": self.path, **self.headers})
            status, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def fetch(mirror: Mirror, digest: str = DIGEST) -> bytes | None:
    return asyncio.run(mirror.fetch(digest))


def test_a_folder_may_be_a_store_or_a_run(tmp_path: Path) -> None:
    ShardStore(tmp_path / "mirror").add(DIGEST, DATA)
    ShardStore(tmp_path / "run" / "shards").add(DIGEST, DATA)
    (tmp_path / "run" / "files").mkdir()
    (tmp_path / "run" / "files" / ("ab" * 32)).write_bytes(b"index")
    for name in ("mirror", "run"):
        assert fetch(Mirror(str(tmp_path / name), is_own=False)) == DATA
    assert fetch(Mirror(str(tmp_path / "run"), is_own=False), "ab" * 32) == b"index"
    assert fetch(Mirror(str(tmp_path / "mirror"), is_own=False), "ab" * 32) is None
    assert fetch(Mirror(str(tmp_path / "nowhere"), is_own=False)) is None


def test_a_web_server_serves_a_store_as_it_is() -> None:
    rates, sizes = Throttles(), list[int]()
    with web({f"/text/{PATH}": (200, {}, DATA)}) as (address, asked):
        mirror = Mirror(f"{address}/text/", True, rates)
        assert asyncio.run(mirror.fetch(DIGEST, sizes.append)) == DATA
        assert fetch(mirror, "ab" * 32) is None
    assert asked[0]["Accept-Encoding"] == "identity"  # else a server could send more than it says
    assert sizes[-1] == len(DATA) == rates.down.total_bytes


def test_redirects_are_followed_within_bounds() -> None:
    with web({f"/{PATH}": (302, {"Location": "/elsewhere"}, b""), "/elsewhere": (200, {}, DATA)}) as (address, _):
        assert fetch(Mirror(address, True)) == DATA
    with web({f"/{PATH}": (302, {"Location": f"/{PATH}"}, b"")}) as (address, asked):
        with pytest.raises(NetworkError, match="redirects too often"):
            fetch(Mirror(address, True))
        assert len(asked) == 1 + MOST_REDIRECTS


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}, b""),
        (302, {}, b""),
        (200, {"Content-Length": "1000"}, b"less"),
        (302, {"Location": "http://[::"}, b""),
        (302, {"Location": "file:///etc/passwd"}, b""),
    ],
)
def test_a_broken_web_server_is_a_failure_of_the_network(answer: tuple[int, dict[str, str], bytes]) -> None:
    with web({f"/{PATH}": answer}) as (address, _), pytest.raises(NetworkError):
        fetch(Mirror(address, True))


def test_nobody_listens() -> None:
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:9"):
        fetch(Mirror("http://127.0.0.1:9", True))


def test_more_than_a_shard_is_refused() -> None:
    with web({f"/{PATH}": (200, {}, bytes(SHARD_BYTES + 1))}) as (address, _), pytest.raises(RemoteError, match="more"):
        fetch(Mirror(address, True))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "192.168.1.1", "[::1]", "169.254.169.254"])
def test_a_strangers_mirror_does_not_reach_the_owners_network(host: str) -> None:
    with pytest.raises(NetworkError):
        fetch(Mirror(f"https://{host}:1/", is_own=False))


@pytest.mark.parametrize(
    ("host", "is_public"),
    [
        ("8.8.8.8", True),
        ("10.0.0.1", False),
        ("2001:4860:4860::8888", True),
        ("fd00::1", False),
        ("64:ff9b::8.8.8.8", True),
        ("64:ff9b::192.168.1.1", False),
        ("64:ff9b::127.0.0.1", False),
        ("64:ff9b:1::8.8.8.8", False),
        ("2002:c0a8:101::1", False),
        ("::ffff:192.168.1.1", False),
        ("::192.168.1.1", False),
    ],
)
def test_an_address_that_a_router_translates_is_as_public_as_what_it_becomes(host: str, is_public: bool) -> None:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    opening = contextlib.nullcontext() if is_public else pytest.raises(OSError, match="not on the internet")
    with opening:
        _public_socket((kind, socket.SOCK_STREAM, 0, "", (host, 443))).close()


@pytest.mark.parametrize("where", ["http://example.org", "ftp://example.org", "https://", "hf:", "hf:name", "hf:a/b/c"])
def test_other_places_are_refused_at_once(where: str) -> None:
    with pytest.raises(UserError, match="no mirror of the form"):
        Mirror(where, is_own=False)


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub.serving({PATH: DATA}, "datasets", "someone/text") as served:
        hub.use(served.url, tmp_path, monkeypatch)
        mirror = Mirror(f"hf:someone/text@{hub.REVISION}", is_own=True)
        assert fetch(mirror) == DATA
        assert fetch(mirror, "ab" * 32) is None
