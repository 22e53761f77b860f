"""Machine, versions, date and commit of a measurement."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from lab.machine import machine

ROOT = Path(__file__).parent.parent

WRITTEN = ("docs/results", "docs/RESULTS.md")
"""Paths that measuring itself changes."""


def environment() -> dict[str, str]:
    """Return machine, versions of Python and torch, date and commit."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(ROOT),
    }


def where(measured: Mapping[str, str]) -> str:
    """Return the environment in one line."""
    on = f"{measured['machine']}; Python {measured['python']}, torch {measured['torch']}"
    return f"{on}; {measured['date']}; commit {measured['commit']}."


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout around a folder, marked "-dirty" if files other than results differ."""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(
            folder, "diff", "--name-only", "HEAD", "--", ":/", *(f":(top,exclude){each}" for each in WRITTEN)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
