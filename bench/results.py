"""Writes measured figures into the pages of ``docs/results``, between the marks that each page has for them.

    python -m bench.results [--bench out/bench.json] [--demo out/demo/summary.json ...] [--lab out/lab/report.json ...]
        [--rivals out/rivals/rivals.json] [--card out/card.json]

Parts without a file stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench import card as cards
from bench import lab
from bench.environment import commit_of, where
from bench.rivals.table import markdown as rivals_lines
from bench.table import markdown, rows
from lab.machine import machine

FOLDER = Path(__file__).parent.parent / "docs" / "results"
PAGES = {"bench": "FIGURES.md", "demo": "FIGURES.md", "lab": "LAB.md", "rivals": "RIVALS.md", "card": "CARD.md"}
"""Page of each part."""
FILE = click.Path(dir_okay=False, exists=True, path_type=Path)


@click.command()
@click.option("--bench", type=FILE, help="Written by `python -m bench`.")
@click.option("--demo", "demos", multiple=True, type=FILE, help="summary.json of a testnet; one per seed.")
@click.option("--lab", "labs", multiple=True, type=FILE, help="report.json of the laboratory; one per run.")
@click.option("--rivals", type=FILE, help="Written by `python -m bench.rivals`.")
@click.option("--card", type=FILE, help="Written by `python -m bench.card`.")
def main(
    bench: Path | None, demos: tuple[Path, ...], labs: tuple[Path, ...], rivals: Path | None, card: Path | None
) -> None:
    """Write measured figures into docs/results."""
    parts: dict[str, Sequence[str]] = {}
    if bench is not None:
        parts["bench"] = bench_lines(json.loads(bench.read_bytes()))
    if demos:
        parts["demo"] = demo_lines([json.loads(each.read_bytes()) for each in demos])
    if labs:
        runs = [lab.LabRun(commit_of(each.parent), json.loads(each.read_bytes())) for each in labs]
        parts["lab"] = lab.lines(runs)
    if rivals is not None:
        parts["rivals"] = rivals_lines(json.loads(rivals.read_bytes())["runs"])
    if card is not None:
        parts["card"] = cards.lines(json.loads(card.read_bytes()))
    for part, lines in parts.items():
        page = FOLDER / PAGES[part]
        page.write_text(replaced(page.read_text(encoding="utf-8"), part, lines), encoding="utf-8")
        click.echo(f"{page}: written")


def replaced(text: str, part: str, lines: Sequence[str]) -> str:
    """Return a page with the text between a part's two marks replaced. Raises ValueError if it has no such marks."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    head, opened, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page has no marks {begin} and {end}")
    return "\n".join([f"{head}{begin}", "", *lines, "", f"{end}{tail}"])


def bench_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the environment and the table of figures."""
    return [where(document["environment"]), "", *markdown(rows(document["figures"]))]


def demo_lines(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the environment and a table with one row for each demo run."""
    lines = [
        f"{machine()}; {summaries[0]['date']}.",
        "",
        "| seed | averaged loss | solo loss | ratio | disagreement | after the final gossip "
        "| fewest exchanges | blocked most | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_demo_line(each) for each in sorted(summaries, key=lambda each: int(each["seed"]))]


def _demo_line(summary: Mapping[str, Any]) -> str:
    averaged, solo = summary["averaged_val_loss"], summary["solo_val_loss"]
    peers = summary["peers"]
    cells = [
        str(summary["seed"]),
        f"{averaged:.4f}",
        f"{solo:.4f}",
        f"{averaged / solo:.3f}",
        f"{100 * summary['disagreement']:.2f} %",
        f"{100 * summary['final_disagreement']:.2f} %",
        str(min(each["exchanges_ok"] for each in peers)),
        f"{100 * max(each['blocked_fraction'] for each in peers):.2f} %",
        f"{summary['wall_s']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
