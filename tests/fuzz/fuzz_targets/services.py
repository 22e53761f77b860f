"""Targets for the small services: requests of strangers, and their answers to us.

Each is a list of words in a frame, or weights in chunks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import msgpack
import people
import torch
import virtual_time

from bootstrap.swarm_view import SwarmView
from fuzz_targets.common import (
    NOW,
    PEER,
    PLACE,
    PRESENCE,
    RUN,
    SIGNED,
    BytesLink,
    BytesTransport,
    Silence,
    Target,
    frames,
    part,
    refusing,
    run,
    said,
)
from p2ptrain import framing
from p2ptrain.admission import Gate, InviteRegister, Refusal
from p2ptrain.base.errors import ManifestError, NetworkError, RemoteError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.codec import get
from p2ptrain.framing import FrameKind
from p2ptrain.host.payloads import Payloads, Snapshot
from p2ptrain.host.sketch import SKETCH_BYTES
from p2ptrain.manifest.signing import SignedManifest
from p2ptrain.net import (
    address,
    admission_service,
    figures_service,
    file_service,
    manifest_service,
    parallel_streams,
)
from p2ptrain.net.driver import at_once
from p2ptrain.net.links import StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.relay import dial_back
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import WeightServer
from p2ptrain.page.metrics import exposition
from p2ptrain.receipts import Receipt
from p2ptrain.swarm.events import Commit
from peer.contributions import Contributions
from peer.ledger import Ledger

OURS = RemoteError, NetworkError
"""Errors that may end a conversation: the callers and the transport of a service expect them."""
GUEST, ISSUER = people.GUEST, people.ISSUER

# --- reach --------------------------------------------------------------------------------------------------------


@refusing(*OURS)
def asked_about_reach(data: bytes) -> None:
    async def dial(host: str, port: int) -> PeerId:
        raise NetworkError("nobody is dialed")

    run(dial_back.answer(BytesLink(data), PLACE, dial_back.dial_limit(), dial, clock=lambda: 0.0, wall=lambda: 0.0))


@refusing(*OURS)
def told_about_reach(data: bytes) -> None:
    sight = run(dial_back.ask_to_look(BytesTransport(data), PEER, (), 31337))
    assert sight.place == "" or address.is_dialable(sight.place)
    assert sight.why.isprintable()
    assert len(sight.why) < 1000


# --- files --------------------------------------------------------------------------------------------------------


@refusing(*OURS)
def asked_for_file(data: bytes) -> None:
    run(file_service.FileServer({}, clock=lambda: 0.0).answer(BytesLink(data)))


@refusing(*OURS)
def told_file(data: bytes) -> None:
    have = bytearray()
    if run(file_service.download(BytesLink(data), "ab" * 32, have)):
        assert 0 < len(have) <= len(data)


# --- figures ------------------------------------------------------------------------------------------------------

MOST_DOCUMENT_BYTES = 100_000
"""Largest page with two peers' figures; 10,000 is usual."""


@refusing(*OURS)
def asked_for_figures(data: bytes) -> None:
    telling = {"loss": 2.0, "device": "cpu"}, [["failure", 1, NOW, "it broke"]]
    teller = figures_service.FiguresService(lambda: lambda serial: telling, clock=lambda: 0.0)
    run(teller.answer(BytesLink(data)))


@refusing(*OURS)
def told_figures(data: bytes) -> None:
    """Check figures through to a bootstrap's page and its Prometheus metrics."""
    answer = run(figures_service.ask_figures(BytesTransport(data), PEER, (), 0))
    if answer is None:
        return
    view = SwarmView(SIGNED, wall=lambda: NOW)
    view.meet([PRESENCE, replace(PRESENCE, peer=GUEST.peer)], None)
    for peer in (PEER, GUEST.peer, PEER):
        view.told(peer, *answer)
    document = view.document()
    assert len(json.dumps(document, allow_nan=False).encode()) < MOST_DOCUMENT_BYTES
    exposition(document)


# --- weights ------------------------------------------------------------------------------------------------------

