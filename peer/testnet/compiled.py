"""Compilation of a testnet's training step, once, while its processes train eagerly; they share the library.

The lock of the library is held before the first trainer starts. A trainer that finds it held waits for the library,
however little is left to train (``p2ptrain.train.compiling``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock, Timeout

from p2ptrain.base import files
from p2ptrain.base.imports import command_imports
from p2ptrain.base.launcher import launched
from p2ptrain.base.text import one_line
from p2ptrain.data.stream import cache_directory
from p2ptrain.manifest import Manifest, parameter_count
from peer.owner.settings import compile_mode
from peer.testnet.processes import environment

WORTH_S = 300.0
"""Least length of a testnet that is limited in time for which the step is compiled. The demo's takes 40 s of an idle
core and saves a quarter of the time."""
DEADLINE_S = 600.0
"""Seconds after which the compiler is ended. Guess: times on slow computers."""


@contextlib.asynccontextmanager
async def compiling_step(
    manifest: Manifest, threads: int, log: Path, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Compile while the block runs; its end ends the compiler. Arguments as ``compile_step``."""
    decided = asyncio.Event()
    task = asyncio.create_task(compile_step(manifest, threads, log, say, decided))
    try:
        await decided.wait()
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def compile_step(
    manifest: Manifest, threads: int, log: Path, say: Callable[[str], None], decided: asyncio.Event
) -> None:
    """Write the library of the testnet's pass, unless it exists or there is no compiler.

    A failure costs speed only. Models that peers may train in bf16 are left to them: their trials decide.

    Args:
        threads: of torch, of each process.
        log: what the compiler says.
        decided: set when the lock is held, or nothing is compiled.
    """
    try:
        await _compile_step(manifest, threads, log, say, decided)
    finally:
        decided.set()


async def _compile_step(
    manifest: Manifest, threads: int, log: Path, say: Callable[[str], None], decided: asyncio.Event
) -> None:
    if compile_mode("auto", os.environ) == "off":
        return None
    with command_imports():
        import torch

        from p2ptrain.train import libraries
        from p2ptrain.train.accelerator import CPU
        from p2ptrain.train.autofit import BF16_PARAMETERS, cpu_placement
        from p2ptrain.train.compiled_pass import CompiledPassError, PassShape
        from p2ptrain.train.compiling import compiler_program, reason, remembered
        from peer.capacity import compiler_fault

    if torch.accelerator.is_available() or parameter_count(manifest.model) >= BF16_PARAMETERS:
        return None
    if compiler_program(os.environ) is None:
        say("there is no C++ compiler, which would make training faster; p2ptrain doctor says how to install one")
        return None
    training = manifest.training
    sizes = cpu_placement(manifest.model, training).micro_batch, training.sequence_length, training.tokens_per_step
    shape = replace(PassShape.of(manifest.model, *sizes), threads=threads)
    try:
        folder = libraries.private_folder(cache_directory() / libraries.FOLDER, f"torch-{torch.__version__}")
        library = folder / f"{shape.key()}.so"
        if libraries.is_whole(library):
            return None
        if why := libraries.failure(library):
            return say(f"training without compiled code: {remembered(why, library)}")
        if why := compiler_fault(manifest, CPU, shape.micro_batch, math.inf):
            return say(f"training without compiled code: {why}")
        with FileLock(library.with_suffix(".lock")).acquire(timeout=0):
            say("compiling the training step, once for this model and machine; peers train meanwhile")
            decided.set()
            status = await _compile(library, json.dumps(asdict(shape)), threads, log)
        if 0 < status != libraries.TRY_LATER:
            libraries.remember_failure(library, one_line(reason(status, log.read_bytes())))
    except (OSError, CompiledPassError) as error:
        say(f"training without compiled code: {files.cause(error) if isinstance(error, OSError) else error}")
    except Timeout:
        pass  # another peer of this user compiles it, and these will use it
    else:
        if not libraries.is_whole(library):
            say(f"training without compiled code; {log} says why")


async def _compile(library: Path, request: str, threads: int, log: Path) -> int:
    """Run the compiler to its end, or to the deadline; return its status."""
    # Without niceness: beside trainers on all cores it would end after the testnet.
    command = launched(sys.executable, "-P", "-m", "p2ptrain.train.pass_compiler", "--niceness", "0", str(library))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, env=environment(os.environ, threads)
        )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate(request.encode())
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session, with the C++ compiler in it
            process.kill()
            await process.wait()
        for workspace in library.parent.glob(f"{library.stem}-*"):
            shutil.rmtree(workspace, ignore_errors=True)
    return await process.wait()
