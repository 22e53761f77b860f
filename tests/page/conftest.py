"""A view with plausible content, and a page server for it."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.page.samples import SampleText
from p2ptrain.page.server import PageServer
from p2ptrain.page.view import (
    CheckpointRow,
    ExchangeRow,
    FailureRow,
    PeerRow,
    RunFacts,
    View,
)
from sim.page_thread import in_thread

FLAGS = ("--no-sandbox", "--disable-gpu", "--headless=new", "--disable-dev-shm-usage")
"""Chromium's options."""
NOW = 1_790_000_000.0
"""The documents' clock, in seconds since 1970."""
RUN_TOKENS = 1_200_000
DONE = 0.46
NAMES = ("Amber", "Birch", "Copper-Owl", "Dusk", "Elm", "Fjord", "Gull", "Heron")
DEVICES = ("cuda:0", "cpu", "mps", "cuda:0")


def peer_id(index: int) -> str:
    """Return an id like libp2p's: equal at the start, different at the end."""
    return "12D3KooW" + random.Random(11 + index).randbytes(18).hex()


def a_peer(index: int, seed: random.Random) -> PeerRow:
    speed = seed.uniform(3_000, 18_000)
    return PeerRow(
        id=peer_id(index),
        nickname=NAMES[index] if index < len(NAMES) else f"peer-{index + 1}",
        state="joining" if index == 6 else "training",
        step=400 + index,
        progress=DONE * RUN_TOKENS,
        age_s=seed.uniform(0, 40),
        path="relayed" if index % 4 == 3 else "direct",
        device=DEVICES[index % len(DEVICES)],
        tokens=int(DONE * RUN_TOKENS),
        tokens_per_s=speed,
        loss=1.93 + seed.gauss(0, 0.04),
        held_out=1.987 + seed.gauss(0, 0.01),
        disagreement=0.021 + seed.gauss(0, 0.002),
        exchanges=seed.randint(60, 420),
        failed=seed.randint(0, 9),
        up=seed.uniform(1e5, 9e5),
        down=seed.uniform(1e5, 9e5),
    )


def a_view(peers: int = 8, seed: int = 0) -> View:
    """Return a view of a swarm in the middle of its run, as its first peer sees it."""
    random_ = random.Random(seed)
    view = View("peer", me=peer_id(0), run=RunFacts("tiny-stories", "c0ffee" * 10, 357_024, RUN_TOKENS, "pairs"))
    view.join = "p2ptrain peer 'p2ptrain://5f0c…@/dns4/bootstrap.example.org/tcp/31337/p2p/12D3KooW…'"
    view.state, view.why = "training", "7 others are here; the next exchange comes in about 2 s"
    view.place([a_peer(index, random_) for index in range(peers)])
    for index in range(min(peers, 32)):
        _learn(view, index, random_)
    for step in range(200):
        share = step / 200
        at = NOW - 3600 * (1 - share)
        apart = 0.02 + 0.06 * math.exp(-6 * share) + random_.gauss(0, 0.0012)
        view.disagreement.add(share * DONE * RUN_TOKENS, at, apart)
        burst = 2.4e6 if step % 7 < 3 else 3e5
        view.traffic.add(at, burst * random_.uniform(0.8, 1.2), burst * random_.uniform(0.8, 1.2))
    for step in range(40):
        an_exchange(view, NOW - 3 * (40 - step), random_.randrange(peers), random_.randrange(peers), random_)
    for step, why in enumerate(("busy with another", "timed out after 20 s", "no route: its relay has left")):
        line = f"no exchange with {NAMES[step + 2]}: {why}"
        view.failures.append(FailureRow(view.next_serial(), NOW - 900 + 400 * step, peer_id(step), line))
    for step in (120, 240, 360):
        view.checkpoints.append(CheckpointRow(view.next_serial(), NOW - 2400 + 6 * step, peer_id(0), step))
    text = " there was a little fox who lived in the wood.\nShe asked the moon: “Will you come to tea?”\nAnd the moon,"
    view.sample = SampleText(NOW - 95, peer_id(0), 398, "Once upon a time", text + " who was polite, came.")
    view.figures = {
        "tokens": peers * DONE * RUN_TOKENS,
        "tokens_per_s": sum(row.tokens_per_s or 0.0 for row in view.peers.values()),
        "fraction": DONE,
        "exchanges": 972.0,
        "failed": 11.0,
        "up": sum(row.up or 0.0 for row in view.peers.values()),
        "down": sum(row.down or 0.0 for row in view.peers.values()),
        "sent_bytes": 174.8e6,
        "received_bytes": 174.8e6,
        "blocked_share": 0.0168,
        "held_out": 1.987,
        "loss": 1.93,
        "disagreement": 0.0213,
    }
    return view


