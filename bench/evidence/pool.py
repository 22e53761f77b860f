"""Worker processes, each with one thread of torch, that simulate one scenario after the other.

A worker (``python -m bench.evidence.worker``) reads scenarios as lines of JSON and answers each with one line. Whoever
opens a ``Pool`` closes it, best by ``with``; no worker outlives that, nor the death of the parent, which it notices at
the end of its input. An interrupt from the keyboard reaches the parent alone. A worker that dies is replaced, and its
job comes back as lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Read by a child when it imports torch."""

Simulate = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
"""Scenario and device -> report, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job."""

    key: int
    seconds: float
    report: Mapping[str, Any] | None
    failure: str | None = None
    """Why there is no report."""
    lost: bool = False
    """The worker died; nothing is known of the scenario."""


class Pool:
    """So many workers.

    Args:
        workers: at least 1.
        simulate: "module:function" of a ``Simulate``; imported by the workers, which look where this process looks.
        device: passed on to it.
        root: of the checkout that they run; this process's own by default.
    """

    def __init__(self, workers: int, simulate: str, device: str = "cpu", root: Path | None = None) -> None:
        self._count = workers
        self._arguments = (simulate, device, root)
        self._idle: list[_Worker] = []
        self._busy: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()
        self._idle, self._busy = [], {}
        self._selector.close()

    @property
    def has_room(self) -> bool:
        return len(self._busy) < self._count

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def start(self, key: int, scenario: Mapping[str, Any]) -> None:
        """Have a free worker simulate this. ``key`` comes back with the outcome."""
        worker = self._idle.pop() if self._idle else _Worker(*self._arguments)
        self._busy[key] = worker
        self._selector.register(worker.answers, selectors.EVENT_READ, key)
        worker.send(scenario)

    def next(self) -> Outcome:
        """Wait for the next outcome. Only while something is under way."""
        chosen, _ = self._selector.select()[0]
        self._selector.unregister(chosen.fileobj)
        key = cast(int, chosen.data)
        worker = self._busy.pop(key)
        line = worker.answers.readline()
        if not line.endswith(b"\n"):
            return Outcome(key, 0.0, None, f"the worker died with {worker.end()}", lost=True)
        self._idle.append(worker)
        answer = json.loads(line)
        return Outcome(key, answer["seconds"], answer["report"], answer["failure"])


class _Worker:
    """A process and our ends of the pipes to it."""

    def __init__(self, simulate: str, device: str, root: Path | None) -> None:
        paths = [*([str(root)] if root else []), *(each or "." for each in sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.evidence.worker", simulate, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=root,
            start_new_session=True,
        )

    @property
    def answers(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def send(self, scenario: Mapping[str, Any]) -> None:
        """One line. A worker that is dead already shows when its answer is read."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(scenario).encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> int:
        """Now, whatever it is doing; the process's exit status."""
        try:
            status = self._process.wait(0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a last line was never taken
            self._process.stdin.close()
        self.answers.close()
        return status
