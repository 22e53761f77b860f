"""Team of rank processes, as its leader runs it: generations that follow each other when a rank dies or freezes.

A generation's ranks and the leader connect, build their stages and load the newest checkpoint that is whole for all of
them. When a collective fails, all its rank processes are ended, and the next generation begins; what the network has of
the learner (``TeamPayloads``, ``TeamInbox``, ``LeadingTrainer``) stays and leads the new ranks.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from p2ptrain.base.errors import DeviceError, NetworkError, TeamError, TeamMemoryError
from p2ptrain.base.ids import PeerId
from p2ptrain.checkpoint import Found
from p2ptrain.data.corpus import Corpus
from p2ptrain.manifest import SignedManifest
from p2ptrain.net.p2pd.socket_folder import SocketFolder
from p2ptrain.ports import Clock, Notebook
from p2ptrain.recipes import Stream
from p2ptrain.team.checkpoints import TeamCheckpoints, saved_starts
from p2ptrain.team.connection import RankConnection
from p2ptrain.team.inbox import TeamInbox
from p2ptrain.team.payloads import TeamPayloads
from p2ptrain.team.remote_shard import RemoteShard
from p2ptrain.team.shard import Shard
from p2ptrain.team.trainer import LeadingTrainer
from p2ptrain.team.whole_model import gather
from p2ptrain.train import accelerator
from p2ptrain.train.autofit import CPU_ACTIVATION_BYTES
from p2ptrain.train.replicas import Mesh
from p2ptrain.train.rules import codecs_of, learner_rules, matrices_of
from p2ptrain.train.team_group import TeamGroup
from peer.home import Home
from peer.team.agreement import agree
from peer.team.building import TeamRank, build_rank, build_task
from peer.team.compiling import TeamCompilers
from peer.team.lan_leader import LanListener
from peer.team.meeting import BoxHost, MeetingHost, MeetingPoint
from peer.team.plan import RankPlan, most_message_bytes
from peer.team.processes import READY_S, RankHandle, RankProcess, failed_rank
from peer.team.remote_rank import RemoteRank
from peer.team.task import LeadingTask

TIMEOUT_S = 60.0
"""Longest wait for another rank in a collective, after which it counts as frozen. Guess: measure passes on
slow devices."""
MAX_FAILURES, FAILURES_WITHIN_S = 3, 3600.0
"""Failures of ranks within so many seconds after which the peer gives up."""
STOP_POLL_S = 0.2
"""Seconds between two looks, while ranks start, at whether the owner has stopped the peer."""


class TeamFiles(NamedTuple):
    data: Path | None
    tokenizer: Path | None
    weights: Path | None = None
    template: Path | None = None


class Team:
    """A leader's team. Its methods belong to the trainer thread; ``close`` it.

    Args:
        mesh: arrangement of the ranks.
        devices: of this computer's ranks; the first is this process's.
        files: the run's files that the owner named.
        threads: of each rank.
        is_stopping: whether the owner has stopped the peer, so that no further generation begins.
        lan: listener for the ranks on other computers, which follow this computer's; owned.
    """

    def __init__(
        self,
        mesh: Mesh,
        devices: Sequence[torch.device],
        home: Home,
        peer: PeerId,
        signed: SignedManifest,
        files: TeamFiles,
        threads: int,
        notebook: Notebook,
        compilers: TeamCompilers,
        is_stopping: Callable[[], bool] = lambda: False,
        timeout_s: float = TIMEOUT_S,
        clock: Clock = time.monotonic,
        lan: LanListener | None = None,
    ) -> None:
        self.mesh = mesh
        self.devices = tuple(devices)
        self._lan = lan
        self._leader_ranks = 0 if lan is None else len(devices)
        self._size = len(devices) + (0 if lan is None else len(lan.ranks))
        self.is_stopping = is_stopping
        self._home = home
        self._peer = peer
        self._signed = signed
        self._files = files
        self._threads = threads
        self._activation_bytes = CPU_ACTIVATION_BYTES // len(devices)
        self._notebook = notebook
        self.compilers = compilers
        self._timeout_s = timeout_s
        self._clock = clock
        self._most_sequences = signed.manifest.training.sequences_per_step
        self._starts: list[int] = [] if lan is None else saved_starts(home.checkpoints, self._size)
        self._generation = 0
        self._importing_s = 0.0
        """Seconds in which the current ranks imported their libraries."""
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._group: TeamGroup | None = None
        self._rank: TeamRank | None = None
        self._remotes: list[RemoteShard] = []
        self._corpus: Corpus | None = None
        torch.set_num_threads(threads)
        self._folder = SocketFolder.create()
        self._host: MeetingHost = BoxHost(self._folder.path) if lan is None else lan
        self._processes: Sequence[RankHandle] = self._spawned()

    # --- the session's view ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> TeamRank:
        """The leader's own rank in the current generation."""
        assert self._rank is not None, "between generations"
        return self._rank

    @property
    def is_running(self) -> bool:
        """Whether a generation is connected."""
        return self._rank is not None

    def pids(self) -> list[int]:
        """Return the process ids of this computer's other ranks."""
        return [each.pid for each in self._processes if each.pid is not None]

    def start(self, corpus: Corpus) -> Found:
        """Begin the first generation; return what it found of checkpoints. Raises UserError."""
        self._corpus = corpus
        try:
            self._begin()
        except TeamError as error:
            if not self.recover(error):
                raise DeviceError("The peer was stopped while its devices started.", "Start it again.") from error
        return self.rank.found

    def lead(self) -> None:
        """Make the session's objects, which outlive generations; call it once, after ``start``."""
        rank, manifest = self.rank, self._signed.manifest
        recipe = learner_rules(manifest.outer, manifest.run.tokens).recipe
        codec, gradient_codec = codecs_of(manifest.codec)
        shown: Stream = "fast" if recipe.mix("fast") is not None else "slow"
        whole = rank.task.stage_model.whole
        self._payloads = TeamPayloads(
            codec,
            gradient_codec if recipe.mix("pseudo_gradient") is not None else None,
            matrices_of(whole, rank.sharding.fragments),
            shown,
            rank.sharding,
            self._shards(),
            self._turn,
            recipe.mixes_at_any_time(shown),
        )
        inbox = TeamInbox(recipe.follow, self._payloads)
        self.trainer = LeadingTrainer(rank.learner, rank.group, rank.shard, self._payloads, inbox)
        self.task = LeadingTask(
            self._names(), self.mesh, self.trainer, lambda: None if self._rank is None else self._rank.task
        )
        self.checkpoints = TeamCheckpoints(rank.checkpoints, self.trainer.save)
        self.trained = TeamCheckpoints(rank.trained, self.trainer.save_trained)

    @property
    def gather(self) -> Callable[[Mapping[str, Any]], object] | None:
        """Function that writes the whole model with a checkpoint's state to ``HOME/whole``; None: the checkpoints have
        it.
        """
        if self._lan is None:
            return None
        lengths = [piece.stop - piece.start for piece in self.rank.sharding.fragments]
        return lambda state: gather(self._home.whole, self._payloads, lengths, state, self.trainer.gather)

    @property
    def has_lost_computer(self) -> bool:
        """Whether the line to a computer of this generation has ended."""
        return any(isinstance(each, RemoteRank) and each.is_lost for each in self._processes)

    def watch_line(self, leave: Callable[[], None]) -> None:
        """Let a computer that leaves end the exchanges at once, and ``leave`` be called, from any thread.

        Where its line is cut, a collective notices much later, and partners would wait for this peer meanwhile.
        """
        if self._lan is None:
            return

        def left() -> None:
            for remote in self._remotes:
                remote.close()
            leave()

        self._lan.on_left = left

    def recover(self, error: TeamError) -> bool:
        """End the failed generation and begin another; return False if the owner stops the peer meanwhile.

        The new ranks have loaded the newest checkpoint that all can load. Raises DeviceError after ``MAX_FAILURES``.
        """
        while True:
            self._judge(error)
            self._end_generation()
            self._release()
            if self.is_stopping():
                return False
            self._generation += 1
            self._processes = self._spawned()
            try:
                self._begin()
                if (found := self.rank.found.checkpoint) is not None:
                    self.rank.load(found)
            except TeamError as again:
                if self.is_stopping():
                    self._end_generation()
                    return False
                error = bare(again)
                continue
            return True

    def renew(self) -> None:
        """Let the session's objects lead the new generation, once no exchange of the old one is under way."""
        rank = self.rank
        self._payloads.reconnect(self._shards())
        self.checkpoints.restart(rank.checkpoints)
        self.trained.restart(rank.trained)
        self.trainer.restart(rank.learner, rank.group, rank.shard)
        self.trainer.inbox.wake()  # ``abandon`` may have removed what wakes the trainer
        self._notebook.note(
            "ranks replaced",
            generation=self._generation,
            step=rank.learner.step,
            importing_s=round(self._importing_s, 3),
        )

    def close(self) -> None:
        """End all rank processes at once. Safe to call twice."""
        self._end_generation()
        if hasattr(self, "_payloads"):
            self._payloads.close()
        if self._lan is not None:
            self._lan.close(is_final=hasattr(self, "trainer") and self.trainer.ended)
        self._folder.remove()

    # --- one generation -------------------------------------------------------------------------------------------

    def _spawned(self) -> list[RankHandle]:
        own: list[RankHandle] = [
            RankProcess(self._home.path.absolute(), rank, str(device), partial(self.compilers.note_eager, rank))
            for rank, device in enumerate(self.devices)
            if rank
        ]
        return own if self._lan is None else [*own, *(RemoteRank(self._lan, rank) for rank in self._lan.ranks)]

    def _names(self) -> list[str]:
        """Return the names of all ranks' devices."""
        return [*map(str, self.devices), *(() if self._lan is None else self._lan.names())]

    @contextmanager
    def _ending_at_stop(self) -> Iterator[None]:
        """End the rank processes that start in the body when the owner stops the peer: then nothing waits for them."""
        has_begun, processes = threading.Event(), tuple(self._processes)

        def watch() -> None:
            while not has_begun.wait(STOP_POLL_S):
                if self.is_stopping():
                    for each in processes:
                        each.begin_kill()
                    return

        thread = threading.Thread(target=watch, name="stop-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_begun.set()
            thread.join()

    def _begin(self) -> None:
        """Connect the rank processes and build this process's rank. Raises UserError and TeamError."""
        with self._ending_at_stop():
            self._connect_and_build()

    def _connect_and_build(self) -> None:
        assert self._corpus is not None
        manifest = self._signed.manifest
        began = self._clock()
        for process in self._processes:
            process.wait_ready(READY_S)
        self._importing_s = self._clock() - began
        host = self._host
        try:
            point = host.open_meeting(self._timeout_s)
            for process in self._processes:
                process.tell(self._plan(process.rank, point))
            place = host.rendezvous(self._size, self._generation)
            self._group = group = TeamGroup(place, self._timeout_s, self.is_stopping)
            group.together("opening the text", lambda: None)
            agreement = agree(
                group,
                manifest,
                self.devices[0],
                self._activation_bytes,
                self._most_sequences,
                self._starts,
                self.mesh.stages,
            )
            self._starts = [each.blocks.start for each in agreement.stages]
            task = build_task(group, manifest, self.devices[0], self._corpus, self._peer, agreement)
            here, weights = self._leader_ranks, self._files.weights
            rank = build_rank(task, manifest, agreement, self._home, self._notebook, here, weights)
            lines = host.shard_lines(self.mesh.stages, self._timeout_s, self.is_stopping)
        finally:
            host.close_meeting()
        most = most_message_bytes(manifest)
        self._remotes = [RemoteShard(number, RankConnection(each, most)) for number, each in enumerate(lines, 1)]
        self._rank = rank
        self.compilers.begin(task, manifest, self._processes)

    def _plan(self, rank: int, point: MeetingPoint) -> RankPlan:
        data, tokenizer, weights, template = (None if each is None else str(each.absolute()) for each in self._files)
        return RankPlan(
            home=str(self._home.path.absolute()),
            peer=self._peer,
            rank=rank,
            devices=self._names(),
            stages=self.mesh.stages,
            generation=self._generation,
            folder=point.folder,
            key=point.key.hex(),
            leader=point.leader,
            host=point.host,
            meeting=point.name,
            leader_ranks=self._leader_ranks,
            data=data,
            tokenizer=tokenizer,
            weights=weights,
            template=template,
            threads=self._threads,
            compile=self.compilers.mode,
            memory_bytes=self.compilers.memory_bytes,
            timeout_s=self._timeout_s,
            activation_bytes=self._activation_bytes,
            most_sequences=self._most_sequences,
            starts=self._starts,
        )

    def _turn(self) -> int:
        if (rank := self._rank) is None:
            raise NetworkError("the ranks of this peer are being replaced")
        return rank.shard.turn

    def _shards(self) -> list[Shard]:
        return [self.rank.shard, *self._remotes]

    def _end_generation(self) -> None:
        if self._group is not None:
            self._group.close()
        self.compilers.end()
        for remote in self._remotes:
            remote.close()
        for process in self._processes:
            process.kill()
        self._group, self._rank, self._remotes, self._processes = None, None, [], []

    def _release(self) -> None:
        """Free the memory of this process's rank in the generation that has ended, before another one is built."""
        if hasattr(self, "trainer"):
            self.trainer.interrupt()
        gc.collect()  # modules, pipeline and gradients refer to each other
        accelerator.empty_cache(self.devices[0])

    # --- failures -------------------------------------------------------------------------------------------------

    def _judge(self, error: TeamError) -> None:
        """Note which rank failed and why. Raises DeviceError if it is the owner's problem, or failed too often."""
        if self._group is not None:
            self._group.close()  # so that the other ranks notice at once
        rank, why, said = (
            (None, str(error), None) if isinstance(error, TeamMemoryError) else failed_rank(self._processes)
        )
        if said is not None and said.kind == "user":
            self._end_generation()
            where = f"On {rank.name}: " if isinstance(rank, RemoteRank) else ""
            raise DeviceError(where + said.reason, said.remedy)
        device = self._name(0 if isinstance(error, TeamMemoryError) else None if rank is None else rank.rank)
        why = why or str(error)
        self._notebook.note("rank failed", device=device, why=why, collective=error.collective)
        if isinstance(rank, RemoteRank) and rank.is_lost:  # it will dial again
            return
        if (isinstance(error, TeamMemoryError) or (said is not None and said.kind == "memory")) and self._lowered():
            return
        self._failures.append(now := self._clock())
        if len(self._failures) == MAX_FAILURES and now - self._failures[0] < FAILURES_WITHIN_S:
            self._end_generation()
            raise DeviceError(
                f"{device} failed {MAX_FAILURES} times within an hour, the last time because {why.rstrip('.')}.",
                "Check it with p2ptrain doctor, or start the peer without it; the last checkpoint is in the home.",
            )

    def _name(self, rank: int | None) -> str:
        if rank is None:
            return f"One of the devices {', '.join(map(str, self.devices))}"
        if rank >= len(self.devices):
            return f"Rank {rank} on another computer"
        return f"The device {self.devices[rank]} of rank {rank}"

    def _lowered(self) -> bool:
        """Let the next generation compute fewer sequences at once; return whether that is possible."""
        now = self._rank.task.micro_batch if self._rank is not None else self._most_sequences
        self._most_sequences = max(1, now // 2)
        return now > 1


def bare(error: TeamError) -> TeamError:
    """Return the error without the frames and causes that keep the failed rank's weights alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
