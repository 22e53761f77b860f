"""The page server over real HTTP on the loopback: who may read, that nothing can be written, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.base.errors import UserError
from p2ptrain.page import listen_address
from p2ptrain.page import server as page_server
from p2ptrain.page.contributors import MOST_CONTRIBUTORS, Contribution
from p2ptrain.page.listen_address import ListenAddress, listener_at
from p2ptrain.page.public import FIGURES, MOST_ROWS
from p2ptrain.page.samples import SampleText
from p2ptrain.page.server import (
    ASSETS,
    BACKLOG,
    COOKIE,
    MOST_CONNECTIONS,
    PUBLIC_AGES_S,
    PageServer,
)
from sim.page_thread import in_thread

if TYPE_CHECKING:
    from tests.page.conftest import Shown

PATIENCE_S = 20.0
"""Timeout, in seconds, for an answer that should be immediate."""
TOKEN = "a-token-for-tests"


class Answer:
    """A complete HTTP answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


def ask(port: int, path: str, *, method: str = "GET", **headers: str) -> Answer:
    """Send one request. Underscores in a header's name stand for dashes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return Answer(connection.getresponse())
    finally:
        connection.close()


@pytest.fixture
def guarded(shown: Shown) -> Shown:
    """Yield a page that requires a token."""
    shown.end()
    shown.serve(ListenAddress("0.0.0.0", 0, TOKEN))
    return shown


# --- contents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASSETS)
def test_the_page_is_served(shown: Shown, path: str) -> None:
    """Check each file's type, and headers against sniffing, framing and loading from elsewhere."""
    answer = ask(shown.port, f"/{path}")
    assert answer.status == 200
    assert answer.headers.get_content_type() == ASSETS[path][1]
    assert answer.body
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def test_the_status_is_the_document(shown: Shown) -> None:
    """Check that the status is the snapshot's document, and is not cached."""
    answer = ask(shown.port, "/status")
    assert answer.headers.get_content_type() == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.document["run"]["name"] == "tiny-stories"
    assert len(answer.document["peers"]) == 8


def test_the_status_is_compressed_for_those_elsewhere_who_take_that(guarded: Shown) -> None:
    """Check that remote clients that accept it get compression; the loopback and other clients do not."""
    key = f"Bearer {TOKEN}"
    plain = ask(guarded.port, "/status", Authorization=key)
    packed = ask(guarded.port, "/status", Authorization=key, Accept_Encoding="gzip, deflate")
    assert plain.headers["Content-Encoding"] is None
    assert packed.headers["Content-Encoding"] in ("gzip", "deflate")
    unpacked = zlib.decompress(packed.body, wbits=zlib.MAX_WBITS | 32)
    assert json.loads(unpacked) == plain.document
    assert len(packed.body) < len(plain.body) / 2
    with in_thread(PageServer(ListenAddress(), lambda: plain.document)) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        assert ask(port, "/status", Accept_Encoding="gzip").document == plain.document


def test_however_many_ask_the_document_is_made_now_and_then() -> None:
    """Check that a hundred requests at once cause a few snapshots."""
    made = []

    def snapshot() -> dict[str, Any]:
        made.append(threading.current_thread().name)
        return {"schema": 1}

    with in_thread(PageServer(ListenAddress(), snapshot)) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        answers = [ask(port, "/status").status for _ in range(100)]
    assert answers == [200] * 100
    assert len(made) < 50
    assert set(made) == {"page"}


