"""The language model's trainer: ``python -m peer.training.language_trainer``, started by a node, never by people."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import large_imports

with large_imports():
    import torch

    from p2ptrain.base.files import cache_directory
    from p2ptrain.base.launcher import end_with_parent
    from p2ptrain.base.telemetry import MemoryLog
    from p2ptrain.manifest import Manifest, SignedManifest
    from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, ShardAwayError, ShardCorpus, TokenSource, tokens_to_read
    from p2ptrain.tokens.opened import open_corpus
    from p2ptrain.tokens.store import ShardStore
    from p2ptrain.train import accelerator
    from p2ptrain.train.autofit import place
    from p2ptrain.train.batches import CorpusReader
    from p2ptrain.train.compiling import FOLDER, BackgroundCompiler
    from p2ptrain.train.initial_weights import load_initial, stage_targets, targets
    from p2ptrain.train.inner import LanguageModelTask
    from p2ptrain.train.memory import activation_bytes, compiler_fault
    from p2ptrain.train.model import flat_model, in_memory
    from p2ptrain.train.rank_corpus import RankCorpus
    from p2ptrain.train.ranks import Mesh, Ranks, is_lost, launched_ranks
    from p2ptrain.train.stages import StageModel, stage_model
    from p2ptrain.trainer.attached import LOST, Attachment, LogLines
    from p2ptrain.trainer.host_vector import HostVector
    from p2ptrain.trainer.line import LineClosedError
    from peer.home import Home
    from peer.training.agreement import agree
    from peer.training.plan import LAUNCHER, OWNERS_FAULT, REMOTE, VECTORS, TrainerPlan, with_own
    from peer.training.remote_pieces import RemotePieces
    from peer.training.sampler import TextSampler

ANSWERS = ("step", "restore", "load", "store", "add", "tried", "held_out", "sample", "finish", "idle")
"""Questions that a trainer answers, by methods of these names."""
RESTING_S = 30.0
"""Seconds without a step after which the compiler ends, to begin again with the next one: longer than most held-out
losses and waits for partners, which would end it in vain. Guess: how soon owners notice that a pause still computes."""
KILLED_FIRST = "500"
"""Added to this process's share of the memory, in thousandths, where the system chooses what to kill (proc(5)): after
the compiler, before the node."""
READING_S = 0.5
"""Seconds between two notes of how far the held-out text is read."""


class LanguageTrainer:
    """Answers of the language model's trainer, or of one of its ranks.

    If all ranks are on this computer's CPU and nobody else has the same weights, they compute in the host vector.
    Others, as cards, copy its weights by ``load`` and ``store``.

    Args:
        attachment: this process's place at its node; None: the node is on another computer, with rank 0.
        plan: what to train, and with what.
        manifest: the run's.
        ranks: this process's place among several; None: it is alone.
    """

    def __init__(
        self, attachment: Attachment | None, plan: TrainerPlan, manifest: Manifest, ranks: Ranks | None = None
    ) -> None:
        torch.set_num_threads(plan.threads)
        home, training = Home(Path(plan.home)), manifest.training
        together: Callable[[Callable[[], Any]], Any] = (lambda make: make()) if ranks is None else ranks.all_or_none
        rank = 0 if ranks is None else ranks.rank

        def opened() -> tuple[torch.device, ShardCorpus | None]:
            found = None if rank else open_corpus(manifest, ShardStore(Path(plan.store)), plan.path("index"))
            return accelerator.choose_device(plan.devices[rank]), found

        device, text = together(opened)
        self._sampler = None if text is None else TextSampler(home, manifest, text)
        cpu_bytes, allowed_bytes = plan.activation_bytes, math.inf if plan.memory_bytes is None else plan.memory_bytes
        if ranks is None and plan.devices != ("cpu",):  # of a card, the node knows little
            cpu_bytes = activation_bytes(manifest, device, allowed_bytes)
        if ranks is not None:
            ranks.arrange(Mesh.of(len(plan.devices), plan.stages), device)
        corpus: TokenSource = text if ranks is None else RankCorpus(ranks, text)
        self._corpus = corpus
        rest = corpus, training, manifest.run.tokens, CorpusReader(manifest.run.seed, plan.peer)
        with accelerator.explained(device):
            stage: StageModel | None = None
            if ranks is None:
                model = flat_model(manifest.model, manifest.run.seed, device)
                whole = model.layout
            else:
                agreed = agree(ranks, manifest, device, cpu_bytes, plan.most_sequences)
                stage = stage_model(manifest.model, manifest.run.seed, device, agreed.stages[ranks.stage])
                model, whole = stage.flat, stage.whole
            self._total = whole.total
            if plan.begins:
                wanted = targets(model) if stage is None else stage_targets(stage)
                together(lambda: load_initial(manifest, home.files, plan.path("weights"), wanted))
            if stage is None:
                placement = place(model, manifest.model, training, cpu_bytes, corpus.is_packed)
                placement = replace(placement, micro_batch=min(placement.micro_batch, plan.most_sequences))
            begin = 0 if stage is None else stage.offset
            self._piece = slice(begin, begin + model.layout.total)
            """Piece of the host vector that this rank trains."""
            host: HostVector | None = None
            is_new = True
            if attachment is not None:
                host, is_new = attachment.host_vector(whole, len(VECTORS))
            if ranks is not None:
                is_new = ranks.share(is_new)
            if host is None:
                vectors = [torch.zeros(model.layout.total) for _ in VECTORS]
            else:
                vectors = [host.vector(number)[self._piece] for number in range(len(VECTORS))]
            theta, first, second, self._displacement = vectors
            self._stores = ranks is None or ranks.replica == 0
            if is_new and self._stores:
                theta.copy_(model.theta)
            is_shared = device.type == "cpu" and plan.shares and self._stores and host is not None
            if ranks is not None:  # else the host vector would have slices of different ages
                is_shared = all(ranks.gather(is_shared))
            if is_shared:
                model = in_memory(model, theta)
                stage = None if stage is None else replace(stage, flat=model)
            moments = (first, second) if is_shared else None
            self._task: LanguageModelTask
            if stage is None or ranks is None:
                self._task = LanguageModelTask(model, *rest, placement, moments)
            else:
                from p2ptrain.train.staged import StagedTask  # with torch's pipelines, which load for most of a second

                self._task = StagedTask(stage, ranks, *rest, agreed.placement, agreed.counts, moments)
        if is_shared and host is not None:
            self._task.moving = partial(host.moving, 0 if ranks is None else ranks.rank)
        self._vectors = None if is_shared else (theta, first, second)
        own = str(device), host is None, self._piece.start, self._piece.stop
        all_ranks = [own] if ranks is None else ranks.gather(own)  # and all have written their weights
        self._shares = is_shared
        self._device_name = " + ".join(each[0] for each in all_ranks)
        if ranks is not None and ranks.mesh.replicas > 1:
            self._device_name += f" ({ranks.mesh})"
        pieces = {rank: slice(*each[2:]) for rank, each in enumerate(all_ranks) if each[1]}
        self._elsewhere = RemotePieces(ranks, pieces, host, vectors)
        """Pieces that ranks on other computers train."""
        self.is_final = False
        """Whether the run has ended."""
        if is_new:
            self._elsewhere.bring(range(1))
        self._attachment = attachment
        self._tried_tokens, self._tried_s = plan.tried_tokens, plan.tried_s
        self._guessing = math.log(manifest.model.config.vocab_size)
        self._is_stepping, self._stepped_at = False, -math.inf
        self._remaining_s: float | None = None

        def obstacle() -> str:
            return compiler_fault(manifest, device, self._task.micro_batch, allowed_bytes)

        self.compiler = BackgroundCompiler(
            self._task,
            manifest.model,
            plan.compile if ranks is None else "off",
            cache_directory() / FOLDER,
            attachment or MemoryLog(1),
            self._is_training,
            lambda: self._remaining_s,
            obstacle,
        )

    def begin(self) -> dict[str, Any]:
        """Return the first answer."""
        return {"guessing": self._guessing, "shares": self._shares} | self._state()

    def step(self, progress: float, remaining_s: float | None) -> dict[str, Any]:
        """Make one inner step.

        ``remaining_s``: seconds of training that probably remain; None while unknown.
        """
        self._remaining_s, self._is_stepping = remaining_s, True
        made = self._task.inner_step(progress)
        self._is_stepping, self._stepped_at = False, time.monotonic()
        return {"loss": made.loss, "tokens": made.tokens, **self._state()}

    def restore(self, counters: list[int], loss_scale: list[float]) -> dict[str, Any]:
        """Go on with the weights and moments of the host vector and these counters."""
        own = self._task.state_dict()
        self._elsewhere.fetch(range(3))
        if self._vectors is not None:
            theta, own["first_moment"], own["second_moment"] = self._vectors
            self._task.theta.copy_(theta)
        own["counters"] = torch.tensor(counters, dtype=own["counters"].dtype)
        own["loss_scale"] = torch.tensor(loss_scale, dtype=own["loss_scale"].dtype)
        self._task.load_state_dict(own)
        return self._state()

    def load(self) -> dict[str, Any]:
        """Copy the weights from the host vector, where they are not that already."""
        self._elsewhere.fetch(range(1))
        if self._vectors is not None:
            self._task.theta.copy_(self._vectors[0])
        return {}

    def store(self, moments: bool) -> dict[str, Any]:
        """Copy weights to the last vector, which the node copies once all are there, and moments to their place."""
        if self._stores:
            self._displacement.copy_(self._task.theta)
            if moments and self._vectors is not None:
                state = self._task.state_dict()
                self._vectors[1].copy_(state["first_moment"])
                self._vectors[2].copy_(state["second_moment"])
        self._elsewhere.bring(range(1 if moments else 3, 4))
        return self._state()

    def add(self, start: int, stop: int) -> dict[str, Any]:
        """Add a piece of the host vector's displacement to the weights."""
        self._elsewhere.fetch(range(3, 4), slice(start, stop))
        begin, end = (min(max(each - self._piece.start, 0), len(self._displacement)) for each in (start, stop))
        self._task.theta[begin:end].add_(self._displacement[begin:end].to(self._task.theta.device))
        return {}

    def tried(self) -> dict[str, Any]:
        """Read a short held-out loss, as for a donor's weights; None while its text is not on this machine."""
        with contextlib.suppress(ShardAwayError):
            if self._stores:  # one replica reads
                return {"loss": self._task.tried_loss(self._tried_tokens, self._tried_s)}
        return {"loss": None}

    def held_out(self, most_tokens: int, patience_s: float | None) -> dict[str, Any]:
        """Read the held-out loss, until the node has enough; none while its text is not on this machine."""
        if not self._stores:
            return {}
        next_note, attachment = 0.0, self._attachment

        def goes_on(read: int, wanted: int) -> bool:
            nonlocal next_note
            assert attachment is not None  # rank 0 decides
            if (now := time.monotonic()) >= next_note:
                next_note = now + READING_S
                attachment.say(read=read, wanted=wanted)
            return not attachment.has_enough()

        try:
            found = self._task.held_out_loss(most_tokens, math.inf if patience_s is None else patience_s, goes_on)
        except ShardAwayError:
            return {"value": None, "tokens": 0, "of": tokens_to_read(self._corpus, HELD_OUT_TOKENS)}
        value = found.value if math.isfinite(found.value) else None
        return {"value": value, "tokens": found.tokens, "of": found.of}

    def sample(self, new_tokens: int) -> dict[str, Any]:
        """Write a text; none where this rank has not all weights."""
        if self._sampler is None or self._piece.stop - self._piece.start < self._total:
            return {"text": ""}
        return {"text": self._sampler.sample(self._task.model.module, new_tokens)}

    def idle(self) -> dict[str, Any]:
        """Do nothing, within the longest wait of the ranks for each other."""
        return {}

    def finish(self) -> dict[str, Any]:
        """Note that the run has ended."""
        self.is_final = True
        return {}

    def _is_training(self) -> bool:
        return self._is_stepping or time.monotonic() - self._stepped_at < RESTING_S

    def _state(self) -> dict[str, Any]:
        """Return what the node shows, and what another trainer needs to go on, beside the vectors."""
        task, counters = self._task, self._task.counters()
        return {
            "figures": {
                "device_name": self._device_name,
                "parameter_count": task.parameter_count,
                "computes_in": task.computes_in,
                "skipped_steps": task.skipped_steps,
                "coverage": task.coverage,
                "micro_batch": task.micro_batch,
                "learning_rate": task.learning_rate,
                "cpu_s": time.process_time(),
                "compiler": self.compiler.state,
            },
            "counters": counters,
            "loss_scale": task.loss_scale.state().tolist(),
        }


