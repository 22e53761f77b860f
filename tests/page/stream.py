"""Reader of a page server's document."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from typing import Any

PATIENCE_S = 60.0


def exchange_told(url: str) -> dict[str, Any]:
    """Return the next exchange that the document shows."""
    deadline, before = time.monotonic() + PATIENCE_S, _newest(url)
    while (found := _newest(url)) == before:
        assert time.monotonic() < deadline, "the document shows no new exchange"
        time.sleep(0.2)
    return found


def _newest(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.parse.urljoin(url, "status"), timeout=PATIENCE_S) as response:
        exchanges: list[dict[str, Any]] = json.load(response)["exchanges"]
    return exchanges[-1] if exchanges else {}
