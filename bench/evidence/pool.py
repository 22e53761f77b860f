"""Worker processes, each with one thread of torch, that simulate one scenario after the other.

Whoever opens a ``Pool`` closes it, best by ``with``; no worker outlives that, nor the death of the parent, of which
each worker's own watcher takes notice. An interrupt from the keyboard is the parent's to handle: workers ignore it. A
worker that dies is replaced, and its job comes back as lost.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

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
        simulate: "module:function" of a ``Simulate``; imported by the workers.
        device: passed on to it.
    """

    def __init__(self, workers: int, simulate: str, device: str = "cpu") -> None:
        self._count = workers
        self._arguments = (simulate, device)
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()
        self._idle, self._busy = [], {}

    @property
    def has_room(self) -> bool:
        return len(self._busy) < self._count

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def start(self, key: int, scenario: Mapping[str, Any]) -> None:
        """Have a free worker simulate this. ``key`` comes back with the outcome."""
        worker = self._idle.pop() if self._idle else _Worker(self._context, self._arguments)
        worker.pipe.send(scenario)
        self._busy[worker.pipe] = (worker, key)

    def next(self) -> Outcome:
        """Wait for the next outcome. Only while something is under way."""
        pipe = wait(list(self._busy))[0]
        assert isinstance(pipe, Connection)
        worker, key = self._busy.pop(pipe)
        try:
            seconds, report, failure = pipe.recv()
        except (EOFError, OSError):
            worker.end()
            return Outcome(key, 0.0, None, f"the worker died with {worker.process.exitcode}", lost=True)
        self._idle.append(worker)
        return Outcome(key, seconds, report, failure)


class _Worker:
    """A process and our end of the pipe to it."""

    def __init__(self, context: multiprocessing.context.SpawnContext, arguments: tuple[str, str]) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *arguments), daemon=True)
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)  # a child reads it when it imports torch
        try:
            self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        theirs.close()

    def end(self) -> None:
        """Now, whatever it is doing."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _work(pipe: Connection, simulate: str, device: str) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    module, _, name = simulate.partition(":")
    function: Simulate = getattr(importlib.import_module(module), name)
    while True:
        try:
            scenario = pipe.recv()
        except EOFError:
            return
        began = time.perf_counter()
        try:
            report, failure = function(scenario, device), None
        except Exception as error:
            report, failure = None, f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send((time.perf_counter() - began, report, failure))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
