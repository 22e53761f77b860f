"""The evidence part of docs/RESULTS.md, from the JSON files in docs/results: ``python -m bench.evidence.tables``.

Nothing in that part is typed by hand, the list of what others do better included. In a column that somebody can win,
the best figure and all that are not clearly worse are bold. A figure without ± is a single run, computed, or the same
for all seeds. Where a run diverged there is no loss: a mean of the others would speak for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from bench.evidence import documents
from bench.evidence.conclusion import conclusion
from bench.evidence.experiments import EXPERIMENTS
from bench.evidence.goals import goals
from bench.evidence.identity import ROOT
from bench.evidence.layout import Column, Experiment, Row, Table
from bench.evidence.rule import Decision, decide
from bench.evidence.summary import GUESSING, Figure, Summary, better, key, summaries
from bench.evidence.summary import document as summary_document
from bench.results import replaced
from bench.table import markdown
from p2ptrain.files import replace

RESULTS = ROOT / "docs" / "results"
DOCUMENT = ROOT / "docs" / "RESULTS.md"
OURS = ("swarm-2", "swarm")
"""Of ours, the first that a table has is compared with its rivals."""
NOT_RUN = "-"
WIDTH = 120
"""Of a line of a note."""

Documents = Mapping[str, Mapping[str, Any]]
"""By experiment, and "tuning"."""


def load(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All documents that are there."""
    found = {name: documents.read(folder / f"{name}.json") for name in ("tuning", *EXPERIMENTS)}
    return {name: each for name, each in found.items() if each is not None}


def summarized(made: Documents) -> dict[str, list[Summary]]:
    """The summaries of each experiment that has a document."""
    return {
        name: summaries(experiment, made[name]["cells"]) for name, experiment in EXPERIMENTS.items() if name in made
    }


def summary_of(made: Documents) -> dict[str, Any]:
    """``summary.json``."""
    return summary_document(summarized(made), EXPERIMENTS, made.get("tuning"))


def drawings(folder: Path = RESULTS) -> frozenset[str]:
    """The experiments that have a drawing."""
    return frozenset(path.stem for path in (folder / "figures").glob("*.svg"))


def evidence_lines(made: Documents, drawn: frozenset[str] = frozenset()) -> list[str]:
    """The whole evidence part.

    Args:
        made: the documents.
        drawn: experiments whose drawing can be shown.
    """
    found, summary = summarized(made), summary_of(made)
    decision = decide(summary)
    reached = goals(summary, decision)
    lines = [*_state_lines(made), ""]
    lines += ["### In short", "", *_short_lines(conclusion(summary, decision, reached)), ""]
    lines += ["### What the rule chooses", "", *_decision_lines(decision), ""]
    lines += ["### Goals", "", *(markdown(reached) if reached else ["Nothing yet."]), ""]
    lines += ["### Where others win", "", *_losses(found), ""]
    lines += ["### Tuning", "", *_tuning_lines(made.get("tuning")), ""]
    for name, experiment in EXPERIMENTS.items():
        lines += [*_experiment_lines(experiment, made.get(name), found.get(name, []), name in drawn), ""]
    return lines[:-1]


def _state_lines(made: Documents) -> list[str]:
    lines = ["| | cells | of | failed | core hours | code | last run |", "|---|---|---|---|---|---|---|"]
    for name in EXPERIMENTS:
        if name not in made:
            lines.append(f"| {name} | {NOT_RUN} | {len(EXPERIMENTS[name].cells)} | | | | |")
            continue
        document = made[name]
        cells, builds = document["cells"], document["builds"]
        computed = EXPERIMENTS[name].computed is not None
        seconds = sum(each.get("seconds", 0.0) for each in cells)
        commits = ", ".join(dict.fromkeys(each["commit"] for each in builds.values() if each))
        last = max((each["date"] for each in builds.values() if each), default="")
        failed = sum("failure" in each for each in cells)
        hours = "computed" if computed else f"{seconds / 3_600:.2f}"
        lines.append(
            f"| {name} | {len(cells)} | {len(cells) if computed else document['planned']} | {failed or ''} | {hours} "
            f"| {commits} | {last} |"
        )
    machines = sorted(
        {each["machine"] for doc in made.values() for each in doc.get("builds", {}).values() if "machine" in each}
    )
    return [*lines, "", f"Machine: {'; '.join(machines)}."] if machines else lines


