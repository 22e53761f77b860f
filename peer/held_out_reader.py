"""Held-out losses of one session: at its start, while somebody watches, and at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.host.tasks import PeerLearner, PeerTask
from p2ptrain.ports import NOT_READ, Clock, GoesOn, HeldOutLoss, Notebook
from p2ptrain.tokens.corpus import HELD_OUT_TOKENS, TokenSource, tokens_to_read
from peer.saving import reason_of

NOTE_PERIOD_S = 2.0
"""Seconds between two notes of how far the last reading is."""
LOOK_PERIOD_S, LOOK_MOST_S = 20.0, 120.0
"""Minimum and maximum seconds between two looks at the held-out loss while somebody watches. Guess: how long visitors
keep the page open."""
LOOK_SHARE = 50
"""Minimum ratio of training time to the time for a look: 2 %; a look longer than 2.4 s costs more."""
LOOK_TOKENS = 16_384
"""Held-out tokens read for a look: a standard error of 0.02 nats for bytes, twice that of the reported losses."""

LOSS_PATIENCE_S = 30.0
"""Approximate maximum seconds for a loss while others may wait for this peer; a slower machine reads fewer tokens.
Guess: the time for HELD_OUT_TOKENS on the slowest machines that join."""
BEGINNING_S = 5.0
"""Approximate maximum seconds for the loss before the first step, which delays a newcomer's request for weights. That
loss need not be exact. Reading for LOSS_PATIENCE_S took about 30 of the 40 s that a newcomer to four peers of 15
million parameters needed on two cores before it asked for weights."""
HASTE_S = 3.0
"""Approximate maximum seconds for the last loss of a peer that its owner stops: docker kills it after 10 s. Guess: the
time to save and leave on slow machines."""


@dataclass(slots=True)
class HeldOutReader:
    """Reads and notes held-out losses. Runs in the training thread."""

    learner: PeerLearner
    task: PeerTask
    corpus: TokenSource | None
    """None: nothing is evaluated."""
    notebook: Notebook
    sampler: Callable[[], str] | None = None
    """Returns a sample text of the model; empty: none at this look."""
    first: HeldOutLoss | None = None
    """First loss of the run."""
    last: HeldOutLoss = NOT_READ
    clock: Clock = time.monotonic
    is_stopping: Callable[[], bool] = lambda: False
    """Whether the owner stopped the peer."""
    is_reading: bool = False
    """Whether the text is being read for the final loss."""
    _read: int | None = None
    """``learner.changes`` at ``last``."""
    _next_note: float = 0.0
    _next_look: float = 0.0

    @property
    def fields(self) -> dict[str, Any]:
        return {"loss": self.last.value, "read": self.last.tokens, "of": self.last.of}

    def begin(self, before: Mapping[str, Any]) -> None:
        """Read the loss, or take it from the summary of a session that ended with the same weights."""
        names = ("val_loss_last", "val_loss_last_tokens", "val_loss_of_tokens")
        try:
            value, tokens, of = (before[name] for name in names)
            if math.isfinite(value):
                self.last, self._read = HeldOutLoss(float(value), int(tokens), int(of)), self.learner.changes
                self.first = self.first or self.last
        except (ValueError, KeyError, TypeError):
            pass
        self._evaluate(patience_s=BEGINNING_S)
        self._next_look = time.monotonic() + LOOK_PERIOD_S

    def look(self) -> None:
        """Note the held-out loss and a sample text, if the last look is some time ago; errors do not stop training."""
        began, learner = time.monotonic(), self.learner
        if began < self._next_look:
            return
        try:
            self._evaluate(LOOK_TOKENS)
            if self.last.tokens:
                self.notebook.note("held out", **self.fields, step=learner.step, progress=learner.progress)
            if self.sampler is not None and (text := self.sampler()):
                self.notebook.note("sample", step=learner.step, progress=learner.progress, text=text)
        except Exception as error:  # training continues without a look
            self.notebook.note("not looked", why=reason_of(error))
        now = time.monotonic()
        self._next_look = now + max(LOOK_PERIOD_S, min(LOOK_SHARE * (now - began), LOOK_MOST_S))

    def conclude(self) -> None:
        """Read the last loss: at the run's end of the whole text, unless the owner stops the peer."""
        if not self.learner.ended or self.is_stopping():
            self._evaluate(patience_s=HASTE_S)
        else:
            self.is_reading = True
            self._evaluate(patience_s=math.inf, goes_on=self._reads_on)
            self.is_reading = False

    def _evaluate(
        self,
        tokens: int = HELD_OUT_TOKENS,
        patience_s: float = LOSS_PATIENCE_S,
        goes_on: GoesOn = lambda read, wanted: True,
    ) -> None:
        """Read the held-out loss of the slow weights in fp32, unless a reading of as many tokens is known.

        Nothing is read while the text is not on this machine.
        """
        if self.corpus is None:
            return
        is_known = self._read == self.learner.changes
        if is_known and self.last.tokens >= tokens_to_read(self.corpus, tokens):
            return
        found = self.learner.at_slow(lambda: self.task.held_out_loss(tokens, patience_s, goes_on))
        if not is_known or found.tokens >= self.last.tokens:
            self.last, self._read = found, self.learner.changes
        if self.first is None and math.isfinite(found.value):  # goes into checkpoints, and JSON has no NaN
            self.first = found

    def _reads_on(self, read: int, wanted: int) -> bool:
        """Note how far the last reading is; stop it if the owner stops the peer."""
        if (now := self.clock()) >= self._next_note:
            self._next_note = now + NOTE_PERIOD_S
            self.notebook.note("reading", read=read, wanted=wanted)
        return not self.is_stopping()
