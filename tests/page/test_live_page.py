"""A bootstrap's page over a real swarm, in a real browser: numbers move, and who was killed is shown as gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from swarm import ENDLESS, Program, Swarm, until

pytestmark = [pytest.mark.net, pytest.mark.timeout(900)]
BRIEF = Path(__file__).with_name("brief.py")


@pytest.fixture
def here() -> Iterator[tuple[str, Swarm, list[Program]]]:
    """The page's address, and the three peers that it shows."""
    with Swarm(**ENDLESS) as swarm:
        bootstrap = swarm.bootstrap("--page", "0")
        found = until("the page's address", lambda: re.search(r"http://127\.0\.0\.1:\d+\S*", bootstrap.output))
        peers = [swarm.peer(name, "--share") for name in ("anna", "bert")]
        peers.append(swarm.peer("cleo", "--share", script=BRIEF))  # who is going to be killed
        for each in peers:
            each.wait_for("exchanged")
        yield found.group(), swarm, peers


class Rows:
    """The table of peers, as it stands in the browser."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def state(self, peer: Program) -> str:
        """Empty where it has no row."""
        row = "document.querySelector(`#people tr[data-peer='${arguments[0]}']`)"
        return str(self.run(f"return {row}?.dataset.state ?? ''", str(peer.peer_id)))

    def words(self, peer: Program) -> str:
        row = "document.querySelector(`#people tr[data-peer='${arguments[0]}']`)"
        return str(self.run(f"return {row}?.textContent ?? ''", str(peer.peer_id)))


def test_numbers_move_and_who_was_killed_is_gone(
    here: tuple[str, Swarm, list[Program]], chromium: webdriver.Chrome
) -> None:
    url, _, (anna, bert, cleo) = here
    chromium.get(url)
    page = Rows(chromium)
    until("three rows", lambda: all(page.state(each) == "training" for each in (anna, bert, cleo)))
    assert all(name in page.words(each) for name, each in (("anna", anna), ("bert", bert), ("cleo", cleo)))
    before = {each: page.words(each) for each in (anna, bert)}
    until("its numbers to move", lambda: all(page.words(each) != words for each, words in before.items()))

    cleo.kill()
    until("the killed peer to be shown as gone", lambda: page.state(cleo) == "gone")
    assert (page.state(anna), page.state(bert)) == ("training", "training")
    assert page.run("return document.getElementById('peers').textContent") == "2"

    log: list[dict[str, Any]] = chromium.execute("getLog", {"type": "browser"})["value"]
    assert [each["message"] for each in log] == []
    asked = page.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    origin = url.split("?")[0].rstrip("/")
    assert {each for each in asked if not each.startswith((f"{origin}/", "data:"))} == set()
