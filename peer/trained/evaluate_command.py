"""``p2ptrain evaluate``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import printable
from peer.options import FILE, HOME


@click.command(short_help="Measure a model's loss on a text.")
@HOME
@click.argument("text", required=False, type=FILE, metavar="[FILE]")
@click.option(
    "--text-field", default="", help="Column of a jsonl or parquet FILE.  [messages if it has dialogues, else text]"
)
@click.option("--device", default="auto", show_default=True, help=f"{DEVICE_WORDS}.")
@click.option("--most-tokens", type=click.IntRange(1), metavar="N", help="Stop after about so many predicted tokens.")
@click.option(
    "--sequence-length", type=click.IntRange(2), metavar="T", help="Tokens of a window of FILE.  [as the run trained]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    home: Path,
    text: Path | None,
    text_field: str,
    device: str,
    most_tokens: int | None,
    sequence_length: int | None,
    as_json: bool,
) -> None:
    """Print loss, perplexity and bits per byte of the newest checkpoint in HOME.

    FILE is text in UTF-8, jsonl or parquet of any size; without it the model reads its run's held-out text.

    Of dialogues, as init takes them, the answers are predicted, in the form of the run's chat template. Any other text
    is cut into windows of T tokens. A token is predicted from those before it in its window, so the first token of the
    text is not predicted.
    """
    from peer.home import Home
    from peer.screen import ActivityLine

    Home(home).check_trained()  # before the import of large libraries
    if text is None and (sequence_length or text_field):
        raise click.UsageError("--sequence-length and --text-field are for a FILE.")
    with ActivityLine(Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)) as line:
        line.tell("loading torch and transformers")
        with command_imports():
            from peer.trained.evaluating import evaluate_file, evaluate_held_out
            from peer.trained.language_model import load

        line.tell("loading the model")
        loaded = load(home, device)

        def tell(read: int, wanted: int) -> None:
            line.tell("evaluating", f"{read:,} of {wanted:,} tokens" if wanted else f"{read:,} tokens")

        if text is None:
            found = evaluate_held_out(loaded, most_tokens, tell)
        else:
            found = evaluate_file(loaded, text, text_field, most_tokens, sequence_length, tell)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        for name, value in found.table():
            click.echo(printable(f"{name:13}  {value}"))
    for warning in found.warnings:
        click.echo(printable(f"warning: {warning}."), err=True)
