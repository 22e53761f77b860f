"""Option of a command that names a file to read, which is looked at before large libraries are imported."""

from __future__ import annotations

import errno
import os
from typing import Any

import click

from p2ptrain.base import files
from p2ptrain.base.errors import UserError
from p2ptrain.base.text import UserPath, printable


class InputFile(click.Path):
    """Path of an existing file that this user may read, with ``dir_okay`` also of a folder.

    Raises UserError: click's error would print the usage too.
    """

    def __init__(self, dir_okay: bool = False) -> None:
        super().__init__(dir_okay=dir_okay, readable=False, path_type=UserPath)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = UserPath(os.fsdecode(super().convert(value, param, ctx)))
        try:
            path.stat()
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            option = f"{param.opts[0]}: " if param is not None else ""
            problem = f"{option}{printable(path)} cannot be read: {files.cause(error)}."
            raise UserError(problem, files.remedy(error, "")) from None
        return path
