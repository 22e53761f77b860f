"""Types of options: files to read, which are looked at before large libraries are imported, and finite numbers."""

from __future__ import annotations

import errno
import math
import os
from typing import Any

import click

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.text import UserPath, printable

HUB = "hf:"
"""Beginning of a name on the Hugging Face hub, where an option takes one."""
TOKENIZER = "tokenizer.json"


class InputFile(click.Path):
    """Path of an existing file that this user may read, with ``dir_okay`` also of a folder.

    A folder for ``--tokenizer`` stands for the tokenizer.json in it. Raises UserError: click's error would print the
    usage too.
    """

    def __init__(self, dir_okay: bool = False) -> None:
        super().__init__(dir_okay=dir_okay, readable=False, path_type=UserPath)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if param is not None and param.name == "tokenizer":
            value = inside(UserPath(value))
        path = UserPath(os.fsdecode(super().convert(value, param, ctx)))
        option = f"{param.opts[0]}: " if param is not None else ""
        if str(path).startswith(HUB):
            raise UserError(
                f"{option}{printable(path)} is on the hub, and this takes a file of this computer.",
                "Download it, and name the file.",
            )
        try:
            path.stat()
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            problem = f"{option}{printable(path)} cannot be read: {files.cause(error)}."
            raise UserError(problem, files.remedy(error, "")) from None
        return path


def inside(place: UserPath) -> UserPath:
    """Return the tokenizer.json in a folder; the path of a file unchanged."""
    return place / TOKENIZER if place.is_dir() else place


class FiniteRange(click.FloatRange):
    """A float range that rejects NaN and infinity, which click's own accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