def _decision_lines(decision: Decision | None) -> list[str]:
    if decision is None:
        return ["Nothing yet: the rule needs R1, R4 and R5."]
    numbers = f"eta {decision.learning_rate:g}, mu {decision.momentum:g}"
    lines = [
        f"**{decision.contender}** (recipe `{decision.recipe}`, {numbers}), codec: {decision.codec or 'not decided'}.",
        "",
    ]
    return lines + [line for each in decision.because for line in _bullet(each)]


def _short_lines(sentences: list[str]) -> list[str]:
    return [line for each in sentences for line in _bullet(each)] or ["Nothing yet."]


def _losses(found: Mapping[str, Sequence[Summary]]) -> list[str]:
    """Every column in which some other method is clearly better than ours."""
    lines = [
        line for name, each in found.items() if EXPERIMENTS[name].competition for line in _lost(EXPERIMENTS[name], each)
    ]
    return lines or ["Nowhere yet by more than two standard errors."]


def _lost(experiment: Experiment, found: Sequence[Summary]) -> Iterator[str]:
    by_place = _by_place(found)
    for table in experiment.tables:
        for column in table.columns:
            shown = {row.contender: _figure(by_place, row, column) for row in table.rows}
            own = next((name for name in OURS if shown.get(name) is not None), "")
            mine = shown.get(own)
            if column.best is None or mine is None:
                continue
            rivals = {
                name: each
                for name, each in shown.items()
                if each is not None and not name.startswith("swarm") and better(each, mine, column.best)
            }
            if rivals:
                ranked = sorted(rivals, key=lambda name: rivals[name].mean, reverse=column.best == "high")
                names = ", ".join(f"{name} {_shown(rivals[name], column)}" for name in ranked)
                yield from _bullet(
                    f"{experiment.id}, {table.title}, {column.heading}: {names} against {own}'s {_shown(mine, column)}."
                )


