"""A rank process of a team: ``python -m peer.team.rank HOME RANK``, started by its leader, never by people.

It reads its plan from standard input, which stays open as long as the leader lives: at its end the process ends at
once, whatever it does. It writes reports to standard output.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import TeamError, TeamMemoryError, UserError
from p2ptrain.base.imports import large_imports

with large_imports():
    import torch

    from p2ptrain.base.ids import PeerId
    from p2ptrain.base.telemetry import MemoryLog
    from p2ptrain.data.corpus import open_corpus
    from p2ptrain.data.stream import cache_directory
    from p2ptrain.net.p2pd.socket_folder import sweep
    from p2ptrain.team.connection import RankConnection
    from p2ptrain.team.shard_server import ShardServer
    from p2ptrain.team.trainer import follow
    from p2ptrain.train import accelerator
    from p2ptrain.train.compiling import BackgroundCompiler
    from p2ptrain.train.replicas import ReplicatedTask
    from p2ptrain.train.team_group import HEARTBEAT_S, TeamGroup
    from peer.home import Home
    from peer.team.agreement import agree
    from peer.team.building import build_rank, build_task
    from peer.team.compiling import stage_compiler
    from peer.team.meeting import BoxMeeting, LanMeeting
    from peer.team.plan import (
        LONGEST_LINE,
        LONGEST_REASON,
        RankPlan,
        RankReport,
        decode_plan,
        most_message_bytes,
    )


SWEEPING_S = 2.0
"""Longest time in which a rank whose leader has ended removes what that left."""


def report(kind: str, reason: str = "", remedy: str = "") -> None:
    """Write a report to the leader; if it has died, nobody reads it."""
    said = RankReport.model_validate(
        {"kind": kind, "reason": reason[:LONGEST_REASON], "remedy": remedy[:LONGEST_REASON]}
    )
    try:
        os.write(1, said.model_dump_json().encode() + b"\n")  # one call: threads report, too
    except BrokenPipeError:
        time.sleep(2 * SWEEPING_S)  # the thread of ``watch_leader`` removes the leader's folders, and ends this process
        os._exit(1)


def watch_leader(pipe: FileIO, folder: Path) -> None:
    """End this process as soon as the leader's end of the pipe is closed, by the leader or by its death.

    If the leader was killed, it left folders of sockets, one of which is ``folder``: they are removed.
    """

    def watch() -> None:
        while pipe.read(4096):
            pass
        until = time.monotonic() + SWEEPING_S
        while folder.exists() and time.monotonic() < until:  # the leader's lock may last a moment longer than its pipe
            sweep(folder.parent)
            time.sleep(0.02)
        os._exit(1)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager stops all processes; the leader still saves
    threading.Thread(target=watch, name="leader-watch", daemon=True).start()


class CompilerReports:
    """Notebook of a rank's compiler, which tells the leader what it may show its owner."""

    def __init__(self) -> None:
        self.compiler: BackgroundCompiler | None = None
        self._said = ""

    def note(self, kind: str, **fields: Any) -> None:
        if kind == "not compiled":
            report("eager", fields["why"])

    def show(self) -> None:
        """Report the compiler's state if it has changed."""
        if self.compiler is not None and (state := self.compiler.state) != self._said:
            self._said = state
            report("compiler", state)


def show_life(compiler: CompilerReports) -> None:
    """Report regularly that this process is not frozen, and what its compiler does."""

    def show() -> None:
        while True:
            report("alive")
            compiler.show()
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=show, name="life", daemon=True).start()


def live(plan: RankPlan, reports: CompilerReports) -> None:
    """Join the team, and follow its leader until it says stop. Raises UserError and TeamError."""
    torch.set_num_threads(plan.threads)
    device = accelerator.choose_device(plan.device)
    home = Home(Path(plan.home))
    signed = home.load_manifest(None)
    assert signed is not None, "the leader saved it"
    manifest = signed.manifest
    meeting = LanMeeting.of(plan) if plan.leader else BoxMeeting(plan)
    group = TeamGroup(meeting.rendezvous(), plan.timeout_s)
    with ExitStack() as stack, closing(group):  # the other ranks notice an end before the compiler's
        paths = (plan.data, plan.tokenizer, plan.template)
        data, tokenizer, template = (None if each is None else Path(each) for each in paths)
        corpus = group.together(
            "opening the text",
            lambda: open_corpus(manifest, cache_directory(), data, tokenizer, template_file=template),
        )
        agreement = agree(group, manifest, device, plan.activation_bytes, plan.most_sequences, plan.starts, plan.stages)
        task = build_task(group, manifest, device, corpus, PeerId(plan.peer), agreement)
        reports.compiler = stage_compiler(task, manifest, plan.compile, plan.memory_bytes, reports)
        stack.enter_context(reports.compiler)
        if isinstance(task, ReplicatedTask) and plan.rank >= plan.stages:
            task.follow_replica()
        rank = build_rank(task, manifest, agreement, home, MemoryLog(100), plan.leader_ranks)
        server = ShardServer(rank.shard, RankConnection(meeting.dial(), most_message_bytes(manifest)))
        server.start()
        if rank.found.checkpoint is not None:
            rank.load(rank.found.checkpoint)
        follow(rank.learner, rank.group, rank.shard, rank.evaluate, rank.save, rank.save_trained)


def main() -> int:
    pipe = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 -- open as long as the process
    report("ready")
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) > LONGEST_LINE or not (byte := pipe.read(1)):
            return 1
        line += byte
    try:
        plan = decode_plan(bytes(line))
        watch_leader(pipe, Path(plan.folder))
        reports = CompilerReports()
        show_life(reports)
        live(plan, reports)
    except TeamMemoryError as error:
        report("memory", str(error))
    except TeamError as error:
        report("team", str(error))
    except UserError as error:
        report("user", error.problem, error.remedy)
    except (RuntimeError, MemoryError) as error:
        is_device = isinstance(error, torch.AcceleratorError)
        kind = "memory" if accelerator.is_out_of_memory(error) else "device" if is_device else "error"
        report(kind, str(error).partition("\n")[0])
        if kind == "error":
            raise
    else:
        return 0
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of gloo and of the shard server may wait for a peer that is gone
