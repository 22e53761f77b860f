"""The language model's trainer with a fault in it: ``failing_trainer.py FOLDER FAULT STEP LIVES``, as a node starts it.

Each of its first LIVES lives, which it counts in the folder, ends in this step by the fault.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from p2ptrain.trainer.host_vector import HostVector
from peer.training import language_trainer
from peer.training.language_trainer import LanguageTrainer

folder, fault, fatal, lives = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
step, moving = LanguageTrainer.step, HostVector.moving
steps = 0


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def say(text: bytes) -> None:
    (line,) = (each for each in gc_objects() if isinstance(each, language_trainer.Attachment))
    line._line._socket.sendall(text)


def gc_objects() -> list[Any]:
    import gc

    return gc.get_objects()


def failing(trainer: LanguageTrainer, *arguments: Any, **named: Any) -> dict[str, Any]:
    global steps
    steps += 1
    if steps == fatal:
        match fault:
            case "kill":
                die()
            case "freeze":
                die(signal.SIGSTOP)
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            case "host memory":
                raise MemoryError
            case "device":
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
            case "no tokens":
                return step(trainer, *arguments, **named) | {"tokens": None}
            case "no JSON":
                say(b"tokens: 3\n")
            case "endless":
                say(b"[" * (1 << 23))
    return step(trainer, *arguments, **named)


@contextmanager
def torn(host: HostVector, rank: int = 0) -> Any:
    with moving(host, rank):
        if steps == fatal and fault == "torn":
            host.vector(0)[: host.elements // 2] += 1.0
            die()
        yield


if __name__ == "__main__":
    folder.mkdir(exist_ok=True)
    life = len(list(folder.iterdir()))
    (folder / str(life)).touch()
    if fault == "start" and life < lives:
        sys.exit(3)
    if life < lives:
        LanguageTrainer.step = failing
        HostVector.moving = torn
    code = language_trainer.main()
    sys.stdout.flush()
    os._exit(code)
