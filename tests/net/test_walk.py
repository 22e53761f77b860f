"""The walk of a displacement: the files that run for it in two nodes, and how often it leaves the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from memory_network import MemoryNetwork
from test_driver import AMBER, BIRCH, Trainee
from virtual_time import run as run_in_virtual_time

from p2ptrain.swarm.events import ExchangeDue, Woke

PRODUCT = f"{Path(__file__).parents[2] / 'p2ptrain'}/"
MOST_FILES = 39
"""Files of nodes between two links, without ``base``; docs/ARCHITECTURE.md names those on both sides of them."""


class Recorder:
    """Functions of the product that run, by file."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PRODUCT):
            self.functions[path.removeprefix(PRODUCT)].add(frame.f_code.co_qualname)


@pytest.mark.parametrize("codec_name", ["fp32", "modular4"])
def test_a_displacement_leaves_the_loop_twice_and_runs_few_files(codec_name: str) -> None:
    """Record two nodes from an inner step to the displacement of its weights, without what a timer runs too."""
    idle, busy, jobs = Recorder(), Recorder(), Counter[str]()

    async def work(function: Callable[..., Any], *arguments: Any) -> Any:
        jobs[function.__name__] += 1
        return function(*arguments)

    async def stage() -> int:
        network = MemoryNetwork(latency=0.01)
        peers = [Trainee(network, each, codec_name, work, inner_steps=20) for each in (AMBER, BIRCH)]
        living = [asyncio.create_task(each.live()) for each in peers]
        await asyncio.sleep(3.05)
        with idle.recording():
            for each in peers:
                each.driver.handle(Woke())
        jobs.clear()
        before = len(peers[0].committed)
        with busy.recording():
            peers[0].driver.handle(ExchangeDue())
            await asyncio.sleep(0.6)  # an inner step is shown meanwhile
        for each in living:
            each.cancel()
        return len(peers[0].committed) - before

    assert run_in_virtual_time(stage()) > 0
    files = {file for file, functions in busy.functions.items() if functions - idle.functions.get(file, set())}
    walk = sorted(file for file in files if not file.startswith("base/"))
    assert len(walk) <= MOST_FILES, walk
    assert {"host/learner.py", "host/state.py", "net/session.py", "swarm/exchange.py", "codec/base.py"} <= set(walk)
    assert set(jobs) == {"encode", "difference"}