def _planned(given: Mapping[str, Any]) -> TrainerPlan:
    return TrainerPlan.model_validate_json(json.dumps(given))


def _run_of(plan: TrainerPlan) -> SignedManifest:
    signed = Home(Path(plan.home)).load_manifest(None)
    assert signed is not None, "the node saved it"
    return signed


def live(attachment: Attachment | None) -> None:
    """Train until the node closes the line. Raises UserError."""
    if launched_ranks() == 1:
        assert attachment is not None
        plan = _planned(attachment.plan())
        trainer = LanguageTrainer(attachment, plan, _run_of(plan).manifest)
        with trainer.compiler:
            attachment.serve(trainer.begin(), {name: getattr(trainer, name) for name in ANSWERS})
        return
    given = attachment.plan() if attachment is not None else None
    ranks = Ranks()
    plan = _planned(ranks.share(given))
    run = ranks.share(_run_of(plan).to_bytes().hex() if ranks.rank == 0 else None)
    if attachment is None:
        plan = with_own(plan, ranks.rank)
    trainer = LanguageTrainer(attachment, plan, SignedManifest.from_bytes(bytes.fromhex(run)).manifest, ranks)
    answers = {name: getattr(trainer, name) for name in ANSWERS}
    if ranks.rank == 0:
        assert attachment is not None
        together = {name: ranks.together(name, each) for name, each in answers.items()}
        with contextlib.suppress(LineClosedError):
            attachment.serve(trainer.begin(), together, together["idle"])
        ranks.end()
        return
    if attachment is None:
        sys.stderr.write(f"[team] trains as rank {ranks.rank} of {ranks.size}, {ranks.mesh}\n")
    ranks.follow(answers)
    if attachment is None and not trainer.is_final:
        sys.exit("[team] the leader has stopped")


