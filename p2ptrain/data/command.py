"""``p2ptrain tokens``, and the part of ``p2ptrain init`` that reads an author's own text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import UserPath, command_line, printable


@click.command(short_help="Count the tokens of a run's text, or show some.")
@click.argument("run", type=click.Path(path_type=UserPath))
@click.option("--show", type=click.IntRange(1, 1000), metavar="N", help="Print the first N rows that are trained on.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tokens(run: Path, show: int | None, as_json: bool) -> None:
    """Count the tokens of the run in the directory RUN, signed or not, as init noted them.

    With --show, print rows as text: what training predicts is in bold, or between » and « if this is no terminal.
    """
    with command_imports():
        from p2ptrain.data.figures import read_summary, text_figures
        from p2ptrain.data.showing import shown_rows
        from p2ptrain.manifest import read_run

    if run.is_file():
        raise UserError(
            f"{run} is a file; tokens are counted of a run, which has the tokenizer.",
            "Name the run's directory. To begin a run for a text: p2ptrain init NEW_RUN --corpus FILE",
        )
    manifest = read_run(run)
    if show is not None:
        for number, row in enumerate(shown_rows(manifest, run, show), 1):
            if as_json:
                click.echo(json.dumps([{"text": part.text, "counts": part.counts} for part in row]))
                continue
            parts = [click.style(part.text, bold=True) if part.counts else part.text for part in row]
            if not Console().is_terminal:
                parts = [f"»{part.text}«" if part.counts else part.text for part in row]
            click.echo(f"--- row {number}")
            click.echo("".join(parts))
        return
    figures = text_figures(manifest, read_summary(run))
    if as_json:
        click.echo(json.dumps({"tokens": figures.tokens, **asdict(figures)}))
        return
    for name, value in figures.table():
        click.echo(printable(f"{name:16} {value}"))
    for warning in figures.warnings:
        click.echo(printable(f"warning: {warning}."), err=True)


def create_with_text(run: Path, **options: Any) -> str:
    """Create a run, print what was found of its text, and return what was chosen. Raises UserError.

    Args:
        options: fields of ``own_text.Wanted``, as the author has typed them.
    """
    with command_imports():
        from p2ptrain.data.chat_template import CHATML
        from p2ptrain.data.file_store import FILES_FOLDER, MOST_STORED_BYTES
        from p2ptrain.data.own_text import Wanted, create
        from p2ptrain.data.unfinished import SHARDS_FOLDER, UNFINISHED
        from p2ptrain.manifest import parameter_count

    wanted = Wanted(**options)
    try:
        with progress_bar("reading the text") as show:
            made = create(run, wanted, lambda tokens, share: show(f"tokenizing: {tokens:,} tokens", share))
    except KeyboardInterrupt:
        if (run / UNFINISHED).exists():
            click.echo("Stopped. The same command goes on where it was.", err=True)
        raise
    spec = made.manifest.corpus
    if made.figures is not None and spec.kind == "shards":
        for source in made.sources:
            dialogues = ""
            if source.is_dialogues:
                its = "ChatML" if spec.template == CHATML else f"{wanted.template or 'the chat template of the model'}"
                dialogues = f", dialogues of the column {source.column} in the form of {its}"
            click.echo(printable(f"{source.name}: read as {source.formats}{dialogues}"))
        for name, value in made.figures.table():
            click.echo(printable(f"{name:16} {value}"))
        click.echo(f"size: {made.reason}")
        for warning in made.figures.warnings:
            click.echo(printable(f"warning: {warning}."), err=True)
        click.echo(f"{run / SHARDS_FOLDER}: the tokens; show some: {command_line('p2ptrain', 'tokens', run)} --show 3")
    if made.stored:
        click.echo(f"{run / FILES_FOLDER}: {' and '.join(made.stored)}, which peers get by the link.")
    for what in made.too_large:
        click.echo(
            f"The {what} are larger than {MOST_STORED_BYTES >> 20} MiB, so they do not travel with the run: each peer "
            f"needs the file and --{what} FILE."
        )
    size = f"{parameter_count(made.manifest.model):,} parameters"
    return size if made.figures is not None else f"preset {wanted.preset or 'demo'}, {size}"


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[str, float], None]]:
    """Show what is done, its share and the time left, if standard error is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda doing, share: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(doing, total=1.0)
        yield lambda doing, share: progress.update(task, completed=min(share, 1.0), description=doing)
