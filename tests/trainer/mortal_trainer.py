"""The plain trainer with an end: ``mortal_trainer.py HOW STEP FOLDER LIVES``; later lives than so many do not end."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from p2ptrain.trainer.loop import TrainingLoop

how, last, folder, lives = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
life = len(list(folder.iterdir()))
(folder / str(life)).touch()
step = TrainingLoop.step
made = 0


def mortal(training: TrainingLoop, *arguments: Any) -> bool:
    global made
    made += 1
    if made == last:
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                training._attachment.fail(
                    "device", RuntimeError("CUDA error: an illegal memory access\nwas encountered")
                )
                sys.exit(1)
            case "nonsense":
                training._attachment._line._socket.sendall(b"loss: 3\n")
            case "number":
                training._attachment._line._socket.sendall(b"3\n")
            case "endless":
                training._attachment._line._socket.sendall(b"[" * (1 << 23))
            case "wrong":
                training._attachment.answer({"losses": "none"})
    return step(training, *arguments)


if life < lives:
    TrainingLoop.step = mortal
runpy.run_path(str(Path(__file__).parent / "plain_trainer.py"), run_name="__main__")
