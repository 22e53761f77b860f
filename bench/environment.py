"""On what, when, and on which code something was measured."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from peer.testnet.report import machine

ROOT = Path(__file__).parent.parent

WRITTEN = ("docs/results", "docs/RESULTS.md")
"""What measuring itself changes."""


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
    """The commit under measurement, marked where the working tree differs in more than results; unknown outside git."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("diff", "--name-only", "HEAD", "--", ".", *(f":!{each}" for each in WRITTEN))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
