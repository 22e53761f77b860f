"""On what, when, and on which code something was measured."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from peer.testnet.report import machine

ROOT = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    """On what, when, and on which code."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit under measurement, marked where the working tree differs; unknown outside a git checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
