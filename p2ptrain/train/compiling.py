"""Compilation of the inner pass in the background, while training goes on eagerly.

A thread waits until training is under way, starts ``pass_compiler`` as a child unless the library exists
(``libraries``) or another process compiles it, and offers the result to the task, which compares it with the eager
pass. If a card gets no library, the task compares a CUDA graph of the eager pass. Whatever fails is one note, and
training stays eager.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from filelock import FileLock, Timeout

from p2ptrain.base import files
from p2ptrain.base.launcher import launched
from p2ptrain.base.text import UserPath, one_line
from p2ptrain.train import accelerator, libraries
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.pass_choice import GAIN

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder
    from p2ptrain.ports import Clock, Notebook
    from p2ptrain.train.inner import LanguageModelTask

CompileMode = Literal["auto", "on", "off"]
WORTH_S = 600.0
"""Least seconds of training left for which ``auto`` compiles: demo and llama-15m take 32 s on an idle core and up to
172 s on two cores with ten other processes (our measurement)."""
DEADLINE_S = 3600.0
"""Seconds in which the compiler must end, without pauses: twenty times the longest of these."""
POLL_S = 0.5
"""Seconds between two looks at the child: how much longer it computes when the owner pauses the peer."""
MOST_CHARS = 200
"""Longest reason of a note, without the path that may follow it."""
TAIL_BYTES = 4096


def compiler_program(environment: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler that torch would call; None if there is none."""
    return shutil.which(environment.get("CXX") or "g++")


