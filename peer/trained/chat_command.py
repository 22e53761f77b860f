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
from peer.options import HOME, FiniteRange, Utf8

if TYPE_CHECKING:
    from peer.trained.chat import Conversation

PROMPT = "> "
EXIT_REFUSED = 2
"""Exit status if messages from a pipe got no answer."""


@click.command(short_help="Talk with a model.")
@HOME
@click.option("--system", type=Utf8(), metavar="TEXT", help="First message, which says how to answer.")
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(1, 100_000), help="Longest answer.")
@click.option(
    "--temperature", default=0.8, show_default=True, type=FiniteRange(0), help="0: always the most likely token."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same answers.")
@click.option("--device", default="auto", show_default=True, help=f"{DEVICE_WORDS}.")
def chat(home: Path, system: str | None, new_tokens: int, temperature: float, seed: int, device: str) -> None:
    """Talk with the newest checkpoint in HOME, if its run was taught dialogues.

    Each line is a message. Ctrl+C stops an answer, Ctrl+D leaves. From a pipe, the lines are read and the answers
    printed; the exit status is 2 if a line got no answer.
    """
    from peer.home import Home

    Home(home).check_trained()  # before the import of large libraries
    with command_imports():
        from p2ptrain.train.generate import Sampling
        from peer.trained.chat import Conversation
        from peer.trained.language_model import load

    sampling = Sampling(temperature, seed=seed)
    dialogue = Conversation.with_model(load(home, device), new_tokens, sampling, _tell, system)
    refused = sum(not _print_answer(dialogue, line) for line in _lines())
    if refused and not sys.stdin.isatty():
        sys.exit(EXIT_REFUSED)


def _tell(note: str) -> None:
    click.echo(f"({note})", err=True)


def _lines() -> Iterator[str]:
    """Yield the user's messages until the input ends; a terminal shows a prompt, and edits lines."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are not UTF-8
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\n")
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
            yield line


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
