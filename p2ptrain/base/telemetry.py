"""Noteworthy things, once: the terminal, the JSONL log and the tests all read the same notes.

``lossy_output`` keeps a process alive whose output nobody takes any more: a log on a full disk, a pipe whose reader
ended, a terminal that was closed. ``strict_output`` is for commands that are there for what they print: the same is
an error of theirs, told in one line.

A note is a kind and a few plain fields. ``EventLog`` appends each as one JSON line to the peer's home, bounded:
past ``MAX_LOG_BYTES`` the file is renamed to ``events.1.jsonl`` and a new one begun. A full disk costs the lines that
it does not take, never training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO, cast

from p2ptrain.base import files
from p2ptrain.base.errors import OutputError

MAX_LOG_BYTES = 64 << 20
"""At most two files of this size: weeks of exchanges at one a second."""

Listener = Callable[[str, dict[str, Any]], None]


class MemoryLog:
    """Keeps the last notes in memory."""

    def __init__(self, length: int = 10_000) -> None:
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=length)

    def note(self, kind: str, **fields: Any) -> None:
        self.notes.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.notes]


class EventLog:
    """A JSONL file, and listeners that see every note too. Safe from any thread.

    Owns the file: ``close`` it. Survives a full or vanished disk: the note still reaches the listeners, and
    ``write_error`` says what happened.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.write_error: str | None = None
        self._path = path
        self._wall = wall
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._file: IO[str] | None = None

    def listen(self, listener: Listener) -> None:
        """Call ``listener(kind, fields)`` for every note from now on, in the noting thread."""
        self._listeners.append(listener)

    def note(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"time": round(self._wall(), 3), "kind": kind, **fields}, default=str)
        with self._lock:
            self._write(line + "\n")
        for listener in self._listeners:
            listener(kind, fields)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, line: str) -> None:
        try:
            if self._file is None:
                line = files.missing_newline(self._path) + line
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write(line)
            if self._file.tell() > MAX_LOG_BYTES:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_suffix(".1.jsonl"))
        except OSError as error:
            self.write_error = str(error)
            self._file = None


class LossyStream:
    """A text stream from which what cannot be written is lost, and nothing else: no write to it raises OSError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, OutputError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, OutputError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class StrictStream:
    """A text stream that says what became of it: OutputError where another raises OSError.

    Of an OSError each library makes something else: click and rich end the process at a broken pipe, and say nothing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _unprintable(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _unprintable(error) from None

    @property
    def buffer(self) -> StrictStream:
        """The bytes below, minded too: click writes there what the stream's own encoding lacks."""
        return StrictStream(cast(TextIO, self._stream.buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _unprintable(error: OSError) -> OutputError:
    why = error.strerror or error
    return OutputError(f"What is printed cannot be written: {why}.", "Print it to where there is room and a reader.")


@contextlib.contextmanager
def strict_output() -> Iterator[None]:
    """Around a command: all that it prints is written when this ends. Raises OutputError where that cannot be done."""
    before = sys.stdout
    if before is None:  # closed from the start: nobody wants it
        yield
        return
    minded = StrictStream(before)
    sys.stdout = cast(TextIO, minded)
    try:
        yield
        minded.flush()
    finally:
        sys.stdout = before
        _drop_what_is_left(before)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """Around a process's long life: its standard output and error may come to their ends before it does.

    They may also be closed from the start, or unable to write what strangers call themselves.
    """
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (cast(TextIO, LossyStream(_writing_all(stream or nowhere))) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in filter(None, before):
                _drop_what_is_left(stream)


def _writing_all(stream: TextIO) -> TextIO:
    """The stream, with letters that it has not spelled out."""
    if (reconfigure := getattr(stream, "reconfigure", None)) is not None:  # it may be minded
        reconfigure(errors="backslashreplace")
    return stream


def _drop_what_is_left(stream: TextIO) -> None:
    """Lest the interpreter fails on it when it ends (Python's documentation, signal, "Note on SIGPIPE")."""
    try:
        stream.flush()
    except (OSError, OutputError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