def _tuning_lines(tuning: Mapping[str, Any] | None) -> list[str]:
    if tuning is None:
        return ["Nothing yet."]
    lines = [
        f"Validation split, seed {tuning['seed']}, N = 8, H = 10; eta of {_listed(tuning['learning_rates'])} "
        f"times mu of {_listed(tuning['momenta'])}",
        f"(sparseloco: decays of error feedback, {_listed(tuning['decays'])}) for each form of each method.",
        "",
        "| method | chosen | eta | mu | loss | worst of the grid | diverged |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in tuning["contenders"].items():
        chosen = each["chosen"]
        losses = [point["loss"] for point in each["grid"] if point["loss"] is not None and point["loss"] <= GUESSING]
        diverged = len(each["grid"]) - len(losses)
        best_loss = min(point["loss"] for point in each["grid"] if point["loss"] is not None)
        worst = f"{max(losses):.3f}" if losses else ""
        lines.append(
            f"| {name} | `{chosen['recipe']}` | {chosen['learning_rate']:g} | {chosen['momentum']:g} "
            f"| {best_loss:.3f} | {worst} | {diverged or ''} |"
        )
    return lines


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{each:g}" for each in numbers)


def _experiment_lines(
    experiment: Experiment, document: Mapping[str, Any] | None, found: Sequence[Summary], has_drawing: bool
) -> Iterator[str]:
    yield f"### {experiment.id}. {experiment.question}"
    yield ""
    if document is None:
        yield "Not run yet."
        return
    yield from (line for note in experiment.notes for line in _bullet(note))
    if document.get("checks"):
        yield ""
        yield "| published | there | here | how it is known |"
        yield "|---|---|---|---|"
        yield from (
            f"| {each['what']} | {each['published']} | {each['ours']} | {each['standing']} |"
            for each in document["checks"]
        )
    if has_drawing:
        yield ""
        yield f"![{experiment.question}](results/figures/{experiment.id}.svg)"
    by_place = _by_place(found)
    for table in experiment.tables:
        yield ""
        yield f"**{table.title}**"
        yield ""
        yield from table_lines(table, by_place)


def table_lines(table: Table, by_place: Mapping[tuple[str, str], Summary]) -> Iterator[str]:
    """One table in Markdown."""
    yield f"| {table.row_heading} | {' | '.join(column.heading for column in table.columns)} |"
    yield f"|---|{'---|' * len(table.columns)}"
    leaders = [_leader([_figure(by_place, row, column) for row in table.rows], column) for column in table.columns]
    for row in table.rows:
        cells = [_cell(by_place, row, column, leader) for column, leader in zip(table.columns, leaders, strict=True)]
        yield f"| {row.heading} | {' | '.join(cells)} |"


NOISY = 10.0
"""A figure whose standard error is so many times the leader's tells nothing, and so is not among the best."""


def _cell(by_place: Mapping[tuple[str, str], Summary], row: Row, column: Column, leader: Figure | None) -> str:
    found = _figure(by_place, row, column)
    place = by_place.get((row.contender, key(column.circumstances(row))))
    if found is None and place is not None and place.failed:
        diverged = place.failed - place.broken
        counts = [(diverged, "diverged"), (place.broken, "failed")]
        return ", ".join(f"{count} of {place.runs} {how}" for count, how in counts if count)
    if found is None:
        return NOT_RUN if place is None else ""
    text = _shown(found, column)
    if leader is not None and column.best is not None and _is_among(found, leader, column.best):
        alone = found.standard_error is None and found is not leader
        text = text if alone else f"**{text}**"
    if place is not None and 0 < len(found.seeds) < place.runs:  # not all got there
        text += f" ({len(found.seeds)} of {place.runs} runs)"
    return text


def _is_among(found: Figure, leader: Figure, best: Literal["low", "high"]) -> bool:
    """Whether it may be said to be as good as the best."""
    noisy = bool(leader.standard_error) and (found.standard_error or 0.0) > NOISY * (leader.standard_error or 0.0)
    return not noisy and not better(leader, found, best)


def _leader(figures: Iterable[Figure | None], column: Column) -> Figure | None:
    there = [each for each in figures if each is not None]
    if column.best is None or len(there) < 2:
        return None
    return (min if column.best == "low" else max)(there, key=lambda each: each.mean)


def _shown(figure: Figure, column: Column) -> str:
    mean = f"{column.scale * figure.mean:,.{column.digits}f}"
    if not figure.standard_error:
        return mean
    return f"{mean} ± {column.scale * figure.standard_error:,.{column.digits}f}"


def _figure(by_place: Mapping[tuple[str, str], Summary], row: Row, column: Column) -> Figure | None:
    place = by_place.get((row.contender, key(column.circumstances(row))))
    return None if place is None else place.figures.get(column.figure)


def _by_place(found: Sequence[Summary]) -> dict[tuple[str, str], Summary]:
    return {(each.contender, key(each.setting)): each for each in found}


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when the documents differ from the JSON files.")
def main(check: bool) -> None:
    """Write docs/results/summary.json and the evidence part of docs/RESULTS.md from docs/results/*.json."""
    made = load()
    summary = documents.text(summary_of(made))
    before = DOCUMENT.read_text(encoding="utf-8")
    after = replaced(before, "evidence", evidence_lines(made, drawings()))
    path = RESULTS / "summary.json"
    if check:
        same = after == before and path.exists() and path.read_text(encoding="utf-8") == summary
        if not same:
            raise click.ClickException(
                "docs/RESULTS.md or summary.json is not what the JSON files give; run this without --check"
            )
        return
    documents.write(path, summary_of(made))
    replace(DOCUMENT, after.encode())
    click.echo(f"{DOCUMENT}: written")


if __name__ == "__main__":
    main()
