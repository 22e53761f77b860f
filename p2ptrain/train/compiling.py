"""Compilation of the inner pass ahead of its use, while training goes on eagerly.

A thread waits until training is under way, then starts a child at low priority, ``p2ptrain.train.pass_compiler``,
which compiles the pass (``compiled_pass``), compares its gradients and speed with the eager ones, and leaves torch's
caches in a folder of their own. Then the task compiles the same pass from these caches, within seconds. Whatever fails
is one note, and training stays eager.

::

    DIRECTORY/torch-2.13.0/<key>/             torch's caches for one ``PassShape``; all peers of this user share them
    DIRECTORY/torch-2.13.0/<key>/in_graphs    the child found the pass faster as a CUDA graph
    DIRECTORY/torch-2.13.0/<key>.whole        the child has ended well
    DIRECTORY/torch-2.13.0/<key>.lock         held by the one process whose child compiles it
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from filelock import FileLock, Timeout

from p2ptrain.base import files
from p2ptrain.base.launcher import kill_tree, launched
from p2ptrain.base.text import one_line
from p2ptrain.train import accelerator
from p2ptrain.train.compiled_pass import IN_GRAPHS, CompiledPassError, use

if TYPE_CHECKING:
    from p2ptrain.manifest import Decoder
    from p2ptrain.ports import Clock, Notebook
    from p2ptrain.train.inner import LanguageModelTask

CompileMode = Literal["auto", "on", "off"]
FOLDER = "compiled"
"""Name of the caches' directory in the user's cache."""
KEPT_S = 30 * 86_400.0
"""Age since the last use at which something compiled is deleted. Guess: how long runs rest."""
WORTH_S, WARM_WORTH_S = 600.0, 60.0
"""Least seconds of training left for which ``auto`` compiles, and for which it uses what is compiled: on an idle core
demo and llama-15m take 40 s, and 4 to 6 s from the cache (our measurement)."""
DEADLINE_S = 3600.0
"""Seconds in which the child must end: twenty times the longest of these beside ten other processes."""
POLL_S = 0.5
"""Seconds between two looks at the child: how much longer it computes when the owner pauses the peer."""
NICENESS: Mapping[CompileMode, int] = {"auto": 10, "on": 0}
"""Priority of the child below that of the trainer (nice(2)): a tenth of its share of a core that both want. With the
lowest priority it would take hours beside a trainer on all cores. Guess: what owners notice."""
MOST_CHARS = 200
"""Longest reason of a note."""
TAIL_BYTES = 4096


def compiler_program(environment: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler that torch would call; None if there is none."""
    return shutil.which(environment.get("CXX") or "g++")


def private_folder(directory: Path, name: str) -> Path:
    """Return a folder that only this user can write to, and delete what was not used for long.

    Raises OSError, or CompiledPassError if others can write to it: its code is run.
    """
    folder, oldest = directory / name, time.time() - KEPT_S
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (directory, folder):
        status = each.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise CompiledPassError(f"other users can write to {each}; delete it, or make it yours alone")
    os.utime(folder)
    with contextlib.suppress(OSError):  # another peer may delete the same at the same moment
        for each in (*directory.iterdir(), *folder.iterdir()):
            if each.stat().st_mtime < oldest and each.is_dir():
                forget(each)
    return folder


def forget(cache: Path) -> None:
    """Delete torch's caches of a pass. Raises OSError."""
    _whole(cache).unlink(missing_ok=True)  # first: without it nobody uses them
    if cache.exists():
        shutil.rmtree(cache)


def is_whole(cache: Path) -> bool:
    return _whole(cache).exists() and cache.is_dir()


def _whole(cache: Path) -> Path:
    return cache.with_name(f"{cache.name}.whole")