class BackgroundCompiler:
    """The compiler of one task; a context manager whose exit ends the child.

    Args:
        directory: libraries of all peers of this user.
        is_training: whether the trainer trains now; the child is suspended while it does not. Safe from any thread.
        remaining_s: seconds of training that probably remain; None while unknown. Safe from any thread.
        obstacle: returns why the child must not start, or "".
        is_over: whether it trains no more; the child then ends. Safe from any thread.
        command: runs the compiler, with the library's path as its last argument.
    """

    def __init__(
        self,
        task: LanguageModelTask,
        description: Decoder,
        mode: CompileMode,
        directory: Path,
        notebook: Notebook,
        is_training: Callable[[], bool] = lambda: True,
        remaining_s: Callable[[], float | None] = lambda: None,
        obstacle: Callable[[], str] = str,
        is_over: Callable[[], bool] = lambda: False,
        command: tuple[str, ...] = (sys.executable, "-P", "-m", "p2ptrain.train.pass_compiler"),
        deadline_s: float = DEADLINE_S,
        poll_s: float = POLL_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self.state = "not compiled yet"
        """What the owner sees: not compiled yet, compiling, comparing, what is used, or off and why."""
        self._task = task
        self._mode: CompileMode = mode
        self._directory = directory
        self._notebook = notebook
        self._is_training = is_training
        self._is_over = is_over
        self._remaining_s = remaining_s
        self._obstacle = obstacle
        self._command = command
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._clock = clock
        self._ends = threading.Event()
        self._is_final = False
        self._why_no_library = ""
        self._thread: threading.Thread | None = None
        if mode == "off":
            self._finish(f"off (compile is {mode})")
            return
        try:
            self._shape = task.pass_shape(description)
        except CompiledPassError as error:
            if mode == "on":
                self._give_up(str(error))
            else:
                self._finish(f"off ({error})")
            return
        self._thread = threading.Thread(target=self._run, name="compiler", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_final(self) -> bool:
        """Whether the state changes no more, unless a library fails later."""
        return self._is_final

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            library = self._library()
            if library is not None:
                self.state = "comparing"
                try:
                    self._task.offer(library, self._shape, self._decided, self._failed)
                except CompiledPassError:  # damaged, or of other libraries: the next start compiles again
                    library.unlink(missing_ok=True)
                    raise
        except CompiledPassError as error:
            self._compare_graph(str(error))
        except OSError as error:
            self._compare_graph(files.cause(error))
        except Exception as error:  # an internal error must not end training
            self._give_up(one_line(f"{type(error).__name__}: {error}", MOST_CHARS))

    def _compare_graph(self, why: str) -> None:
        """Compare a CUDA graph of the eager pass on a card; if that is impossible, report why there is no library."""
        self.state, self._why_no_library = "comparing", why
        try:
            self._task.offer_graph(self._decided, self._failed)
        except CompiledPassError:
            self._give_up(why)

    def _library(self) -> Path | None:
        """Return the library, compiled if there is none yet; None if the peer ends first.

        Raises OSError, or CompiledPassError if there cannot be one.
        """
        folder = libraries.private_folder(self._directory, f"torch-{torch.__version__}")
        library = folder / f"{self._shape.key()}.so"
        if libraries.is_whole(library):
            libraries.keep(library)
            return library
        is_worth_it = self._is_worth_it()
        lock = FileLock(folder / f"{self._shape.lock()}.lock")
        while not self._has_ended():
            with contextlib.suppress(Timeout), lock.acquire(timeout=0):
                if not libraries.is_whole(library):
                    if not is_worth_it:
                        self._finish("off (too little is left to train)")
                        return None
                    self._compile(library)
                return library if libraries.is_whole(library) else None
            self.state = "compiling"
            self._ends.wait(self._poll_s)
        return None

    def _is_worth_it(self) -> bool:
        """Wait until training is under way; return False if the peer ends first, or too little is left to train."""
        while not self._has_ended(self._poll_s):
            if not self._is_training():
                continue
            if self._mode == "on":
                return True
            if (left_s := self._remaining_s()) is not None:
                return left_s >= WORTH_S
        return False

    def _compile(self, library: Path) -> None:
        """Run the child, unless it failed before or cannot succeed. Raises CompiledPassError."""
        if why := libraries.failure(library):
            raise CompiledPassError(remembered(why, library))
        if compiler_program(os.environ) is None:
            raise CompiledPassError("there is no C++ compiler; p2ptrain doctor says how to install one")
        device = self._task.theta.device
        if why := self._obstacle() or ("" if device.type == "cpu" else accelerator.triton_fault(device)):
            raise CompiledPassError(why)
        self.state = "compiling"
        self._notebook.note("compiling")
        began = self._clock()
        status, said = self._run_child(library)
        if self._has_ended():
            return
        if status or not library.exists():
            why = one_line(reason(status, said), MOST_CHARS)
            if 0 < status != libraries.TRY_LATER:
                libraries.remember_failure(library, why)
                why = remembered(why, library)
            raise CompiledPassError(why)
        self._notebook.note("compiled pass", seconds=self._clock() - began)

    def _run_child(self, library: Path) -> tuple[int, bytes]:
        """Return the child's status and last output; suspend it while the trainer does not train.

        Raises CompiledPassError if it takes too long. A peer that ends kills it.
        """
        ran_s = 0.0
        process = subprocess.Popen(
            launched(*self._command, str(library), OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        said = bytearray()
        reader = threading.Thread(target=_read_tail, args=(process, said), name="compiler output", daemon=True)
        try:
            reader.start()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(asdict(self._shape)).encode())
            is_suspended, looked = False, self._clock()
            while process.poll() is None and not self._has_ended(self._poll_s):
                now, was_suspended = self._clock(), is_suspended
                ran_s += 0.0 if is_suspended else now - looked
                looked, is_suspended = now, not self._is_training()
                if is_suspended is not was_suspended:  # not the compiler that it runs: as an orphan it must end itself
                    process.send_signal(signal.SIGSTOP if is_suspended else signal.SIGCONT)
                if ran_s > self._deadline_s:
                    raise CompiledPassError(f"the compiler did not end within {self._deadline_s:.0f} s")
        finally:
            _end(process)
            reader.join()
            for leftover in library.parent.glob(f"{library.stem}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        return process.returncode, bytes(said)

    def _has_ended(self, wait_s: float = 0.0) -> bool:
        return self._ends.wait(wait_s) or self._is_over()

    # --- results ------------------------------------------------------------------------------------------------------

    def _decided(self, way: str, ratio: float | None) -> None:
        """Record the comparison's result; the trainer thread calls it."""
        if ratio is None:
            self._give_up(self._why_no_library or f"it is not {100 * (GAIN - 1):.0f} % faster here")
            return
        self._notebook.note("compiled", way=way, ratio=ratio)
        self._finish(f"{way} ({self._why_no_library})" if self._why_no_library else way)

    def _failed(self, why: str) -> None:
        what = "the CUDA graph" if self._why_no_library else "the compiled code"
        failure = one_line(f"{what} failed: {why}", MOST_CHARS)
        self._give_up("; ".join(filter(None, (self._why_no_library, failure))))

    def _give_up(self, why: str) -> None:
        self._notebook.note("not compiled", why=why)
        self._finish(f"off ({why})")

    def _finish(self, state: str) -> None:
        self.state = state
        self._is_final = True


def remembered(why: str, library: Path) -> str:
    """Return why a library was not made, and how to try again."""
    return f"{why}; to try again, delete {UserPath(libraries.failure_file(library))}"


def reason(status: int, said: bytes) -> str:
    """Return why the compiler failed: its last line, or the signal that ended it."""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        return f"signal {name} ended the compiler; the memory may be too small"
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ") if lines else f"the compiler ended with status {status}"


def _read_tail(process: subprocess.Popen[bytes], said: bytearray) -> None:
    """Keep the end of the child's standard error."""
    assert process.stderr is not None
    with process.stderr as pipe:
        while block := os.read(pipe.fileno(), TAIL_BYTES):
            said += block
            del said[:-TAIL_BYTES]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child, which leads a session of its own, and its children, unless it has ended."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not begun its session yet
            process.kill()
        process.wait()
