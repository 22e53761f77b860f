"""``p2ptrain tokens``, and the part of ``p2ptrain init`` that reads an author's own files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console

from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.input_file import HUB, InputFile, inside
from p2ptrain.base.text import UserPath, printable

if TYPE_CHECKING:
    from p2ptrain.data.given_model import GivenModel

FILE = InputFile()


@click.command(short_help="Count the tokens of a run's text.")
@click.argument("run", type=click.Path(path_type=UserPath))
@click.option("--data", type=FILE, metavar="FILE", help="The corpus, if it is a file.  [the one that RUN keeps]")
@click.option("--tokenizer", type=FILE, metavar="FILE", help="The tokenizer.json, likewise.")
@click.option("--template", type=FILE, metavar="FILE", help="The chat template, likewise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tokens(run: Path, data: Path | None, tokenizer: Path | None, template: Path | None, as_json: bool) -> None:
    """Count the tokens of the run in the directory RUN, signed or not.

    Tokenizes the text as a peer does, once: peers on this machine then use these tokens.
    """
    with command_imports():
        from p2ptrain.data.corpus import open_corpus, read_summary
        from p2ptrain.data.figures import text_figures
        from p2ptrain.data.file_store import named_files, stored
        from p2ptrain.data.stream import cache_directory
        from p2ptrain.manifest import read_run

    if run.is_file():
        raise UserError(
            f"{run} is a file; tokens are counted of a run, which has the tokenizer.",
            "Name the run's directory. To begin a run for a text: p2ptrain init NEW_RUN --corpus FILE",
        )
    manifest, cache = read_run(run), cache_directory()
    kept = {file.what: stored(run, file.sha256) for file in named_files(manifest)}
    with _progress() as tell:
        corpus = open_corpus(
            manifest,
            cache,
            data or kept.get("corpus"),
            tokenizer or kept.get("tokenizer"),
            tell,
            template_file=template or kept.get("template"),
        )
    summary = read_summary(manifest, cache)
    figures = text_figures(manifest, len(corpus.tokens), corpus.tokenizer.vocabulary_size, summary)
    if as_json:
        click.echo(json.dumps(asdict(figures)))
        return
    for name, value in figures.table():
        click.echo(printable(f"{name:16} {value}"))
    for warning in figures.warnings:
        click.echo(printable(f"warning: {warning}."), err=True)


def create_with_files(
    run: Path,
    corpus: Path | None,
    tokenizer: Path | None,
    preset: str | None,
    text_field: str,
    name: str | None,
    model: GivenModel | None = None,
    template: Path | None = None,
) -> str:
    """Create a run for the author's files, print what was found, and return what was chosen. Raises UserError.

    Corpus and tokenizer may be names on the hub, ``hf:owner/name[@revision]``.
    """
    with command_imports():
        from p2ptrain.data.chat_template import CHATML
        from p2ptrain.data.file_store import FILES_FOLDER, MOST_STORED_BYTES
        from p2ptrain.data.own_text import create
        from p2ptrain.data.stream import cache_directory
        from p2ptrain.manifest import parameter_count

    with _progress() as tell:
        text, ids = _on_hub(corpus, "dataset"), _on_hub(tokenizer, "model")
        made = create(run, text, ids, preset, text_field, name, cache_directory(), tell, model, template)
    if made.figures is not None:
        spec = made.manifest.corpus
        dialogues = ""
        what = f"at revision {spec.revision}" if spec.kind == "hub" else f"as {getattr(spec, 'format', spec.kind)}"
        if spec.kind != "builtin" and spec.template:
            its = "ChatML" if spec.template == CHATML else f"{template or 'the chat template of the model'}"
            dialogues = f", dialogues of the column {spec.text_field} in the form of {its}"
        click.echo(printable(f"{corpus}: read {what}{dialogues}"))
        for name, value in made.figures.table():
            click.echo(printable(f"{name:16} {value}"))
        click.echo(f"size: {made.reason}")
        for warning in made.figures.warnings:
            click.echo(printable(f"warning: {warning}."), err=True)
    if made.stored:
        click.echo(f"{run / FILES_FOLDER}: {' and '.join(made.stored)}, which peers get by the link.")
    for what in made.too_large:
        option = {"corpus": "--data"}.get(what, f"--{what}")
        click.echo(
            f"The {what} is larger than {MOST_STORED_BYTES >> 20} MiB, so it does not travel with the run: each peer "
            f"needs the file and {option} FILE."
        )
    return f"{parameter_count(made.manifest.model):,} parameters"


def _on_hub(place: Path | None, kind: Literal["model", "dataset"]) -> Path | dict[str, Any] | None:
    """Return the table for ``hf:owner/name[@revision]``, and for a tokenizer's folder its file. Raises UserError."""
    from p2ptrain.data.hub_weights import commit_of

    if place is not None and str(place).startswith(HUB):
        name, _, revision = str(place).removeprefix(HUB).partition("@")
        return {"kind": "hub", "name": name, "revision": commit_of(name, revision, kind)}
    return inside(UserPath(place)) if place is not None and kind == "model" else place


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int | None], None]]:
    """Show the number of tokens while a text is tokenized, if standard error is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda tokens, most: None
        return
    with console.status("reading the text") as status:
        yield lambda tokens, most: status.update(f"tokenizing: {tokens:,} tokens")
