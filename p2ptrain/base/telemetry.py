"""Event log: the terminal, the JSONL file and the tests all read the same notes.

A note is a kind and a few plain fields. The log is bounded: past ``MAX_LOG_BYTES`` the file is renamed to
``events.1.jsonl`` and a new one begins. A full disk loses lines but never stops training.

``lossy_output`` keeps a long-running process alive after its terminal or pipe has closed. ``strict_output`` is for
commands whose purpose is their output: there the same is an OutputError, of which a closed pipe has its own class.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO, cast

from p2ptrain.base import files
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import ClosedPipeError, OutputError

MAX_LOG_BYTES = 64 << 20
"""Size of each of at most two files: weeks of exchanges at one a second."""

Listener = Callable[[str, dict[str, Any]], None]


class MemoryLog:
    """Event log that keeps the last notes in memory."""

    def __init__(self, length: int = 10_000) -> None:
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=length)

    def note(self, kind: str, **fields: Any) -> None:
        self.notes.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.notes]


class EventLog:
    """JSONL file and listeners that also see every note. Safe to call from any thread.

    Owns the file: ``close`` it. Survives a full or vanished disk: listeners still get each note.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = wall) -> None:
        self._path = path
        self._wall = wall
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._file: IO[str] | None = None

    def listen(self, listener: Listener) -> None:
        """Call ``listener(kind, fields)`` for every later note, in the thread that writes it."""
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
        except OSError:
            with contextlib.suppress(OSError):  # Python 3.14 complains on standard error about unwritten text
                if self._file is not None:
                    self._file.close()
            self._file = None


class StrictStream:
    """Text stream that raises OutputError instead of OSError, at which click and rich end the process silently."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._guarded():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"The output cannot be written: {files.cause(error)}."
            if error.errno == errno.EPIPE:
                raise ClosedPipeError(problem, "Redirect it to a program that reads all of it.") from None
            raise OutputError(problem, files.remedy(error, "redirect the output to another place")) from None


class LossyStream(StrictStream):
    """Text stream that drops what it cannot write."""

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with contextlib.suppress(OSError, OutputError):
            yield


def replace_what_lacks() -> None:
    """Write "?" for characters that the encoding of standard output or error lacks, for the rest of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def strict_output() -> Iterator[None]:
    """Write all output of a command by the end of this context. Raises OutputError if that is impossible."""
    before = sys.stdout
    if before is None:  # closed from the start
        yield
        return
    sys.stdout = cast(TextIO, StrictStream(before))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before
        _flush_or_discard(before)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """Make standard output and error lossy for the life of a long-running process.

    Either may close during that time, or may be closed from the start.
    """
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (cast(TextIO, LossyStream(stream or nowhere)) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in filter(None, before):
                _flush_or_discard(stream)


def _flush_or_discard(stream: TextIO) -> None:
    """Prevent a failure of the interpreter's final flush (Python's documentation, signal, "Note on SIGPIPE")."""
    try:
        stream.flush()
    except (OSError, OutputError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