SIZES = (8, 16)
"""Bytes of each fragment; each is one piece."""
ZEROS = [torch.zeros(size // 4) for size in SIZES]
PAYLOADS = Payloads([len(each) for each in ZEROS], get("fp32", 1024), None)
PAYLOADS.publish(Snapshot(1, tuple(ZEROS), tuple(ZEROS)))
DONORS = (PEER, GUEST.peer, ISSUER.peer)
GIVEN_BYTES = sum(SIZES) + len(SIZES) * SKETCH_BYTES
"""Bytes that a donor gives if it gives each piece and its sketch once."""


@refusing(*OURS)
def asked_for_copies(data: bytes) -> None:
    """Check requests for weights, from any peer and from one to which they were promised."""
    run(WeightServer(PAYLOADS, at_once, lambda: 0.0).give(BytesLink(data)))
    run(WeightServer(PAYLOADS, at_once, lambda: 0.0).answer(BytesLink(data)))


class Donor(BytesLink):
    """Donor that answers every request with these bytes and a valid digest."""

    def __init__(self, gives: bytearray, peer: PeerId) -> None:
        super().__init__(b"", peer)
        self._gives = gives

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        match msgpack.unpackb(body):
            case ["piece", number]:
                size = SIZES[number]
            case ["sketch", _, _]:
                size = SKETCH_BYTES
            case _:
                return
        self._rest += part(bytes(self._gives[:size]).ljust(size, b"\0"))
        del self._gives[:size]


def given_weights(data: bytes) -> bool:
    """Check any bytes on the streams, and well-formed pieces and sketches with these contents."""
    gives = {peer: bytearray(data[n * GIVEN_BYTES : (n + 1) * GIVEN_BYTES]) for n, peer in enumerate(DONORS)}
    _is_downloaded(lambda peer: BytesLink(data, peer))
    return _is_downloaded(lambda peer: Donor(gives[peer], peer))


def _is_downloaded(link: Callable[[PeerId], BytesLink]) -> bool:
    async def dial(peer: PeerId, addresses: Any) -> BytesLink:
        return link(peer)

    downloader = Downloader(dial, SIZES, at_once, Silence())
    with contextlib.suppress(*OURS):
        parts = virtual_time.run(downloader.download(link(PEER), dict.fromkeys(DONORS, ())))
        assert tuple(map(len, parts)) == SIZES
        with contextlib.suppress(RemoteError):
            PAYLOADS.check_weights(parts)
        return True
    return False


# --- receipts -----------------------------------------------------------------------------------------------------

RECEIPT = Receipt(GUEST.peer, ISSUER.peer, int(NOW), int(NOW) + 1, 3, 4, 1, 100, 10, 0).signed(RUN, ISSUER.state)


class NoLedger(Ledger):
    """Ledger that checks receipts instead of saving them."""

    def add(self, receipt: Receipt) -> None:
        assert receipt.is_signed(RUN)
        assert (receipt.peer, receipt.step, receipt.tokens) == (GUEST.peer, 3, 4)


def contributions() -> Contributions:
    """Return a side that has counted an exchange with the partner."""
    log = MemoryLog(1)
    found = Contributions(RUN, GUEST.peer, GUEST.state, NoLedger(Path("/none")), lambda: (3, 4), log, wall=lambda: NOW)
    found.exchanged(Commit(LinkId(ISSUER.peer, 1, outbound=True), 0.0, 0.5, inf, False, 100, 10))
    return found


@refusing(*OURS)
def asked_to_sign(data: bytes) -> None:
    link = BytesLink(data, ISSUER.peer)
    try:
        run(contributions().answer(link))
    finally:
        for _, answer in link.sent:
            [_, body, *_] = msgpack.unpackb(answer)
            assert Receipt.decode(body).exchanges == 1


@refusing(*OURS)
def told_receipt(data: bytes) -> None:
    run(contributions().ask(BytesTransport(data), ISSUER.peer))


# --- admission ----------------------------------------------------------------------------------------------------

CREDENTIAL = people.credential(uses=1000)


def gate() -> Gate:
    return Gate("invite", RUN, people.PUBLIC, access_list=people.access_list())


@refusing(*OURS)
def asked_about_admission(data: bytes) -> None:
    register = InviteRegister(RUN, ISSUER.peer)
    handler = admission_service.AdmissionHandler(gate(), register, ISSUER.state, wall=lambda: NOW)
    link = BytesLink(data, GUEST.peer)
    run(handler.answer(link))
    [(_, answer)] = link.sent
    assert len(answer) <= admission_service._MAX_ANSWER_BYTES
    assert register.encode()
    assert set().union(*register.guests.values()) <= {GUEST.peer}


@refusing(*OURS)
def told_access_list(data: bytes) -> None:
    ours = gate()
    is_newer = run(admission_service.ask_access_list(BytesTransport(data), ISSUER.peer, (), ours))
    assert is_newer == (ours.access_list != people.access_list())


@refusing(*OURS)
def told_certificate(data: bytes) -> None:
    answer = run(admission_service.come_in(BytesTransport(data), (), CREDENTIAL, gate(), GUEST.peer))
    assert isinstance(answer, Refusal) or gate().refusal(GUEST.peer, answer.encode(), people.NOW) is None


# --- manifests ----------------------------------------------------------------------------------------------------


@refusing(*OURS)
def asked_for_manifest(data: bytes) -> None:
    run(manifest_service.manifest_handler(RUN, SIGNED.to_bytes(), clock=lambda: 0.0)(BytesLink(data)))


@refusing(*OURS, ManifestError)
def told_manifest(data: bytes) -> None:
    run_id = SIGNED.run_id
    found = SignedManifest.from_bytes(run(manifest_service.ask(BytesTransport(data), PEER, (), run_id)))
    found.verify(run_id)
    assert found.manifest == SIGNED.manifest


# --- parallel streams ---------------------------------------------------------------------------------------------

TOKEN = bytes(range(parallel_streams.TOKEN_BYTES))


@refusing(*OURS)
def asked_for_a_lane(data: bytes) -> None:
    """Check an opened parallel stream: one that names its token is held, and gets no other answer."""
    node = parallel_streams.ParallelStreams(cast(Node, None))

    class Echoed(BytesLink):
        async def send(self, kind: int, body: bytes | memoryview) -> None:
            [(key, held)] = node._waiting.items()
            [lane] = held.values()
            assert key[0] == GUEST.peer
            assert data[framing.HEADER_BYTES :].startswith(bytes(body))
            lane.over.set()

    try:
        run(node._take(cast(StreamLink, Echoed(data, GUEST.peer))))
    finally:
        assert not node._waiting


@refusing(*OURS)
def told_of_lanes(data: bytes) -> None:
    link = parallel_streams.ParallelStreams(cast(Node, None)).of(cast(StreamLink, BytesLink(data)), ours=False)
    assert not run(link.open_parallel(parallel_streams.PARALLEL_FROM_BYTES))


# --- all targets --------------------------------------------------------------------------------------------------


def targets() -> dict[str, Target]:
    """Return the targets of this module by name."""
    sight = [PLACE, dial_back.DialOutcome.NO.value, "nobody answers", NOW]
    row = [["tokens", 300], ["loss", 2.0], ["step", 7], ["progress", 2000.0], ["device", "cpu"], ["sample", "Once"]]
    news = [
        ["exchange", 1, NOW, GUEST.peer, 0.5, 1000, 0.1, "direct"],
        ["failure", 2, NOW, "it broke"],
        ["checkpoint", 3, NOW, 4],
    ]
    invite, introduction = CREDENTIAL.invite.fields(), CREDENTIAL.introduce(RUN, GUEST.peer)
    certificate = people.certificate(by=CREDENTIAL)
    questions = {
        "asked_about_reach": (
            asked_about_reach,
            (said(["look", 1]), said(["near", ["/ip4/192.168.1.2/tcp/7"]])),
        ),
        "asked_for_figures": (asked_for_figures, (said(["figures", 0]),)),
        "asked_for_file": (asked_for_file, (said(["piece", bytes(32), 0], ["enough"]),)),
        "asked_for_copies": (asked_for_copies, (said(["sketch", 0, 7], ["piece", 1], ["enough"]),)),
        "asked_to_sign": (asked_to_sign, (said(["mine", 3, 4], ["receipt", RECEIPT.encode()]),)),
        "asked_about_admission": (
            asked_about_admission,
            (said(["rulings", 0]), said(["come", invite, introduction])),
        ),
        "asked_for_a_lane": (asked_for_a_lane, (said(["lane", TOKEN, 1]),)),
        "told_of_lanes": (told_of_lanes, (said(["lanes", b""]),)),
        "asked_for_manifest": (asked_for_manifest, (frames((FrameKind.MANIFEST_REQUEST, RUN.encode())),)),
    }
    answers = {
        "told_about_reach": (told_about_reach, (said(sight),)),
        "told_file": (told_file, (said(["piece", 0]), said(["piece", 3]) + part(b"abc"))),
        "told_figures": (told_figures, (said(["figures", row, news]), said(["kept"]))),
        "given_weights": (given_weights, (bytes(len(DONORS) * GIVEN_BYTES),)),
        "told_receipt": (told_receipt, (said(["receipt", RECEIPT.encode(), 3, 4]), said(["receipt", b"", 3, 4]))),
        "told_access_list": (
            told_access_list,
            (said(["rulings", b""]), said(["rulings", people.access_list(2).encode()])),
        ),
        "told_certificate": (
            told_certificate,
            (said(["came", certificate.witnessed_at, certificate.attestation]), said(["refused", Refusal.LATE.value])),
        ),
        "told_manifest": (told_manifest, (frames((FrameKind.MANIFEST, SIGNED.to_bytes())),)),
    }
    return {name: Target(check, seeds, 5) for name, (check, seeds) in (questions | answers).items()}
