"""A relay at a public address, where p2pd would start its own relay. In network namespaces; needs root."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.hosts import Network
from lab.namespaces import check_support

SCRIPT = str(Path(__file__).with_name("remote_relay.py"))

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are root's"),
]


SECONDS = 20
"""Seconds to watch: libp2p asks 15 s after its start whether it can be dialed."""


@pytest.mark.lab
def test_a_relay_stays_ours_when_p2pd_hears_that_it_can_be_dialed(tmp_path: Path) -> None:
    """Check that our relay still answers: p2pd's own would carry 128 KiB, and of two handlers the newer one answers."""
    check_support()
    with Network() as network, contextlib.ExitStack() as stack:
        for name in ("relay", "stranger", "guest"):
            network.add(name)

        def inside(name: str, *arguments: str) -> list[str]:
            return network.hosts[name].inside(sys.executable, SCRIPT, name, str(tmp_path), *arguments)

        def start(name: str) -> None:
            stack.callback(stack.enter_context(subprocess.Popen(inside(name))).terminate)

        start("relay")
        until("the relay's address", (tmp_path / "where.json").exists)
        start("stranger")
        until("the stranger's connection", (tmp_path / "connected").exists)
        done = subprocess.run(inside("guest", str(SECONDS)), capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == ["a place"] * SECONDS


def until(what: str, condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.1)
