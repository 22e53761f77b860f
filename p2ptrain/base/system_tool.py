"""Calls of the system's own programs, such as nvidia-smi, with a deadline."""

from __future__ import annotations

import os
import shutil
import subprocess

from p2ptrain.base.text import one_line

DEADLINE_S = 5.0
"""Seconds for a program to answer. Guess: answer times of nvidia-smi on loaded machines would settle it."""
MOST_CHARS = 200


class ToolError(Exception):
    """A program is missing, failed or did not answer; the message says which, in one line."""

    def __init__(self, why: str) -> None:
        super().__init__(one_line(why, MOST_CHARS))


def output_of(program: str, *arguments: str, deadline_s: float | None = None) -> str:
    """Run a program in its own session, so that Ctrl+C does not reach it; return its output. Raises ToolError.

    Args:
        deadline_s: seconds for it to answer; None: ``DEADLINE_S``.
    """
    deadline_s = deadline_s or DEADLINE_S
    path = shutil.which(program)
    if path is None:
        raise ToolError(f"{program} is not installed")
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=deadline_s,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"{program} did not answer within {deadline_s:g} s") from None
    except OSError as error:
        raise ToolError(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode:
        line = next(filter(None, map(str.strip, done.stdout.splitlines())), f"exit status {done.returncode}")
        raise ToolError(f"{program}: {line}")
    return done.stdout
