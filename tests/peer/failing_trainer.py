"""The language model's trainer with a fault in it: ``failing_trainer.py FOLDER STEP FAULT…``, as a node starts it.

Each of its first lives, which it counts in the folder, ends in this step by one of the faults, in order.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from p2ptrain.base.errors import UserError
from p2ptrain.trainer.host_vector import HostVector
from peer.training import language_trainer
from peer.training.language_trainer import LanguageTrainer

folder, fatal, faults = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
life = len(list(folder.iterdir()))
fault = faults[life] if life < len(faults) else "none"
step, moving, steps = LanguageTrainer.step, HostVector.moving, 0


def failing(trainer: LanguageTrainer, *arguments: Any, **named: Any) -> dict[str, Any]:
    global steps
    steps += 1
    if steps == fatal:
        match fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            case "host memory":
                raise MemoryError
            case "device":
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
            case "owner":
                raise UserError("No text.", "Give --data.")
            case "no tokens":
                return {**step(trainer, *arguments, **named), "tokens": None}
    return step(trainer, *arguments, **named)


@contextmanager
def torn(host: HostVector, rank: int = 0) -> Iterator[None]:
    with moving(host, rank):
        if steps == fatal and fault == "torn":
            host.vector(0)[: host.elements // 2] += 1.0
            os.kill(os.getpid(), signal.SIGKILL)
        yield


if __name__ == "__main__":
    (folder / str(life)).touch()
    LanguageTrainer.step, HostVector.moving = failing, torn
    code = language_trainer.main()
    sys.stdout.flush()
    os._exit(code)
