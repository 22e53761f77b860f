"""``p2ptrain evaluate``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import printable
from peer.options import FILE, MODEL, check_model


@click.command(short_help="Measure a model's loss on a text, or its scores in tasks.")
@MODEL
@click.argument("text", required=False, type=FILE, metavar="[FILE]")
@click.option(
    "--text-field", default="", help="Column of a jsonl or parquet FILE.  [messages if it has dialogues, else text]"
)
@click.option("--device", default="auto", show_default=True, help=f"{DEVICE_WORDS}.")
@click.option("--most-tokens", type=click.IntRange(1), metavar="N", help="Stop after so many predicted tokens.")
@click.option(
    "--sequence-length", type=click.IntRange(2), metavar="T", help="Tokens of a window.  [as the run trained; 2048]"
)
@click.option("--stride", type=click.IntRange(1), metavar="S", help="Tokens between two windows.  [T: no overlap]")
@click.option("--tasks", metavar="TASK,…", help="Tasks of EleutherAI's lm-eval instead of a text.")
@click.option("--examples", type=click.IntRange(1), metavar="N", help="Of each task, only the first N examples.")
@click.option("--template", type=FILE, metavar="FILE", help="A chat template, if a folder or home has none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    model: Path,
    text: Path | None,
    text_field: str,
    device: str,
    most_tokens: int | None,
    sequence_length: int | None,
    stride: int | None,
    tasks: str | None,
    examples: int | None,
    template: Path | None,
    as_json: bool,
) -> None:
    """Print loss, perplexity and bits per byte of a model.

    MODEL is the home of a peer, whose newest checkpoint is read, or a folder in Hugging Face format. FILE is text in
    UTF-8, jsonl or parquet of any size; without it a home's model reads its run's held-out text.

    Of dialogues, as init takes them, the answers are predicted, in the form of the run's or the folder's chat template.
    Any other text is cut into windows of T tokens. A token is predicted from those before it in its window, so the
    first token of the text is not predicted.
    """
    is_home = check_model(model)
    if tasks is None and examples is not None:
        raise click.UsageError("--examples is for --tasks.")
    if tasks is not None and (text or most_tokens or sequence_length or stride or template):
        raise click.UsageError("With --tasks, omit FILE, --most-tokens, --sequence-length, --stride and --template.")
    if tasks is None and text is None:
        if not is_home:
            raise UserError(f"{model} is not the home of a peer, so it has no held-out text.", "Name a FILE with text.")
        if sequence_length or stride:
            raise click.UsageError("--sequence-length and --stride are for a FILE.")
    if tasks is not None:
        _print_scores(model, is_home, tasks, examples, device, as_json)
        return
    with _progress() as tell:
        tell("loading torch and transformers")
        with command_imports():
            from peer.trained.evaluating import evaluate_file, evaluate_held_out
            from peer.trained.language_model import load

        tell("loading the model")
        loaded = load(model, device)

        def goes_on(read: int, wanted: int) -> bool:
            tell(f"{read:,} tokens" if not wanted else f"{read:,} of {wanted:,} tokens")
            return True

        if text is None:
            found = evaluate_held_out(loaded, most_tokens, goes_on)
        else:
            found = evaluate_file(loaded, text, text_field, most_tokens, sequence_length, stride, goes_on, template)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        _print_table(found.table())
    for warning in found.warnings:
        click.echo(printable(f"warning: {warning}."), err=True)


def _print_scores(model: Path, is_home: bool, tasks: str, examples: int | None, device: str, as_json: bool) -> None:
    from peer.trained.task_scores import check_installed

    check_installed()  # before the import of large libraries
    with _progress() as tell:
        tell("loading torch and transformers")
        with command_imports():
            from peer.trained.task_scores import score

        names = [name for name in map(str.strip, tasks.split(",")) if name]
        scores = score(model, is_home, names, examples, device, tell)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in scores]))
    else:
        _print_table([(f"{each.task} {each.metric}", each.shown()) for each in scores])


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(printable(f"{name:{width}}  {value}"))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what happens, if standard error is a terminal."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        yield lambda activity: None
        return
    with console.status("") as status:
        yield lambda activity: status.update(printable(activity))
