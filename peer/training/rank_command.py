"""Command of a computer that trains for the peer of another one, ``p2ptrain rank``; its children import torch."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import click

from p2ptrain.base import cgroups, files
from p2ptrain.base.backoff import PAUSE_S, backoff
from p2ptrain.base.device_names import DEVICE_NAME, DEVICE_WORDS
from p2ptrain.base.errors import DeviceError, HomeError
from p2ptrain.base.launcher import kill_tree, launched
from p2ptrain.base.text import UserPath
from p2ptrain.ports import Notebook
from peer.options import WEIGHTS
from peer.training.lan_address import LanAddress
from peer.training.plan import OWNERS_FAULT, RemotePlan

POLL_S = 0.2

LASTING_S = 60.0
"""Seconds of training after which the next pause is the first one again."""


@click.command(short_help="Lend this computer to a peer on the same private network.")
@click.option("--leader", required=True, help="Where the peer listens, as it prints.", metavar="HOST[:PORT]")
@click.option(
    "--number",
    type=click.IntRange(1, 255),
    default=1,
    show_default=True,
    help="Of this computer, if several join the peer; each has its own.",
    metavar="N",
)
@click.option(
    "--home", type=click.Path(file_okay=False, path_type=UserPath), help="Home of this rank. [~/.p2ptrain/rank]"
)
@click.option("--device", default="auto", show_default=True, help=f"{DEVICE_WORDS}.")
@WEIGHTS
def rank(
    leader: str,
    number: int,
    home: Path | None,
    device: str,
    weights: Path | None,
) -> None:
    """Train as a part of the peer at --leader, which runs with --team and --at, until its run ends.

    The command waits for the leader and returns to it after an interruption. Nothing between the computers is
    encrypted: use a network that you trust, or a tunnel. Ctrl+C ends it.
    """
    from p2ptrain.base.telemetry import EventLog, lossy_output
    from peer.home import Home, check_no_other
    from peer.screen import Screen

    if DEVICE_NAME.fullmatch(device) is None:
        raise DeviceError(f"There is no device {device!r}.", f"Name one as follows: {DEVICE_WORDS}.")
    place = Home(home if home is not None else files.user_home() / ".p2ptrain" / "rank")
    check_no_other(place.path)
    if place.identity.exists():
        raise HomeError(f"{place.path} is the home of a peer.", "Name another folder with --home.")
    address = LanAddress.parse(leader)

    own = RemotePlan(
        home=str(place.path.absolute()),
        device=device,
        threads=_threads(),
        weights=None if weights is None else str(weights.absolute()),
    )
    stop = threading.Event()
    with place.locked(), lossy_output(), closing(EventLog(place.events)) as log, Screen() as screen:
        log.listen(screen.show)
        before = {each: signal.signal(each, lambda *_: stop.set()) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            take_part(address, number, own, log, stop)
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def take_part(leader: LanAddress, number: int, own: RemotePlan, notebook: Notebook, stop: threading.Event) -> None:
    """Start a rank, and again where one or the leader dies, until the run ends or ``stop`` is set.

    Raises UserError where the owner of this computer must mend what the rank's output says.
    """
    pauses_s = backoff(*PAUSE_S)
    command = (sys.executable, "-P", "-m", "peer.training.launch", "1", str(leader), "1", str(number))
    while not stop.is_set():
        notebook.note("waiting for the leader", leader=str(leader))
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                launched(*command, P2PTRAIN_RANK=own.model_dump_json(), TORCH_CPP_LOG_LEVEL="ERROR"),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:  # too many processes, or too little memory
            raise DeviceError(
                f"This computer cannot start a rank: {error.strerror}.", "End other programs, then try again."
            ) from error
        while process.poll() is None and not stop.wait(POLL_S):
            pass
        kill_tree(process)
        code = process.wait()
        if stop.is_set():
            return
        if code == 0:
            notebook.note("team ended")
            return
        if code == OWNERS_FAULT:
            raise DeviceError("This computer cannot train with the leader.", "Its output above says why.")
        if time.monotonic() - began >= LASTING_S:
            pauses_s = backoff(*PAUSE_S)
        stop.wait(next(pauses_s))


def _threads() -> int:
    """Return torch's threads of this computer's rank: OMP_NUM_THREADS, or one for each processor that it may use."""
    with contextlib.suppress(KeyError, ValueError):
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return math.ceil(cgroups.usable_cpus())
