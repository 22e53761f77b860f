"""Fingerprint of the code that decides the result of a cell. Entries with another one count as missing."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

from bench.environment import ROOT

SOURCES = (
    "p2ptrain/codec",
    "p2ptrain/host",
    "p2ptrain/outer",
    "sim",
    "p2ptrain/swarm",
    "p2ptrain/tokens",
    "p2ptrain/train",
    "p2ptrain/framing.py",
    "p2ptrain/recipes.py",
    "p2ptrain/wire.py",
    "bench/evidence/headline.py",
)
"""Packages and modules that a simulation runs through. What is only data types or messages to users is left out."""


@functools.cache
def fingerprint(root: Path = ROOT, sources: Iterable[str] = SOURCES) -> str:
    """Return 16 hexadecimal digits that change with the code of ``sources``, but not with its comments."""
    total = hashlib.sha256()
    for path in sorted(path for each in sources for path in _files(root / each)):
        text = path.read_text(encoding="utf-8")
        total.update(f"{path.relative_to(root)}\n{code(text) if path.suffix == '.py' else text}\n".encode())
    return total.hexdigest()[:16]


def _files(place: Path) -> Iterable[Path]:
    return (each for each in place.rglob("*") if each.suffix in (".py", ".cpp")) if place.is_dir() else (place,)


def code(source: str) -> str:
    """Return Python source without docstrings, comments and blank lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())
