"""Arguments and number types that several commands share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import click

from p2ptrain.base import files
from p2ptrain.base.errors import JoinLinkError
from p2ptrain.base.options import FiniteRange as FiniteRange
from p2ptrain.base.text import UserPath, command_line
from p2ptrain.manifest import KEY_FILE, JoinLink

FILE = click.Path(exists=True, dir_okay=False, path_type=UserPath)
HOME = click.argument("home", type=click.Path(file_okay=False, path_type=UserPath))


class Utf8(click.ParamType):
    """A text, which is rejected if it has bytes that are not UTF-8: a tokenizer would read others in their place."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if broken := broken_bytes(text):
            self.fail(f"the text is not UTF-8: {broken}. Convert it, for example with iconv -t UTF-8.", param, ctx)
        return text


def broken_bytes(text: str) -> str:
    """Name the first byte of a text that is not UTF-8, and its place; empty if there is none."""
    found = re.search("[\ud800-\udfff]", text)
    return "" if found is None else f"byte 0x{ord(found[0]) & 0xFF:02X} follows {found.start():,} characters"


def _joined(context: click.Context, _: click.Parameter, words: Sequence[str]) -> str | None:
    """Return the words as one text, or None; words after the link, and options among them, are usage errors."""
    text = " ".join(words)
    if options := re.findall(r"(?<=\s)--[a-z][\w-]*", text):
        raise click.UsageError(f"Give {', '.join(options)} after the link, outside of its quotes.", context)
    if len(words) == 1 and text.strip() and UserPath(text).is_dir():
        raise JoinLinkError(f"{UserPath(text)} is a directory, and no join link.", _instead(context, UserPath(text)))
    with contextlib.suppress(JoinLinkError):  # the command reports it
        if len(words) > 1 and not "".join(words).endswith(str(JoinLink.parse(text))):
            raise click.UsageError(f"Got unexpected words after the link: {text}", context)
    return text if words else None


def _instead(context: click.Context, directory: UserPath) -> str:
    """Return what to type instead of a directory."""
    with contextlib.suppress(OSError):
        if files.exists(directory / KEY_FILE):
            return f"It is a run's directory; this prints its link: {command_line('p2ptrain', 'bootstrap', directory)}"
    return f"If it is a peer's home: {command_line(*context.command_path.split(), '--home', directory)}"


MIN_TEXT_GB = 0.2
"""Smallest disk cap of the text, in gigabytes: what training needs at once, and held-out text."""

TEAM = click.option(
    "--team", type=click.IntRange(2, 256), help="Devices of the team, those of other computers included.", metavar="N"
)
AT = click.option(
    "--at", help="Private address of this computer where others join the team by p2ptrain rank.", metavar="HOST[:PORT]"
)

WEIGHTS = click.option(
    "--weights",
    type=click.Path(exists=True, path_type=UserPath),
    help="The model to begin from, file or folder, if the run names it by digest.",
    metavar="PATH",
)

LINK = click.argument("link", nargs=-1, metavar="[LINK]", callback=_joined)
"""A join link, which may be broken into words or have the join command before it."""
