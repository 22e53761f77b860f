"""Pages of docs/results from the JSON files: ``python -m bench.evidence.pages``.

In a column with a better end, the best figure and all that are not clearly worse are bold. A figure without ± is a
single run, computed, or equal for all seeds. If any run of a cell diverged, the cell has no loss.

A page shows what its file holds, of whatever code, and names the results that are of other code than that with which
the pages were written.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.environment import ROOT
from bench.evidence.contenders import TUNED
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.figures import svg
from bench.evidence.fingerprint import fingerprint
from bench.evidence.layout import Best, Column, Experiment, ResultTable, TableRow
from bench.evidence.run import WRITTEN, load, outdated
from bench.evidence.summary import GUESSING, CellSummary, Estimate, better, by_place, key, paired, summaries
from bench.evidence.tuning import chosen_for, inner_points, losses_of, outer_points
from p2ptrain.base import files

RESULTS = ROOT / "docs" / "results"
NOT_RUN = "-"
WIDTH = 120
NOISY = 10.0
"""A figure whose standard error is this many times that of the best one is never bold."""

Places = Mapping[tuple[str, str], CellSummary]


def pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by file name."""
    return {f"{name}.md": page(each, load(folder, name), folder) for name, each in EXPERIMENTS.items()}


def page(experiment: Experiment, document: Mapping[str, Any], folder: Path) -> str:
    """Return the page of an experiment."""
    title = experiment.question if experiment.id == "tuning" else f"{experiment.id}. {experiment.question}"
    drawn_from = f"<!-- Drawn from {experiment.id}.json by `python -m bench.evidence.pages`; do not edit. -->"
    lines = [f"# {title}", "", drawn_from, "", *_bullet(_runs(experiment, document))]
    lines += [line for text in _remarks(document, folder) for line in _bullet(text)]
    lines += [line for note in experiment.notes for line in _bullet(note)]
    if document.get("checks"):
        lines += ["", "| published | there | here | how it is known |", "|---|---|---|---|"]
        lines += [
            _row(str(each[name]) for name in ("what", "published", "ours", "standing")) for each in document["checks"]
        ]
    if (folder / "figures" / f"{experiment.id}.svg").exists():
        lines += ["", f"![{experiment.question}](figures/{experiment.id}.svg)"]
    if not document["cells"]:
        return "\n".join([*lines, ""])
    if experiment.id == "tuning":
        lines += ["", *_tuning_lines(document["cells"])]
    places = by_place(summaries(experiment, document["cells"]))
    for table in experiment.tables:
        lines += ["", f"## {table.title}", "", *table_lines(table, places)]
    return "\n".join([*lines, ""])


def _runs(experiment: Experiment, document: Mapping[str, Any]) -> str:
    """Return which runs there are, and where they come from."""
    cells, builds = document["cells"], document["builds"]
    if not cells:
        return f"Not yet measured: {len(experiment.cells)} runs are planned."
    if experiment.computed is not None:
        return f"{len(cells)} figures, computed on {_last(builds)} at commit {', '.join(builds)}."
    checks = {each.get("verified") for each in cells} | {each["lost"]["commit"] for each in cells if "lost" in each}
    checks -= {each.get("commit") for each in cells}
    made = {commit: build for commit, build in builds.items() if commit not in checks}
    machines = "; ".join(sorted({each["machine"] for each in made.values()}))
    failures = sum("failure" in each for each in cells)
    failed = f", {failures} failed" if failures else ""
    hours = sum(each["seconds"] for each in cells) / 3_600
    return (
        f"{len(cells)} of {len(experiment.cells)} runs{failed}; {hours:.1f} core hours; "
        f"{machines}; commits {', '.join(made)}; last run {_last(made)}{_checked(cells, builds)}."
    )


def _checked(cells: Sequence[Mapping[str, Any]], builds: Mapping[str, Mapping[str, str]]) -> str:
    """Return at which commits short runs were as before, and when last."""
    commits = dict.fromkeys(each["verified"] for each in cells if "verified" in each)
    found = {commit: builds[commit] for commit in commits}
    return f"; short runs as before at commits {', '.join(found)}, last on {_last(found)}" if found else ""


