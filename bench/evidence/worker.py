"""The other side of ``pool``: ``python -m bench.evidence.worker MODULE:FUNCTION DEVICE``.

Reads scenarios as lines of JSON from standard input, answers each with one line on standard output, and is gone as soon
as the input ends, in the middle of a simulation too. What others print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from bench.evidence.pool import Simulate

LONGEST_FAILURE = 500
"""Characters that are kept of an error."""


def main() -> None:
    """Work until nobody listens."""
    module, _, name = sys.argv[1].partition(":")
    simulate: Simulate = getattr(importlib.import_module(module), name)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(wanted,), daemon=True).start()
    while True:
        answer = answered(simulate, json.loads(wanted.get()), sys.argv[2])
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


def answered(simulate: Simulate, scenario: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The report, or why there is none in one line; and how long it took."""
    began = time.perf_counter()
    report, failure = None, None
    try:
        report = simulate(scenario, device)
    except Exception as error:  # whatever a scenario does, the next one gets its turn
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_FAILURE]
    return {"seconds": time.perf_counter() - began, "report": report, "failure": failure}


def _read(wanted: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        wanted.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