class BackgroundCompiler:
    """The compiler of one task; a context manager whose exit ends the child.

    Args:
        directory: caches of all peers of this user.
        is_training: whether the trainer trains now; the child ends while it does not. Safe from any thread.
        remaining_s: seconds of training that probably remain; None while unknown. Safe from any thread.
        obstacle: returns why the child must not start, or "".
        command: runs the child, with its cache and its priority as last arguments.
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
        command: tuple[str, ...] = (sys.executable, "-P", "-m", "p2ptrain.train.pass_compiler"),
        deadline_s: float = DEADLINE_S,
        poll_s: float = POLL_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self.state = "not compiled yet"
        """What the owner sees: not compiled yet, compiling, compiled code, or off and why."""
        self.is_final = False
        """Whether the state changes no more, unless a compiled pass fails later."""
        self._task = task
        self._mode: CompileMode = mode
        self._directory = directory
        self._notebook = notebook
        self._is_training = is_training
        self._remaining_s = remaining_s
        self._obstacle = obstacle
        self._command = command
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._clock = clock
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        if mode == "off":
            self._finish("off (compile is off)")
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

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            cache = private_folder(self._directory, f"torch-{torch.__version__}") / self._shape.key()
            if self._prepare(cache):
                for each in (_whole(cache), cache):
                    os.utime(each)
                use(cache)
                self._finish("compiled code")
                self._task.offer(self._shape, (cache / IN_GRAPHS).exists(), self._failed)
                self._notebook.note("compiled")
        except CompiledPassError as error:
            self._give_up(str(error))
        except OSError as error:
            self._give_up(files.cause(error))
        except Exception as error:  # an internal error must not end training
            self._give_up(one_line(f"{type(error).__name__}: {error}", MOST_CHARS))

    def _prepare(self, cache: Path) -> bool:
        """Fill the cache, or wait until another process has; return False if the peer ends first or soon.

        Raises OSError, or CompiledPassError if the pass cannot be compiled.
        """
        lock = FileLock(cache.with_suffix(".lock"))
        while self._is_worth_it(WARM_WORTH_S if is_whole(cache) else WORTH_S):
            if is_whole(cache):
                return True
            try:
                with lock.acquire(timeout=0):
                    if not is_whole(cache):
                        self._compile(cache)
            except Timeout:
                self.state = "compiling"
        return False

    def _is_worth_it(self, least_s: float) -> bool:
        """Wait until training is under way; return False if the peer ends first, or too little is left to train."""
        while not self._ends.wait(self._poll_s):
            if not self._is_training():
                continue
            left_s = math.inf if self._mode == "on" else self._remaining_s()
            if left_s is not None and left_s < least_s:
                self._finish("off (too little is left to train)")
                return False
            if left_s is not None:
                return True
        return False

    def _compile(self, cache: Path) -> None:
        """Run the child, unless it cannot succeed; end it when training rests. Raises OSError and CompiledPassError."""
        if compiler_program(os.environ) is None:
            raise CompiledPassError("there is no C++ compiler; install g++ (Debian) or gcc-c++ (Fedora)")
        device = self._task.theta.device
        if why := self._obstacle() or ("" if device.type == "cpu" else accelerator.triton_fault(device)):
            raise CompiledPassError(why)
        self.state = "compiling"
        self._notebook.note("compiling")
        forget(cache)  # of a child that was ended: a half-written library would end the process that loads it
        found = self._run_child(cache)
        if found is None:
            self.state = "not compiled yet"
        elif found[0]:
            raise CompiledPassError(one_line(reason(*found), MOST_CHARS))
        else:
            files.replace(_whole(cache), b"")

    def _run_child(self, cache: Path) -> tuple[int, bytes] | None:
        """Return the child's status and last output; None if this process ends first, or training rests.

        Raises CompiledPassError if it takes too long. The child ends with this process.
        """
        began = self._clock()
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                launched(*self._command, str(cache), str(NICENESS[self._mode]), OMP_NUM_THREADS="1"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                try:
                    asked = {**asdict(self._shape), IN_GRAPHS: self._task.has_room_for_graph()}
                    pipe.write(json.dumps(asked).encode() + b"\n")
                    pipe.flush()
                    while process.poll() is None:
                        if self._ends.wait(self._poll_s) or not self._is_training():
                            return None
                        if self._clock() - began > self._deadline_s:
                            raise CompiledPassError(f"the compiler did not end within {self._deadline_s:.0f} s")
                finally:
                    kill_tree(process)
            said.seek(max(0, said.seek(0, os.SEEK_END) - TAIL_BYTES))
            return process.returncode, said.read()

    # --- results ------------------------------------------------------------------------------------------------------

    def _failed(self, why: str) -> None:
        self._give_up(one_line(f"the compiled code failed: {why}", MOST_CHARS))

    def _give_up(self, why: str) -> None:
        self._notebook.note("not compiled", why=why)
        self._finish(f"off ({why})")

    def _finish(self, state: str) -> None:
        self.state, self.is_final = state, True


def reason(status: int, said: bytes) -> str:
    """Return why the child failed: its last line, or the signal that ended it."""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        return f"signal {name} ended the compiler; the memory may be too small"
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"the compiler ended with status {status}"
