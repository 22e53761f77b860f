"""Reader of a page server's event stream."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

PATIENCE_S = 60.0


def exchange_told(url: str) -> dict[str, Any]:
    """Return the next exchange in the event stream."""
    deadline = time.monotonic() + PATIENCE_S
    with urllib.request.urlopen(f"{url.split('?')[0]}events", timeout=PATIENCE_S) as stream:
        for line in stream:  # the server also sends keep-alive lines
            assert time.monotonic() < deadline, "the stream tells of no exchange"
            if line.startswith(b"data:"):
                found: dict[str, Any] = json.loads(line.removeprefix(b"data:"))
                if found["kind"] == "exchange":
                    return found
    raise AssertionError("the stream of events has ended")
