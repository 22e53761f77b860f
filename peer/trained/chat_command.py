"""``p2ptrain chat``. Heavy modules are imported only when it runs."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2ptrain.base.device_names import DEVICE_WORDS
from p2ptrain.base.errors import CorpusError
from p2ptrain.base.imports import command_imports
from p2ptrain.base.text import printable_lines
from peer.options import FILE, MODEL, FiniteRange, Utf8, broken_bytes, check_model

if TYPE_CHECKING:
    from peer.trained.chat import Conversation

PROMPT = "> "
EXIT_REFUSED = 2
"""Exit status if messages from a pipe got no answer."""


@click.command(short_help="Talk with a model.")
@MODEL
@click.option("--system", type=Utf8(), metavar="TEXT", help="First message, which says how to answer.")
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(1, 100_000), help="Longest answer.")
@click.option(
    "--temperature", default=0.8, show_default=True, type=FiniteRange(0), help="0: always the most likely token."
)
@click.option("--top-k", default=50, show_default=True, type=click.IntRange(1), help="Draw from so many tokens.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same answers.")
@click.option("--device", default="auto", show_default=True, help=f"{DEVICE_WORDS}.")
@click.option("--template", type=FILE, metavar="FILE", help="A chat template, if a folder or home has none.")
def chat(
    model: Path,
    system: str | None,
    new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: str,
    template: Path | None,
) -> None:
    """Talk with the newest checkpoint in a peer's home, or with a model in a folder in Hugging Face format.

    Each line is a message. Ctrl+C stops an answer, Ctrl+D leaves. From a pipe, the lines are read and the answers
    printed; the exit status is 2 if a line got no answer.
    """
    check_model(model)
    with command_imports():
        from p2ptrain.train.generate import Sampling
        from peer.trained.chat import opened
        from peer.trained.language_model import load

    loaded = load(model, device)
    sampling = Sampling(temperature, top_k, seed)
    dialogue = opened(loaded, template, system, new_tokens, sampling, _tell)
    refused = sum(not _print_answer(dialogue, line) for line in _lines())
    if refused and not sys.stdin.isatty():
        sys.exit(EXIT_REFUSED)


def _tell(note: str) -> None:
    click.echo(f"({note})", err=True)


def _lines() -> Iterator[str]:
    """Yield the user's messages until the input ends; a terminal shows a prompt, and edits lines."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not UTF-8
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                yield _readable(line.rstrip("\n"))
        return
    with suppress(ImportError):
        import readline  # noqa: F401 -- ``input`` then edits lines and remembers them
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:  # drops the line
            click.echo()
            continue
        if line.strip():
            yield _readable(line)


def _readable(line: str) -> str:
    """Return a line with replacement characters for bytes that are not UTF-8, and tell of them."""
    if broken := broken_bytes(line):
        _tell(f"This line is not UTF-8, and the model reads \N{REPLACEMENT CHARACTER} instead: {broken}.")
    return line.encode(errors="surrogateescape").decode(errors="replace")


def _print_answer(dialogue: Conversation, line: str) -> bool:
    """Print an answer as it comes; return False, and say why, if the template refuses the message.

    On a terminal, Ctrl+C ends the answer alone.
    """
    with contextlib.closing(dialogue.answer(line)) as pieces:
        try:
            for piece in pieces:
                click.echo(printable_lines(piece), nl=False)
        except CorpusError as error:
            click.echo(f"error: {error.problem}\n  {error.remedy}", err=True)
            return False
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
    click.echo()
    return True
