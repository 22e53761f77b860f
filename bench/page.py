"""Cost of the page for the browser and for the server, from 8 to 256 peers: ``python -m bench.page``. A minute.

A headless Chromium shows a fake swarm, in which every number changes with each document and 25 exchanges happen per
second (the most that a simulation reports). Needs chromium, chromedriver, and selenium (extra ``dev``).

``busy`` is the share of time in which the main thread of the browser is busy, drawing included, and ``longest`` its
longest task: a click waits that long. ``made`` is the time to make one document, at most twice per second for any
number of viewers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from selenium import webdriver

from bench.environment import environment
from bench.pictures import chromium, look
from p2ptrain.page.listen_address import ListenAddress
from p2ptrain.page.server import PageServer
from p2ptrain.page.view import ExchangeRow, PeerRow, RunFacts, View
from sim.page_thread import in_thread

SIZES = (8, 64, 200, 256)
WATCHED_S = 6.0
EXCHANGES_PER_S = 25
FULL = 256
"""Points of every curve: the maximum."""
LONG_TASKS = """
window.longest = 0;
new PerformanceObserver((list) => list.getEntries().forEach((each) => {
  window.longest = Math.max(window.longest, each.duration);
})).observe({ type: "longtask" });
"""


class FakeSwarm:
    """Swarm that changes: the server's thread calls ``document``, another thread ``exchanged``."""

    def __init__(self, peers: int) -> None:
        self._random, self._lock = Random(1), threading.Lock()
        self._view = View("bootstrap", run=RunFacts("made up", "ab" * 32, 357_024, 1_200_000, "swarm", "modular4"))
        self._rows = [self._row(number) for number in range(peers)]
        self._view.place(self._rows)
        for row in self._rows:
            if (curve := self._view.curve(row.id, row.nickname)) is not None:
                for step in range(FULL):
                    curve.train.add(1e3 * step, float(step), 2.0 + self._random.random())
                    curve.held_out.add(1e3 * step, float(step), 2.1 + self._random.random())
        for step in range(FULL):
            self._view.traffic.add(float(step), 1e6 * self._random.random(), 1e6)
            self._view.disagreement.add(1e3 * step, float(step), 0.02 + 0.01 * self._random.random())

    def _row(self, number: int) -> PeerRow:
        return PeerRow(f"12D3KooW{number:040d}", f"peer-{number + 1}", "training", 1, path="direct", device="cuda:0")

    def document(self) -> dict[str, Any]:
        with self._lock:
            self._rows = [self._moved(row) for row in self._rows]
            self._view.place(self._rows)
            return self._view.document(time.time())

    def _moved(self, row: PeerRow) -> PeerRow:
        chance = self._random.random
        return replace(
            row,
            step=row.step + 1,
            age_s=20 * chance(),
            tokens_per_s=1e4 * chance(),
            loss=2 + chance(),
            held_out=2 + chance(),
            disagreement=0.02 * chance(),
            exchanges=(row.exchanges or 0) + 1,
            up=1e6 * chance(),
            down=1e6 * chance(),
        )

    def exchanged(self) -> None:
        with self._lock:
            a, b = self._random.sample([row.id for row in self._rows], 2)
            row = ExchangeRow(self._view.next_serial(), time.time(), a, b, 0.3, 360_000, 0.02)
            self._view.add(row)


@contextmanager
def gossip(swarm: FakeSwarm) -> Iterator[None]:
    """Make exchanges until the block ends."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(1 / EXCHANGES_PER_S):
            swarm.exchanged()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watched(browser: webdriver.Chrome, peers: int) -> dict[str, float]:
    """Return the figures of one size of swarm."""
    swarm = FakeSwarm(peers)
    began = time.perf_counter()
    size = len(json.dumps(swarm.document(), separators=(",", ":")))
    made_s = time.perf_counter() - began
    with in_thread(PageServer(ListenAddress(), swarm.document)) as server, gossip(swarm):
        browser.get(server.url)
        time.sleep(2.0)  # for loading and the first drawing
        browser.execute_script(LONG_TASKS)
        before, began = task_s(browser), time.perf_counter()
        time.sleep(WATCHED_S)
        busy = (task_s(browser) - before) / (time.perf_counter() - began)
        longest_s = browser.execute_script("return window.longest") / 1000
    return {"document_bytes": size, "made_s": made_s, "busy": busy, "longest_task_s": longest_s}


def task_s(browser: webdriver.Chrome) -> float:
    """Return the seconds for which the main thread of the page has been busy."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


@click.command(help=__doc__)
def main() -> None:
    table = Table("peers", "document", "made in", "browser busy", "longest task")
    with chromium() as browser:
        browser.execute_cdp_cmd("Performance.enable", {})
        look(browser, "light", 1280, 900)
        for peers in SIZES:
            each = watched(browser, peers)
            table.add_row(
                str(peers),
                f"{each['document_bytes'] / 1000:.0f} kB",
                f"{1000 * each['made_s']:.0f} ms",
                f"{100 * each['busy']:.0f} %",
                f"{1000 * each['longest_task_s']:.0f} ms" if each["longest_task_s"] else "below 50 ms",
            )
    console = Console(highlight=False)
    console.print(table)
    where = environment()
    console.print(f"{where['machine']}; {where['date'][:10]}, commit {where['commit']}")


if __name__ == "__main__":
    main()