def _remarks(document: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the remarks of the file, and which results are of other code than that with which the pages are written."""
    cells = document["cells"]
    for text, commits in document.get("remarks", {}).items():
        yield f"**{text}** (Runs of commits {', '.join(commits)}.)"
    path = folder / WRITTEN
    today = json.loads(path.read_bytes())["code"] if path.exists() else fingerprint()
    older = [each for each in cells if each.get("code", today) != today]
    if older:
        lost = sum(each.get("lost", {}).get("code") == today for each in older)
        codes = ", ".join(sorted({each["code"] for each in older}))
        differs = f"; {lost} differ with it in short runs" if lost else ""
        unknown = f"; {len(older) - lost} are not verified with it" if len(older) > lost else ""
        yield f"**Older code**: {len(older)} runs are of code {codes}; this page is of {today}{differs}{unknown}."


def _last(builds: Mapping[str, Mapping[str, str]]) -> str:
    return max(each["date"] for each in builds.values())[:10]


def _tuning_lines(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| method | recipe | inner rate | eta | mu | loss | loss at each inner rate | worst of the grid | diverged |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for contender in TUNED:
        first = inner_points(contender)
        by_rate = dict(zip(first, losses_of(contender, first, entries), strict=True))
        chosen = chosen_for(contender, entries)
        if chosen is None:
            yield _row((contender.name, *[NOT_RUN] * 8))
            continue
        points = [replace(each, inner_rate=chosen.inner_rate) for each in outer_points(contender)] or first
        losses = [loss for loss in losses_of(contender, points, entries) if loss is not None]
        usable = [loss for loss in losses if loss <= GUESSING]
        outer = (f"{chosen.learning_rate:g}", f"{chosen.momentum:g}") if outer_points(contender) else ("", "")
        yield _row(
            (
                contender.name,
                f"`{chosen.recipe}`",
                f"{chosen.inner_rate:g}",
                *outer,
                f"{min(losses):.3f}",
                ", ".join(f"{point.inner_rate:g}: {loss:.3f}" for point, loss in by_rate.items() if loss is not None),
                f"{max(usable):.3f}" if usable else "",
                str(len(losses) - len(usable) or ""),
            )
        )


def table_lines(table: ResultTable, places: Places) -> Iterator[str]:
    """Return one table in Markdown."""
    yield _row((table.row_heading, *(column.heading for column in table.columns)))
    yield f"|---|{'---|' * len(table.columns)}"
    leaders = [
        _leader([_estimate(table, places, row, column) for row in table.rows], column) for column in table.columns
    ]
    for row in table.rows:
        cells = (_cell(table, places, row, *each) for each in zip(table.columns, leaders, strict=True))
        yield _row((row.label or row.contender, *cells))


def _cell(table: ResultTable, places: Places, row: TableRow, column: Column, leader: Estimate | None) -> str:
    found = _estimate(table, places, row, column)
    place = places.get((row.contender, key(column.circumstances(row))))
    if place is None:
        return NOT_RUN
    if found is None:
        counts = ((place.diverged, "diverged"), (place.failed, "failed"))
        return ", ".join(f"{count} of {place.runs} {how}" for count, how in counts if count)
    text = _shown(found, column)
    if leader is not None and column.best is not None and _is_among_the_best(found, leader, column.best):
        text = f"**{text}**"
    reached = len(found.by_seed)
    return f"{text} ({reached} of {place.runs} runs)" if 0 < reached < place.runs else text


def _estimate(table: ResultTable, places: Places, row: TableRow, column: Column) -> Estimate | None:
    found = _figure(places, row, column)
    if table.over is None or found is None:
        return found
    reference = _figure(places, table.over, column)
    return paired(found, reference) if reference is not None else None


def _figure(places: Places, row: TableRow, column: Column) -> Estimate | None:
    place = places.get((row.contender, key(column.circumstances(row))))
    return place.figures.get(column.figure) if place is not None else None


def _leader(figures: Iterable[Estimate | None], column: Column) -> Estimate | None:
    there = [each for each in figures if each is not None]
    if column.best is None or len(there) < 2:
        return None
    return (min if column.best == "low" else max)(there, key=lambda each: each.mean)


def _is_among_the_best(found: Estimate, leader: Estimate, end: Best) -> bool:
    if found.standard_error is None:
        return found is leader
    noisy = bool(leader.standard_error) and found.standard_error > NOISY * (leader.standard_error or 0.0)
    return not noisy and not better(leader, found, end)


def _shown(figure: Estimate, column: Column) -> str:
    mean = f"{column.scale * figure.mean:,.{column.digits}f}"
    if not figure.standard_error:
        return mean
    return f"{mean} ± {column.scale * figure.standard_error:,.{column.digits}f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def write_pages(folder: Path) -> None:
    """Write all figures and pages of a folder; figures stay as they are without matplotlib."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    files.replace(folder / WRITTEN, f'{{"code": "{fingerprint()}"}}\n'.encode())
    for name, experiment in EXPERIMENTS.items():
        try:
            drawn = svg(experiment.panels, summaries(experiment, load(folder, name)["cells"]))
        except ImportError:
            click.echo("Figures were not drawn: matplotlib is not installed. Install it with pip install matplotlib.")
            break
        path = folder / "figures" / f"{name}.svg"
        if drawn is None:
            path.unlink(missing_ok=True)
        else:
            files.replace(path, drawn)
    for name, text in pages(folder).items():
        files.replace(folder / name, text.encode())


@click.command()
def main() -> None:
    """Draw docs/results/*.md and docs/results/figures from docs/results/*.json."""
    write_pages(RESULTS)
    if asked := outdated(RESULTS):
        click.echo(asked)


if __name__ == "__main__":
    main()
