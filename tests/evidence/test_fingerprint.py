"""Fingerprint of the simulated code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.environment import ROOT
from bench.evidence.fingerprint import SOURCES, code, fingerprint

PYTHON = '''"""A module."""

# Why it is so.
def f(x: int) -> str:
    """Return it."""
    return "# no comment"  # one

LIMIT = 3
"""The bound."""
'''


def written(root: Path, text: str, name: str = "module.py") -> str:
    (root / "package").mkdir(parents=True, exist_ok=True)
    (root / "package" / name).write_text(text, encoding="utf-8")
    fingerprint.cache_clear()
    return fingerprint(root, ("package",))


def test_code_is_what_is_left_without_words() -> None:
    assert code(PYTHON).splitlines() == ["def f(x: int) -> str:", '    return "# no comment"', "LIMIT = 3"]


def test_the_fingerprint_follows_the_code_and_not_its_words(tmp_path: Path) -> None:
    before = written(tmp_path, PYTHON)
    assert written(tmp_path, PYTHON.replace("Why it is so", "Another word").replace("The bound", "A bound")) == before
    assert written(tmp_path, PYTHON.replace("LIMIT = 3", "LIMIT = 4")) != before
    assert written(tmp_path, PYTHON) == before
    assert written(tmp_path, "int main();", "native.cpp") != before, "a new file"
    assert written(tmp_path, "nothing", "README.md") == written(tmp_path, "something", "README.md")


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_exists(source: str) -> None:
    assert (ROOT / source).exists()


def test_what_a_simulation_loads_is_covered() -> None:
    """Check that each module that simulates is covered, or only holds data types, errors or messages."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, sim.simulate, sim.lm.pool; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    covered = tuple(source.removesuffix(".py").replace("/", ".") for source in SOURCES)
    others = {each for each in loaded if each.startswith(("p2ptrain.", "sim.")) and not each.startswith(covered)}
    assert {each.split(".")[1] for each in others} == {"base", "manifest", "ports", "statements"}
