"""What a result belongs to: the scenario, the code that decides the numbers, and the machine.

The code's digest is taken over syntax trees without docstrings and comments, so that a better explanation throws away
no hours of computing; over the bytes of the built-in text; and over torch's version. What a cell *is* needs no digest
of its own: its whole scenario has one.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

NUMERIC_SOURCES = (
    "p2ptrain/outer/*.py",
    "p2ptrain/codec/*.py",
    "p2ptrain/swarm/*.py",
    "p2ptrain/sim/*.py",
    "p2ptrain/framing.py",
    "p2ptrain/recipes.py",
    "p2ptrain/wire.py",
    "p2ptrain/manifest/*.py",
    "p2ptrain/data/*.py",
    "p2ptrain/data/corpora/*",
    "p2ptrain/train/guard.py",
    "p2ptrain/train/inbox.py",
    "p2ptrain/train/inner.py",
    "p2ptrain/train/learner.py",
    "p2ptrain/train/model.py",
    "p2ptrain/train/optimizer.py",
    "p2ptrain/train/outer_phase.py",
    "p2ptrain/train/payloads.py",
    "p2ptrain/train/rules.py",
    "p2ptrain/train/weights.py",
    "bench/evidence/headline.py",
)
"""Files, as patterns from the repository's root, that decide what a simulated run yields."""

WITHOUT_NUMBERS = (
    "p2ptrain/manifest/presets.py",
    "p2ptrain/sim/command.py",
    "p2ptrain/sim/cost.py",
    "p2ptrain/sim/drawing.py",
    "p2ptrain/sim/reality.py",
    "p2ptrain/sim/serving.py",
    "p2ptrain/sim/tables.py",
    "p2ptrain/swarm/pieces.py",
)
"""Files among these that decide no number of a scenario: what a real run's author begins with, how reports look, and
what only real peers act out or is computed without a simulation."""

COST_SOURCES = ("p2ptrain/sim/cost.py", "p2ptrain/outer/policy.py", "bench/evidence/published.py")
"""Files that decide R4, which is computed and not simulated."""


def scenario_digest(scenario: Mapping[str, Any]) -> str:
    """16 hexadecimal digits for a scenario; the same for equal ones, whatever the order of their fields."""
    text = json.dumps(scenario, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def numeric_digest() -> str:
    """For everything that is simulated: 16 hexadecimal digits."""
    versions = {"torch": f"VERSION = {metadata.version('torch')!r}"}
    return code_digest({**sources(NUMERIC_SOURCES, without=WITHOUT_NUMBERS), **versions})


@cache
def cost_digest() -> str:
    """For R4."""
    return code_digest(sources(COST_SOURCES))


def sources(patterns: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """The text of all files that the patterns name, by path from the root; of files that are not Python, a line of
    Python with the digest of their bytes."""
    left_out = {ROOT / each for each in without}
    found = {path for pattern in patterns for path in ROOT.glob(pattern)} - left_out
    return {path.relative_to(ROOT).as_posix(): _text(path) for path in found if path.is_file()}


def _text(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    return f"BYTES = {hashlib.sha256(path.read_bytes()).hexdigest()!r}"


def code_digest(texts: Mapping[str, str]) -> str:
    """16 hexadecimal digits for Python sources by path, docstrings and comments left out."""
    digest = hashlib.sha256()
    for path in sorted(texts):
        digest.update(f"{path}\n{ast.dump(_bare(texts[path]))}\n".encode())
    return digest.hexdigest()[:16]


def _bare(text: str) -> ast.Module:
    """The syntax tree without statements that are nothing but a string."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [each for each in statements if not _is_text(each)])
    return tree


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
