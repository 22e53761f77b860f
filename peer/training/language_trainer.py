"""The language model's trainer: ``python -m peer.training.language_trainer``, started by a node, never by people."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2ptrain.base.errors import UserError
from p2ptrain.base.imports import large_imports

with large_imports():
    import torch

    from p2ptrain.data.corpus import open_corpus
    from p2ptrain.data.stream import cache_directory
    from p2ptrain.train import accelerator
    from p2ptrain.train.autofit import place
    from p2ptrain.train.batches import CorpusReader
    from p2ptrain.train.compiling import BackgroundCompiler
    from p2ptrain.train.initial_weights import targets
    from p2ptrain.train.inner import ArrivingStepResult, LanguageModelTask
    from p2ptrain.train.libraries import FOLDER
    from p2ptrain.train.model import flat_model, in_memory
    from p2ptrain.trainer.attached import Attachment, LogLines
    from p2ptrain.trainer.line import LineClosedError
    from peer.capacity import compiler_fault, explained
    from peer.home import Home
    from peer.initial_weights import load_initial
    from peer.training.plan import VECTORS, TrainerPlan

RESTING_S = 5.0
"""Seconds without a step after which the compiler rests, too."""
KILLED_FIRST = "500"
"""Added to this process's share of the memory, in thousandths, where the system chooses what to kill (proc(5)): after
the compiler, before the node."""
READING_S = 0.5
"""Seconds between two notes of how far the held-out text is read."""


class LanguageTrainer:
    """Answers of the language model's trainer.

    On the CPU weights and moments are the host vector; a card has its own, copied by ``load`` and ``store``.

    Args:
        attachment: this process's place at its node.
        plan: what to train, and with what.
    """

    def __init__(self, attachment: Attachment, plan: TrainerPlan) -> None:
        torch.set_num_threads(plan.threads)
        device = accelerator.choose_device(plan.device)
        home = Home(Path(plan.home))
        signed = home.load_manifest(None)
        assert signed is not None, "the node saved it"
        manifest, training = signed.manifest, signed.manifest.training
        files = (plan.path("data"), plan.path("tokenizer"))
        corpus = open_corpus(manifest, cache_directory(), *files, template_file=plan.path("template"))
        with explained(device):
            model = flat_model(manifest.model, manifest.run.seed, device)
            if plan.begins:
                load_initial(manifest, home, plan.path("weights"), targets(model))
            found = place(model, manifest.model, training, plan.activation_bytes, corpus.is_packed)
            placement = replace(found, micro_batch=min(found.micro_batch, plan.most_sequences))
            host, is_new = attachment.host_vector(model.layout, len(VECTORS))
            theta, first, second, displacement = (host.vector(number) for number in range(len(VECTORS)))
            if is_new:
                theta.copy_(model.theta)
            is_shared = device.type == "cpu" and plan.shares
            model = in_memory(model, theta) if is_shared else model
            moments = (first, second) if is_shared else None
            reader = CorpusReader(manifest.run.seed, plan.peer)
            self._task = LanguageModelTask(model, corpus, training, manifest.run.tokens, reader, placement, moments)
        self._vectors = None if is_shared else (theta, first, second)
        self._displacement = displacement
        self._attachment = attachment
        self._tokens = training.tokens_per_step
        self._results: deque[ArrivingStepResult] = deque()
        """Steps whose losses are on their way from a card."""
        self._tried = self._task.held_out(plan.tried_tokens, plan.tried_s)

        self._is_stepping, self._stepped_at = False, -math.inf
        self._remaining_s: float | None = None

        def obstacle() -> str:
            allowed = math.inf if plan.memory_bytes is None else plan.memory_bytes
            return compiler_fault(manifest, device, self._task.micro_batch, allowed)

        self.compiler = BackgroundCompiler(
            self._task,
            manifest.model,
            plan.compile,
            cache_directory() / FOLDER,
            attachment,
            self._is_training,
            lambda: self._remaining_s,
            obstacle,
        )

    def begin(self) -> dict[str, Any]:
        """Return the first answer."""
        return {"guessing": self._tried.guessing, "shares": self._vectors is None, **self._state()}

    def step(self, progress: float, remaining_s: float | None) -> dict[str, Any]:
        """Make one inner step; return the losses that have arrived, of this step or of earlier ones, in order.

        ``remaining_s``: seconds of training that probably remain; None while unknown.
        """
        self._remaining_s, self._is_stepping = remaining_s, True
        self._results.append(self._task.inner_step(progress))
        self._is_stepping, self._stepped_at = False, time.monotonic()
        return {"losses": self._arrived(), "tokens": self._tokens, **self._state()}

    def losses(self) -> dict[str, Any]:
        """Wait for the losses of all steps; return those that ``step`` has not."""
        return {"losses": self._arrived(waits=True)}

    def restore(self, counters: list[int], loss_scale: list[float]) -> dict[str, Any]:
        """Go on with the weights and moments of the host vector and these counters."""
        own = self._task.state_dict()
        if self._vectors is not None:
            theta, own["first_moment"], own["second_moment"] = self._vectors
            self._task.theta.copy_(theta)
        own["counters"] = torch.tensor(counters, dtype=own["counters"].dtype)
        own["loss_scale"] = torch.tensor(loss_scale, dtype=own["loss_scale"].dtype)
        self._task.load_state_dict(own)
        return self._state()

    def load(self) -> dict[str, Any]:
        """Copy the weights from the host vector, where they are not that already."""
        if self._vectors is not None:
            self._task.theta.copy_(self._vectors[0])
        return {}

    def store(self, moments: bool) -> dict[str, Any]:
        """Copy the weights, and perhaps the moments, to the host vector, where they are not that already."""
        if self._vectors is not None:
            self._vectors[0].copy_(self._task.theta)
            if moments:
                state = self._task.state_dict()
                self._vectors[1].copy_(state["first_moment"])
                self._vectors[2].copy_(state["second_moment"])
        return self._state()

    def add(self, start: int, stop: int) -> dict[str, Any]:
        """Add a piece of the host vector's displacement to the weights."""
        self._task.theta[start:stop].add_(self._displacement[start:stop].to(self._task.theta.device))
        return {}

    def tried(self) -> dict[str, Any]:
        """Read a short held-out loss, as for a donor's weights."""
        return {"loss": self._tried.loss()}

    def held_out(self, most_tokens: int, patience_s: float | None) -> dict[str, Any]:
        """Read the held-out loss, until the node has enough."""
        next_note = 0.0

        def goes_on(read: int, wanted: int) -> bool:
            nonlocal next_note
            if (now := time.monotonic()) >= next_note:
                next_note = now + READING_S
                self._attachment.say(read=read, wanted=wanted)
            return not self._attachment.has_enough()

        found = self._task.held_out_loss(most_tokens, math.inf if patience_s is None else patience_s, goes_on)
        value = found.value if math.isfinite(found.value) else None
        return {"value": value, "tokens": found.tokens, "of": found.of}

    def sample(self, new_tokens: int) -> dict[str, Any]:
        """Write a text."""
        return {"text": self._task.sample(new_tokens)}

    def _is_training(self) -> bool:
        return self._is_stepping or time.monotonic() - self._stepped_at < RESTING_S

    def _arrived(self, waits: bool = False) -> list[float]:
        losses = []
        while self._results and (waits or self._results[0].numbers.is_complete):
            losses.append(self._results.popleft().loss)
        return losses

    def _state(self) -> dict[str, Any]:
        """Return what the node shows, and what another trainer needs to go on, beside the vectors."""
        task, counters = self._task, self._task.counters()
        return {
            "figures": {
                "device_name": task.device_name,
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


def live(attachment: Attachment) -> None:
    """Train until the node closes the line. Raises UserError."""
    trainer = LanguageTrainer(attachment, TrainerPlan.model_validate(attachment.plan()))
    names = ("step", "losses", "restore", "load", "store", "add", "tried", "held_out", "sample")
    answers: Mapping[str, Any] = {name: getattr(trainer, name) for name in names}
    with trainer.compiler:
        attachment.serve(trainer.begin(), answers)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager stops all processes; the node still saves
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only
        Path("/proc/self/oom_score_adj").write_text(KILLED_FIRST, encoding="ascii")
    attachment = Attachment.of_environment()
    logging.getLogger().addHandler(LogLines(attachment))
    try:
        live(attachment)
    except LineClosedError:
        return 0
    except UserError as error:
        attachment.fail("user", error)
    except (RuntimeError, MemoryError) as error:
        is_memory, is_device = accelerator.is_out_of_memory(error), isinstance(error, torch.AcceleratorError)
        if not is_memory and not is_device:
            raise
        attachment.fail("memory" if is_memory else "device", error)
    else:
        return 0
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a card's driver may wait for what does not come