def _learn(view: View, index: int, seed: random.Random) -> None:
    curve = view.curve(peer_id(index), NAMES[index] if index < len(NAMES) else f"peer-{index + 1}")
    assert curve is not None
    for step in range(160):
        share = step / 160
        tokens, at = share * DONE * RUN_TOKENS, NOW - 3600 * (1 - share)
        loss = 1.9 + 3.5 * math.exp(-9 * share) + 0.25 * math.exp(-2 * share) + 0.02 * math.sin(index)
        curve.train.add(tokens, at, loss + seed.gauss(0, 0.05))
        if step % 10 == 0:
            curve.held_out.add(tokens, at, loss + 0.06 + seed.gauss(0, 0.008))


def an_exchange(view: View, at: float, a: int, b: int, seed: random.Random) -> ExchangeRow:
    """Add an exchange between two peers, given by number; if they are equal, with the next one."""
    other = b if a != b else (b + 1) % max(2, len(view.peers))
    seconds, size = seed.uniform(0.02, 2.2), int(seed.uniform(3.3e5, 3.7e5))
    row = ExchangeRow(view.next_serial(), at, peer_id(a), peer_id(other), seconds, size, seed.uniform(0.017, 0.026))
    view.exchanges.append(row)
    return row


@dataclass
class Shown:
    """A view and the server that shows it. Tests change the view; the server gets documents made from it."""

    view: View
    at: float = NOW
    _document: dict[str, Any] = field(default_factory=dict)
    _server: PageServer | None = None
    _serving: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.publish()

    def publish(self) -> None:
        """Make a document of the changed view; a reader recognizes it by ``at``."""
        self.at += 1.0
        self._document = self.view.document(self.at)

    def replace(self, document: dict[str, Any]) -> None:
        """Serve a document that no view produces."""
        self._document = document

    @property
    def server(self) -> PageServer:
        assert self._server is not None
        return self._server

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return int(self.url.split("?")[0].rstrip("/").rpartition(":")[2])

    def serve(self, place: ListenAddress | None = None, is_public: bool = False, hidden: tuple[str, ...] = ()) -> None:
        self._server = PageServer(place or ListenAddress(), lambda: self._document, is_public, hidden)
        self._serving.enter_context(in_thread(self._server))

    def end(self) -> None:
        self._serving.close()


@pytest.fixture
def shown() -> Iterator[Shown]:
    """Yield a page for a swarm of eight, on any free port of the loopback."""
    here = Shown(a_view())
    here.serve()
    try:
        yield here
    finally:
        here.end()


@pytest.fixture
def make_view() -> Callable[..., View]:
    return a_view


@pytest.fixture
def exchange() -> Callable[..., ExchangeRow]:
    return an_exchange


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    """Start one browser for all tests of a file, since its start takes seconds. Nothing is downloaded for it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("the page is looked at with chromium and chromedriver, which are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.set_capability("unhandledPromptBehavior", "ignore")
    found = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    try:
        yield found
    finally:
        found.quit()
