"""Screenshots of the page for ``docs/images``: ``python -m bench.pictures``.

Four demo peers train on this machine; after four minutes a headless Chromium takes screenshots of their bootstrap's
page while exchanges are lit. Needs chromium, chromedriver, and selenium (extra ``dev``), and no network.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from bench.environment import ROOT

PEERS = 4
AFTER_S = 240.0
"""Training time before the first screenshot: curves have a shape by then."""
DEADLINE_S = 300.0
STOP_S = 60.0
DRAWN_S = 3.0
"""Time for drawing charts."""
LIT = 2
"""Exchanges that a screenshot must show."""
LIT_S = 60.0
PLACES = {"chromium": "/usr/bin/chromium", "chromedriver": "/usr/bin/chromedriver"}
HEIGHT = "return Math.ceil(document.body.getBoundingClientRect().bottom)"
LIVE = "return document.getElementById('gossip').dataset.live"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


@click.command(help=__doc__)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "docs" / "images")
def main(out: Path) -> None:
    with swarm() as url, chromium() as browser:
        time.sleep(AFTER_S)
        for name, scheme, width, most_height in (
            ("page-light", "light", 1280, 1606),
            ("page-dark", "dark", 1280, 1606),
            ("page-phone", "light", 390, 1512),
        ):
            look(browser, scheme, width, most_height)
            browser.get(url)
            time.sleep(DRAWN_S)
            look(browser, scheme, width, min(most_height, browser.execute_script(HEIGHT)))
            picture = out / f"{name}.png"
            picture.write_bytes(lit_picture(browser))
            click.echo(str(picture))


@contextmanager
def swarm() -> Iterator[str]:
    """Yield the address of the page once all peers train."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "p2ptrain.cli", "testnet", "--preset", "demo", "--no-solo"]
        options = ["--peers", str(PEERS), "--page", str(port), "--out", f"{folder}/demo"]
        with subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            try:
                wait_for_all(url)
                yield url
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(STOP_S)


def wait_for_all(url: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(f"{url}status", timeout=5) as answer:
                status: dict[str, Any] = json.load(answer)
            if sum(each["loss"] is not None for each in status["peers"]) == PEERS:
                return
        time.sleep(1.0)
    raise click.ClickException(f"{PEERS} peers did not train within {DEADLINE_S:.0f} s.")


def lit_picture(browser: webdriver.Chrome) -> bytes:
    """Return a screenshot with lit exchanges. Raises ClickException if there are none for ``LIT_S``."""
    deadline = time.monotonic() + LIT_S
    while time.monotonic() < deadline:
        if lit(browser) >= LIT:
            picture = browser.get_screenshot_as_png()
            if lit(browser) > 0:
                return picture
        time.sleep(0.05)
    raise click.ClickException(
        f"No {LIT} exchanges were lit at once within {LIT_S:.0f} s, so no picture shows the gossip. Run it again."
    )


def lit(browser: webdriver.Chrome) -> int:
    return int(browser.execute_script(LIVE) or 0)


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = PLACES["chromium"]
    for flag in FLAGS:
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(executable_path=PLACES["chromedriver"]))
    try:
        yield browser
    finally:
        browser.quit()


def look(browser: webdriver.Chrome, scheme: str, width: int, height: int) -> None:
    """Set the size of the screen and its color scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)


if __name__ == "__main__":
    main()