def _fail(attachment: Attachment | None, kind: str, error: Exception) -> None:
    """Say why this process ends, to the node or to the person at this computer."""
    if attachment is not None:
        attachment.fail(kind, error)
    else:
        sys.stderr.write(f"[team] {error}\n" if kind == LOST else f"Error: {error}\n")


def main() -> int:
    """Return the exit status. Raises LineClosedError if the node has ended, or has closed the line."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager stops all processes; the node still saves
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text(KILLED_FIRST, encoding="ascii")
    if launched_ranks() > 1:
        end_with_parent(int(os.environ[LAUNCHER]))
    attachment = Attachment.of_environment() if REMOTE not in os.environ else None
    if attachment is not None:
        logging.getLogger().addHandler(LogLines(attachment))
    try:
        live(attachment)
    except UserError as error:
        _fail(attachment, "user", error)
        return OWNERS_FAULT
    except ShardAwayError:  # the node asks again when the text is here
        _fail(attachment, "text", RuntimeError("text that it was to read is no longer on this machine"))
    except OSError as error:
        _fail(attachment, "memory" if error.errno == errno.ENOMEM else "system", error)
    except (RuntimeError, MemoryError) as error:
        if is_lost(error):
            _fail(attachment, LOST, RuntimeError("another rank has ended"))
        elif accelerator.is_out_of_memory(error):
            _fail(attachment, "memory", error)
        elif isinstance(error, torch.AcceleratorError):
            _fail(attachment, "device", error)
        else:
            raise
    else:
        return 0
    return 1


if __name__ == "__main__":
    code = 0
    with contextlib.suppress(LineClosedError):
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a card's driver may wait for what does not come