def test_metrics_are_what_prometheus_reads(shown: Shown) -> None:
    """Check that the metrics parse, have only documented names, and omit peers that are gone."""
    shown.view.kind = "bootstrap"
    rows = list(shown.view.peers.values())
    shown.view.place(rows[:-1])
    shown.publish()
    text = ask(shown.port, "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {sample.name for family in families.values() for sample in family.samples}
    assert all(name.startswith("p2ptrain_") for name in samples)
    assert families["p2ptrain_peers"].samples[0].value == 7
    peers = {sample.labels["peer"] for sample in families["p2ptrain_peer_training_loss_nats"].samples}
    assert peers == {row.id[-6:] for row in rows[:-1]}


def test_a_nickname_cannot_forge_metrics(shown: Shown) -> None:
    """Check that quotes and line ends in a label are escaped."""
    first = next(iter(shown.view.peers))
    name = 'Eve"} 1\nforged_total 9\n\\'
    shown.view.peers[first] = replace(shown.view.peers[first], nickname=name)
    shown.publish()
    families = list(text_string_to_metric_families(ask(shown.port, "/metrics").body.decode()))
    assert "forged" not in {family.name for family in families}
    assert name in {sample.labels.get("nickname") for family in families for sample in family.samples}
    with_name = {sample.name for family in families for sample in family.samples if "nickname" in sample.labels}
    assert with_name == {"p2ptrain_peer_info"}, "a new nickname begins all series anew"


def test_two_ids_that_end_alike_are_two_series(shown: Shown) -> None:
    """Check ids with equal ends, which can be generated: a duplicate series would fail the whole scrape."""
    shown.view.kind = "bootstrap"
    first, second = list(shown.view.peers.values())[:2]
    shown.view.place([first, replace(second, id="12D3KooWother" + first.id[-6:])])
    shown.publish()
    families = text_string_to_metric_families(ask(shown.port, "/metrics").body.decode())
    samples = [(sample.name, *sample.labels.values()) for family in families for sample in family.samples]
    assert len(set(samples)) == len(samples)


@pytest.mark.parametrize("kind", ["peer", "bootstrap", "simulation"])
def test_only_what_one_peer_counts_is_a_counter(shown: Shown, kind: str) -> None:
    """Check that totals over peers are gauges: they fall if a peer leaves, which Prometheus would take for a reset."""
    shown.view.kind = kind  # type: ignore[assignment]  # one of its kinds
    shown.publish()
    families = text_string_to_metric_families(ask(shown.port, "/metrics").body.decode())
    counters = {family.name for family in families if family.type == "counter"}
    of_each = {
        f"p2ptrain_peer_{name}" for name in ("tokens", "exchanges", "exchanges_failed", "sent_bytes", "received_bytes")
    }
    assert of_each <= counters
    assert bool(counters - of_each) == (kind == "peer")


# --- missing paths ---------------------------------------------------------------------------------------------------

ELSEWHERE = (
    "/nothing",
    "/index.html",
    "/static/page.js",
    "/../server.py",
    "/%2e%2e/server.py",
    "/page.js/",
    "//status",
)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_unknown_paths_are_not_found(shown: Shown, path: str) -> None:
    """Check that only the page's own files are read from the disk, under their own names."""
    assert ask(shown.port, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/status", "/metrics"])
def test_nothing_can_be_written(shown: Shown, method: str, path: str) -> None:
    """Check that all methods except reading ones are rejected."""
    assert ask(shown.port, path, method=method).status == 405


# --- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.1:80", "localhost:8080", "[::1]:8080", "[::1]"])
def test_the_loopback_has_these_names(shown: Shown, host: str) -> None:
    """Check all names of the loopback, with a port and without."""
    assert ask(shown.port, "/status", Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_a_website_cannot_read_the_loopback(shown: Shown, host: str) -> None:
    """Check DNS rebinding: a name that points to 127.0.0.1 is refused."""
    answer = ask(shown.port, "/status", Host=host)
    assert answer.status == 403
    assert b"tiny-stories" not in answer.body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "0.0.0.0", ""])
@pytest.mark.parametrize("token", [TOKEN, "another"])
def test_where_names_are_given_a_website_that_knows_the_token_reads_nothing(
    shown: Shown, host: str, token: str
) -> None:
    """Check a public token, as in a compose file: its page is at the visitor's own 127.0.0.1."""
    shown.end()
    shown.serve(ListenAddress.parse("0.0.0.0:0", TOKEN, "127.0.0.1, LocalHost,[::1],"))
    for path in ("/", f"/status?token={token}", "/metrics"):
        answer = ask(shown.port, path, Host=host, Authorization=f"Bearer {token}")
        assert answer.status == 403
        assert answer.body == b"This host name is not allowed for this page.\n"
        assert "Set-Cookie" not in answer.headers
    for own in ("127.0.0.1:8080", "localhost", "LOCALHOST:80", "[::1]:8080"):
        assert ask(shown.port, "/status", Host=own, Authorization=f"Bearer {TOKEN}").status == 200
        assert ask(shown.port, "/status", Host=own).status == 401


def test_without_names_a_page_with_a_token_opens_by_any(guarded: Shown) -> None:
    """Check a page with a secret token: only its owner knows this computer's names."""
    key = f"Bearer {TOKEN}"
    assert ask(guarded.port, "/status", Host="my-server.example:8080", Authorization=key).status == 200


def test_the_loopback_opens_by_the_names_that_its_owner_gave(shown: Shown) -> None:
    """Check names from the owner, as for a proxy."""
    shown.end()
    shown.serve(ListenAddress.parse("0", "", "train.example"))
    assert ask(shown.port, "/status", Host="train.example").status == 200
    assert ask(shown.port, "/status").status == 403


@pytest.mark.parametrize("path", ["/", "/status", "/metrics", "/page.js", "/nothing"])
def test_without_the_token_nothing_is_told(guarded: Shown, path: str) -> None:
    """Check that without the token, existing and missing paths look alike."""
    answer = ask(guarded.port, path)
    assert answer.status == 401
    assert b"tiny-stories" not in answer.body


def test_the_token_opens_by_address_and_leaves_a_cookie(guarded: Shown) -> None:
    """Check that the printed address sets a cookie, that the cookie suffices, and that scripts cannot read it."""
    assert guarded.url.endswith(f"?token={TOKEN}")
    answer = ask(guarded.port, f"/?token={TOKEN}")
    assert answer.status == 200
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert ask(guarded.port, "/status", Cookie=cookie.split(";")[0]).status == 200


def test_the_token_opens_by_header(guarded: Shown) -> None:
    """Check the header that programs use."""
    assert ask(guarded.port, "/metrics", Authorization=f"Bearer {TOKEN}").status == 200


@pytest.mark.parametrize("wrong", ["", "another", TOKEN + "x", TOKEN[:-1], "é"])
def test_another_token_opens_nothing(guarded: Shown, wrong: str) -> None:
    """Check a wrong token of any characters, in every place."""
    assert ask(guarded.port, "/status", Authorization=f"Bearer {wrong}").status == 401
    assert ask(guarded.port, "/status", Cookie=f"{COOKIE}-{guarded.port}={wrong}").status == 401


def test_a_token_may_have_any_characters(shown: Shown) -> None:
    """Check that special characters of a token are quoted in the address and in the cookie."""
    shown.end()
    shown.serve(ListenAddress("0.0.0.0", 0, token := "a b&c=d;é+%41#"))
    assert shown.server.address == f"http://127.0.0.1:{shown.port}/"  # as this computer's browser reaches it
    assert shown.url.startswith(shown.server.address + "?token=")
    assert token not in shown.url
    answer = ask(shown.port, "/?" + shown.url.partition("?")[2])
    assert answer.status == 200
    assert ask(shown.port, "/status", Cookie=answer.headers["Set-Cookie"].split(";")[0]).status == 200


def test_pages_of_one_computer_have_cookies_of_their_own(guarded: Shown) -> None:
    """Check that cookies differ by port: browsers send a host's cookies to all its ports."""
    with in_thread(PageServer(ListenAddress("0.0.0.0", 0, "another"), dict)) as other:
        port = int(other.address.rstrip("/").rpartition(":")[2])
        cookies = [
            ask(guarded.port, f"/?token={TOKEN}").headers["Set-Cookie"].split(";")[0],
            ask(port, "/?token=another").headers["Set-Cookie"].split(";")[0],
        ]
        assert [ask(each, "/status", Cookie="; ".join(cookies)).status for each in (guarded.port, port)] == [200, 200]


def test_whoever_is_refused_gets_one_answer_a_connection(guarded: Shown) -> None:
    """Check that a refused client's connection is closed, so that it holds no file descriptor."""
    with socket.create_connection(("127.0.0.1", guarded.port), PATIENCE_S) as stranger:
        stranger.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        found = b""
        while got := stranger.recv(4096):
            found += got
    assert found.startswith(b"HTTP/1.1 401 ")


def test_connections_that_say_nothing_are_few_and_end(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check connections without a request: surplus ones are closed at once, the others after a timeout."""
    monkeypatch.setattr(page_server, "IDLE_S", 1.0)
    shown.end()
    shown.serve(ListenAddress("0.0.0.0", 0, TOKEN))
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(MOST_CONNECTIONS + BACKLOG + 8):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", shown.port), PATIENCE_S)))
        silent[0].sendall(b"GET /status HTTP/1.1\r\nHost: ")  # and never the rest
        with contextlib.suppress(ConnectionResetError):
            assert silent[-1].recv(1) == b""
        assert silent[0].recv(1) == b"", "half a request is not a request"
        for each in silent:  # once all have ended, their places are free
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
    assert ask(shown.port, "/status", Authorization=f"Bearer {TOKEN}").status == 200


def test_a_token_is_drawn_where_one_is_needed() -> None:
    """Check that two servers that need a token generate different ones."""
    with (
        in_thread(PageServer(ListenAddress("0.0.0.0"), dict)) as one,
        in_thread(PageServer(ListenAddress("0.0.0.0"), dict)) as other,
    ):
        drawn = {each.url.partition("?token=")[2] for each in (one, other)}
    assert len(drawn) == 2
    assert all(len(token) >= 16 for token in drawn)


# --- start and end ---------------------------------------------------------------------------------------------------


def test_its_end_ends_the_thread_and_frees_the_port(shown: Shown) -> None:
    port = shown.port
    shown.end()
    assert "page" not in {thread.name for thread in threading.enumerate()}
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@contextlib.contextmanager
def stuck(shown: Shown) -> Iterator[socket.socket]:
    """Ask for a large document, and read only its beginning."""
    shown.replace({"large": "x" * 20_000_000})
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(PATIENCE_S)
        reader.connect(("127.0.0.1", shown.port))
        reader.sendall(b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert reader.recv(100).startswith(b"HTTP/1.1 200")
        yield reader


def test_a_reader_that_reads_no_more_is_let_go(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "WRITE_S", 0.5)
    with stuck(shown) as reader:
        time.sleep(3.0)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := reader.recv(1 << 20):
                received += len(part)
        assert received < 20_000_000
    shown.publish()
    assert ask(shown.port, "/status").status == 200


def test_its_end_does_not_wait_for_who_reads_no_more(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the thread ends while a write waits."""
    monkeypatch.setattr(page_server, "STOP_S", 0.5)
    shown.end()
    shown.serve()
    with stuck(shown):
        shown.end()
        assert "page" not in {thread.name for thread in threading.enumerate()}


def test_an_occupied_port_is_said_by_name(shown: Shown) -> None:
    """Check the message: it names the address, and says what to do."""
    with (
        pytest.raises(UserError, match=f"127.0.0.1:{shown.port}") as caught,
        in_thread(PageServer(ListenAddress(port=shown.port), dict)),
    ):
        pass
    assert "0 for any free one" in caught.value.remedy


@pytest.mark.parametrize(
    "host",
    ["192.0.2.7", "no.such.name.invalid", "a..b"],  # an unassigned address, an unassigned name, and an invalid one
)
def test_an_address_that_is_none_of_this_computers_is_named(host: str) -> None:
    with pytest.raises(UserError, match=f"cannot be served at {host}:8080: ") as caught:
        listener_at(ListenAddress(host, 8080))
    assert "an address of this computer" in caught.value.remedy


@pytest.mark.parametrize(("host", "shown"), [("::", r"\[::\]"), ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost")])
def test_a_computer_without_an_address_family_says_so(monkeypatch: pytest.MonkeyPatch, host: str, shown: str) -> None:
    def refuse(family: int, kind: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(listen_address.socket, "socket", refuse)
    with pytest.raises(UserError, match=rf"at {shown}:8080: Address family not supported by protocol\."):
        listener_at(ListenAddress(host, 8080))


def test_a_snapshot_that_fails_does_not_end_it() -> None:
    """Check that the next snapshot works."""
    results = iter((KeyError("no figures yet"), {"schema": 1}))

    def snapshot() -> dict[str, Any]:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    with in_thread(PageServer(ListenAddress(), snapshot)) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        assert ask(port, "/status").status == 500
        assert ask(port, "/status").document == {"schema": 1}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("8080", ListenAddress("127.0.0.1", 8080)),
        ("0", ListenAddress()),
        ("0.0.0.0:80", ListenAddress("0.0.0.0", 80)),
        ("[::]:8080", ListenAddress("::", 8080)),
        (":8080", ListenAddress("127.0.0.1", 8080)),
    ],
)
def test_places_are_read(text: str, place: ListenAddress) -> None:
    """Check a port alone, and an address with a port."""
    assert ListenAddress.parse(text) == place


@pytest.mark.parametrize(
    "text", ["", "port", "127.0.0.1", "127.0.0.1:", "65536", "-1", "0.0.0.0:99999", "²", "٣", "1" * 5000]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    """Check that the message quotes the value."""
    with pytest.raises(UserError, match="is not an address for the page"):
        ListenAddress.parse(text)


# --- the public page -------------------------------------------------------------------------------------------------


@pytest.fixture
def public(shown: Shown) -> Shown:
    """Yield a page beyond this machine, with a token, whose public part everybody may read."""
    shown.end()
    shown.serve(ListenAddress("0.0.0.0", 0, TOKEN), is_public=True)
    return shown


@pytest.mark.parametrize("path", sorted(PUBLIC_AGES_S))
def test_everybody_may_read_the_public_page(public: Shown, path: str) -> None:
    """Check each public path without a token, its headers, and that it sets no cookie that a proxy would pass on."""
    for asked in (path, f"{path}?token={TOKEN}"):
        answer = ask(public.port, f"/{asked}")
        assert answer.status == 200
        assert answer.headers["Cache-Control"] == f"public, max-age={PUBLIC_AGES_S[path]}"
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Set-Cookie"] is None
    assert ask(public.port, f"/{path}").headers["Connection"] == "close"


@pytest.mark.parametrize("path", ["", "status", "metrics", "page.js", "run/", "run/metrics", "run/../status"])
def test_all_else_needs_the_token(public: Shown, path: str) -> None:
    assert ask(public.port, f"/{path}").status == 401


@pytest.mark.parametrize("path", ["run", "run/status"])
def test_without_the_option_nothing_is_public(shown: Shown, guarded: Shown, path: str) -> None:
    assert ask(guarded.port, f"/{path}").status == 401
    assert ask(guarded.port, f"/{path}", Authorization=f"Bearer {TOKEN}").status == 404


def test_the_public_page_is_only_at_the_allowed_names(shown: Shown) -> None:
    shown.end()
    shown.serve(ListenAddress("0.0.0.0", 0, TOKEN, ("run.example.org",)), is_public=True)
    assert ask(shown.port, "/run", Host="run.example.org").status == 200
    assert ask(shown.port, "/run", Host="evil.example.org").status == 403


def test_behind_a_proxy_on_this_computer_any_name_may_be_asked_for(shown: Shown) -> None:
    shown.end()
    shown.serve(ListenAddress(), is_public=True)
    assert ask(shown.port, "/run", Host="run.example.org").status == 200
    assert ask(shown.port, "/status", Host="run.example.org").status == 403


def test_a_chat_sees_a_title_and_a_description(public: Shown) -> None:
    """Check the tags, with a run's name that is not markup."""
    public.view.run = replace(public.view.run, name='"><script>alert(1)</script>')
    public.publish()
    page = ask(public.port, "/run").body.decode()
    assert "<script>alert" not in page
    assert '<meta property="og:title" content="&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;">' in page
    assert '<meta property="og:description" content="A language model that volunteers train together; 46 % of' in page
    assert "8 computers here now; held-out loss 1.987." in page


def test_the_public_document_has_nothing_private(public: Shown) -> None:
    """Check the public fields, and that no device, path, whole peer id, failure or partner is in it."""
    public.view.contributions.take(Contribution(next(iter(public.view.peers)), "Amber", 500, 60.0, 400, ("b",), 5.0))
    public.publish()
    answer = ask(public.port, "/run/status")
    assert set(answer.document) == {
        *("schema", "at", "run", "join", "total_peers", "figures", "contributions", "sample", "samples")
    }
    assert set(answer.document["figures"]) <= set(FIGURES)
    text = answer.body.decode()
    assert "Amber" in text
    for row in public.view.peers.values():
        assert row.id not in text
        assert f'"{row.device}"' not in text
    for row in public.view.failures:
        assert row.line not in text


def test_the_author_hides_words_and_peers_from_everybody_but_the_owner(shown: Shown) -> None:
    view, (first, second, third) = shown.view, list(shown.view.peers)[:3]
    view.samples.texts = [
        SampleText(5.0, first, 1, "", "A tale of a Rude Word, and more"),
        SampleText(5.0, second, 2, "", "A tale of a fox"),
        SampleText(5.0, third, 3, "", "A tale of a moon"),
    ]
    view.sample = view.samples.texts[2]
    for peer, name in ((first, "rude word 7"), (second, "Amber"), (third, "Basil")):
        view.contributions.take(Contribution(peer, name, 500, 60.0, 400, ("b",), 5.0))
    shown.publish()
    shown.end()
    shown.serve(ListenAddress("0.0.0.0", 0, TOKEN), is_public=True, hidden=("rude word", third))
    found = ask(shown.port, "/run/status").document
    assert [each["text"] for each in found["samples"]] == ["A tale of a fox"]
    assert found["sample"] is None
    assert {row["nickname"] for row in found["contributions"]["rows"]} == {"Amber", ""}
    assert "ude word" not in ask(shown.port, "/run").body.decode()
    own = ask(shown.port, "/status", Authorization=f"Bearer {TOKEN}").document
    assert (len(own["samples"]), own["sample"]["text"]) == (3, "A tale of a moon")


def test_a_large_table_is_cut_for_strangers(public: Shown) -> None:
    for each in range(MOST_CONTRIBUTORS):
        public.view.contributions.take(Contribution(f"peer-{each}", tokens=1000 - each))
    public.publish()
    found = ask(public.port, "/run/status").document["contributions"]
    whole = public.view.contributions.document(1, ())
    assert [row["tokens"] for row in found["rows"]] == [1000 - each for each in range(MOST_ROWS)]
    rest = sum(row["tokens"] for row in whole["rows"][MOST_ROWS:])
    assert found["others_tokens"] == whole["others_tokens"] + rest
