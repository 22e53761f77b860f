"""The pages of a bootstrap and a peer of a real swarm, in a real browser: figures change, and a killed peer is
shown as gone."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from swarm import ENDLESS, Program, Swarm, until

from tests.page.stream import exchange_told

pytestmark = [pytest.mark.net, pytest.mark.timeout(900)]
BRIEF = Path(__file__).with_name("brief.py")
ADDRESS = r"http://127\.0\.0\.1:\d+\S*"
DASH = "\u2013"


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[str, Swarm, list[Program]]]:
    """Return the page's address, and the three peers that it shows."""
    with Swarm(**ENDLESS) as swarm:
        bootstrap = swarm.bootstrap("--page", "0", "--page-public")
        found = until("the page's address", lambda: re.search(ADDRESS, bootstrap.output))
        peers = [swarm.peer("anna", "--share", "--page", "0"), swarm.peer("bert", "--share")]
        peers.append(swarm.peer("cleo", "--share", script=BRIEF))  # the peer that will be killed
        for each in peers:
            each.wait_for("exchanged")
        for each in peers:
            each.give_way()
        yield found.group(), swarm, peers


def document(url: str) -> dict[str, Any]:
    """Return the document of the page at this address."""
    with urllib.request.urlopen(f"{url.split('?')[0]}status", timeout=60.0) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


class Rows:
    """The table of peers in the browser."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def state(self, peer: Program) -> str:
        """Return a peer's state; empty if it has no row."""
        row = "document.querySelector(`#people tr[data-peer='${arguments[0]}']`)"
        return str(self.run(f"return {row}?.dataset.state ?? ''", str(peer.peer_id)))

    def lit(self) -> int:
        """Return the number of exchanges that the gossip picture has shown so far."""
        return int(self.run("return document.getElementById('gossip').dataset.lit"))

    def text(self, name: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", name))

    def complaints(self, url: str) -> list[str]:
        """Return the browser's log, and requests to other servers than the page's own."""
        log: list[dict[str, Any]] = self.browser.execute("getLog", {"type": "browser"})["value"]
        asked = self.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        own = (f"{url.split('?')[0].rstrip('/')}/", "data:")
        return [each["message"] for each in log] + [each for each in asked if not each.startswith(own)]

    def cells(self, peer: Program) -> dict[str, str]:
        """Return a row's texts by column."""
        row = "document.querySelectorAll(`#people tr[data-peer='${arguments[0]}'] > *`)"
        pairs = f"return [...{row}].map((cell) => [cell.dataset.title, cell.textContent])"
        return dict(self.run(pairs, str(peer.peer_id)))


def test_numbers_move_and_who_was_killed_is_gone(
    here: tuple[str, Swarm, list[Program]], chromium: webdriver.Chrome
) -> None:
    url, _, (anna, bert, cleo) = here
    chromium.get(url)
    page = Rows(chromium)
    until("three rows", lambda: all(page.state(each) == "training" for each in (anna, bert, cleo)))
    assert all(name in page.cells(each)["Peer"] for name, each in (("anna", anna), ("bert", bert), ("cleo", cleo)))
    told = ("Tokens/s", "Loss", "Exchanges")  # by the peers themselves; "Last seen" changes in any case
    until("their figures", lambda: all(page.cells(each)[name] != DASH for each in (anna, bert) for name in told))
    before = {each: page.cells(each) for each in (anna, bert)}
    for name in ("Loss", "Exchanges"):
        until(name, lambda name=name: all(page.cells(each)[name] != was[name] for each, was in before.items()))
    lit = page.lit()
    until("exchanges to be lit", lambda: page.lit() > lit)
    made = exchange_told(url)
    assert {made["a"], made["b"]} < {each.peer_id for each in (anna, bert, cleo)}

    cleo.kill()
    killed_at = document(url)["at"]  # by the bootstrap's clock, as below

    def gone_at() -> float | None:
        found = document(url)
        (row,) = (each for each in found["peers"] if each["id"] == cleo.peer_id)
        return float(found["at"]) if row["state"] == "gone" else None

    assert until("the killed peer to be gone", gone_at) > killed_at
    until("the killed peer to be shown as gone", lambda: page.state(cleo) == "gone")
    assert (page.state(anna), page.state(bert)) == ("training", "training")
    assert page.text("peers") == "2"
    assert page.complaints(url) == []


def test_contributions_of_all_are_shown_and_signed(here: tuple[str, Swarm, list[Program]]) -> None:
    """Check the table of a bootstrap and of a peer, the departed peer's row, and the public page."""
    url, _, (anna, bert, cleo) = here

    def row(of: str, peer: Program) -> dict[str, Any]:
        rows = {each["id"]: each for each in document(of)["contributions"]["rows"]}
        return rows.get(str(peer.peer_id), {"signed_tokens": 0, "trained_s": None, "tokens": 0})

    until("signatures", lambda: all(row(url, each)["signed_tokens"] > 0 for each in (anna, bert)))
    for each, name in ((anna, "anna"), (bert, "bert"), (cleo, "cleo")):
        found = row(url, each)
        assert found["nickname"] == name
        assert found["tokens"] >= found["signed_tokens"]
        assert found["trained_s"] > 0
        assert 0 < found["share"] < 1
    own = until("the address of anna's page", lambda: re.search(ADDRESS, anna.output)).group()
    until("a partner's claim", lambda: row(own, bert)["signed_tokens"] > 0)
    assert row(own, anna)["signers"] >= 1
    with urllib.request.urlopen(f"{url.split('?')[0]}run", timeout=60.0) as answer:
        assert '<meta property="og:title"' in answer.read().decode()


def test_a_peer_shows_itself(here: tuple[str, Swarm, list[Program]], chromium: webdriver.Chrome) -> None:
    """Check a peer's page: its own figures, its partners, and the other peers."""
    _, _, (anna, bert, _) = here
    url = until("the address of anna's page", lambda: re.search(ADDRESS, anna.output)).group()
    chromium.get(url)
    page = Rows(chromium)
    until("its own row", lambda: page.state(anna) == "training")
    until("the others' rows", lambda: page.state(bert) == "training")
    assert page.text("what") == "What anna sees of the swarm"
    figures = ("fraction", "held-out", "speed", "exchanges", "disagreement", "up", "down")
    until("its figures", lambda: all(page.text(name) not in ("", DASH) for name in figures))
    before = page.text("exchanges"), page.text("progress-tokens")
    until(
        "its numbers to move",
        lambda: all(map(str.__ne__, before, (page.text("exchanges"), page.text("progress-tokens")))),
    )
    made = exchange_told(url)
    assert anna.peer_id in (made["a"], made["b"])
    until("its curve", lambda: page.run("return document.querySelectorAll('#loss-chart canvas').length") == 1)
    assert page.complaints(url) == []
