"""The plain trainer with an end: ``mortal_trainer.py HOW STEP FOLDER LIVES``; later lives than so many do not end.

It counts its lives in the folder.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from p2ptrain.trainer.attached import Attachment

how, last, folder, lives = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
life = len(list(folder.iterdir()))
(folder / str(life)).touch()
question, made = Attachment.question, 0
adamw, fatal = torch.optim.AdamW.step, list[bool]()


def heard(attachment: Attachment, *on_idle: Any) -> dict[str, Any]:
    global made
    found = question(attachment, *on_idle)
    made += found["ask"] == "step"
    if made == last and found["ask"] == "step":
        match how:
            case "kill before":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill within":
                fatal.append(True)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "fail":
                attachment.fail("device", RuntimeError("CUDA error: an illegal memory access\nwas encountered"))
                sys.exit(1)
    return found


def move(optimizer: torch.optim.Optimizer, closure: None = None) -> None:
    if fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    adamw(optimizer, closure)


if life < lives:
    Attachment.question = heard
    torch.optim.AdamW.step = move
runpy.run_path(str(Path(__file__).parent / "plain_trainer.py"), run_name="__main__")
