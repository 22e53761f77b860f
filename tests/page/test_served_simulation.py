"""A simulation of two hundred peers, served by ``p2ptrain simulate --serve``, in a real browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.page.stream import exchange_told

pytestmark = pytest.mark.net

PEERS = 200
PATIENCE_S = 60.0
SCENARIO = f"""
[run]
seed = 1
outer_steps = 100000

[learner]
kind = "quadratic"
parameters = 64

[outer]
recipe = "swarm"
topology = "random"
partners = 1
weights = "equal"
inner_steps = 10
learning_rate = 0.7
momentum = 0.5
nesterov = true
exchanges_per_step = 1
fragments = 1
fragments_per_exchange = 1

[codec]
name = "fp32"
block_size = 1024
gradients = "fp32"
rank = 16

[[peers]]
name = "home"
count = {PEERS}
step_s = 0.1
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Return the page's address."""
    (tmp_path / "crowd.toml").write_text(SCENARIO)
    command = [sys.executable, "-m", "p2ptrain.cli", "simulate", "crowd.toml", "--serve", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as simulation:
        assert simulation.stdout is not None
        said = ""
        try:
            for line in simulation.stdout:
                said += line
                if found := re.search(r"http://127\.0\.0\.1:\d+/\S*", line):
                    draining = threading.Thread(target=simulation.stdout.read, daemon=True)
                    draining.start()
                    yield found.group()
                    break
            else:
                pytest.fail(f"it showed no page:\n{said}")
        finally:
            simulation.send_signal(signal.SIGINT)
            simulation.wait(PATIENCE_S)


def test_a_crowd_is_shown_and_its_numbers_move(url: str, chromium: webdriver.Chrome) -> None:
    chromium.get(url)
    wait = WebDriverWait(chromium, PATIENCE_S)

    def text(name: str) -> str:
        return str(chromium.execute_script("return document.getElementById(arguments[0]).textContent", name))

    wait.until(lambda _: text("peers") == str(PEERS))
    rows = "return document.querySelectorAll('#people tbody tr').length"
    wait.until(lambda _: chromium.execute_script(rows) == PEERS)
    wait.until(lambda _: text("exchanges")[0] in "123456789")
    before = text("exchanges")
    wait.until(lambda _: text("exchanges") != before)
    made = exchange_told(url)
    assert made["a"] != made["b"]
    assert made["bytes"] > 0
    assert [each["message"] for each in chromium.execute("getLog", {"type": "browser"})["value"]] == []
