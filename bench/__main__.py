"""``python -m bench [--only NAME …] [--json FILE]``: measure, print the table, write the JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.environment import ROOT, environment
from bench.table import FIGURES, rows, table

_CHILD = """
import importlib, json, sys
figures = importlib.import_module(sys.argv[1]).measure()
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump(figures, file)
"""


@click.command()
@click.option("--only", multiple=True, type=click.Choice(FIGURES), help="Measure only this; may be repeated.")
@click.option(
    "--json", "target", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/bench.json"),
    show_default=True, help="Output file.",
)  # fmt: skip
def main(only: tuple[str, ...], target: Path) -> None:
    """Measure the project's figures in some minutes, on an otherwise idle machine."""
    console = Console(highlight=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"environment": environment(), "figures": {}}
    for name in only or FIGURES:
        if (why := why_not(name)) is not None:
            console.print(f"[bench] {name} is skipped: {why}", markup=False, soft_wrap=True)
            continue
        console.print(f"[bench] measuring {name}", markup=False)
        document["figures"][name] = measured(name, target.with_suffix(f".{name}.tmp"))
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")  # keeps finished figures
    console.print(table(rows(document["figures"])))
    console.print(f"[bench] {document['environment']['machine']}; written to {target}", markup=False, soft_wrap=True)


def why_not(name: str) -> str | None:
    """Return why this machine cannot measure the figures of a module, or None if it can."""
    module = importlib.import_module(f"bench.{name}")  # an import error must show its traceback
    check = getattr(module, "why_not", None)
    return None if check is None else check()


def measured(name: str, scratch: Path) -> dict[str, Any]:
    """Return the result of a module's ``measure()``, run in its own process with one thread of torch."""
    command = [sys.executable, "-c", _CHILD, f"bench.{name}", str(scratch.absolute())]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        subprocess.run(command, cwd=ROOT, env=one_thread, check=True)
        figures: dict[str, Any] = json.loads(scratch.read_bytes())
    finally:
        scratch.unlink(missing_ok=True)
    return figures


if __name__ == "__main__":
    main()
