"""Choice of the fastest way to compute micro-batches, by timing them while they train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from p2ptrain.ports import Clock
from p2ptrain.train.compiled_pass import CompiledPassError

PAIRS = 8
"""Micro-batches computed each way, whose times decide. Guess: the spread of times."""
GAIN = 1.03
"""Least ratio of times for which the eager pass is left: more than ``PAIRS`` show by chance. Guess: the ratio's
spread."""
EAGER = ""
"""Name of the eager pass."""


def compile_choice(
    eager_s: Sequence[float],
    compiled_s: Sequence[float],  # the same number, at least one
) -> float | None:
    """Return by what factor compiled micro-batches are faster, in the median pair; None if it is below ``GAIN``."""
    ratio = statistics.median(eager / compiled for eager, compiled in zip(eager_s, compiled_s, strict=True))
    return ratio if ratio >= GAIN else None


class MicroBatchPass(Protocol):
    """A way to compute micro-batches of one shape beside the eager one."""

    def takes(self, part: Tensor) -> bool: ...

    def run(self, part: Tensor) -> Tensor: ...


class PassChoice:
    """Computes micro-batches by each candidate and by the eager pass in turn, then by the fastest.

    All read the same weights and add to the same gradient, so every one of these micro-batches trains.

    Args:
        candidates: by name, in the order in which they are tried; all take the same shape.
        decided: called once with the fastest candidate's name and ``compile_choice``'s result for it.
        failed: called once if the last candidate fails, or the one in use, with the reason.
    """

    def __init__(
        self,
        candidates: Mapping[str, MicroBatchPass],
        decided: Callable[[str, float | None], None],
        failed: Callable[[str], None],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._candidates = dict(candidates)
        """Those that may still be used: a CUDA graph holds the memory of its activations."""
        self._decided = decided
        self._failed = failed
        self._clock = clock
        self._times: dict[str, list[float]] = {name: [] for name in (*candidates, EAGER)}
        self._is_decided = False

    def run(self, part: Tensor, eager: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a micro-batch; return its share of the loss.

        Raises CompiledPassError if a candidate failed, which may leave a part of the gradient. It is not used again.
        """
        if not any(each.takes(part) for each in self._candidates.values()):
            return eager(part)
        if self._is_decided:
            (name,) = self._candidates
            return self._run(name, part)
        name = min(self._times, key=lambda each: len(self._times[each]))
        began = self._clock()
        loss = eager(part) if name == EAGER else self._run(name, part)
        self._add(name, self._clock() - began)
        return loss

    def give_up(self, why: str) -> None:
        """Report a failure; no candidate is used again."""
        if self._candidates:
            self._candidates.clear()
            self._failed(why)

    def _add(self, name: str, seconds: float) -> None:
        self._times[name].append(seconds)
        if min(map(len, self._times.values())) > PAIRS:
            self._decide()

    def _decide(self) -> None:
        eager_s, *times = (self._times[name][1:] for name in (EAGER, *self._candidates))  # the first fill caches
        ratios = dict(zip(self._candidates, (compile_choice(eager_s, each) for each in times), strict=True))
        name = max(ratios, key=lambda each: ratios[each] or 0.0)
        self._is_decided = True
        self._candidates = {name: self._candidates[name]} if ratios[name] is not None else {}
        self._decided(name, ratios[name])

    def _run(self, name: str, part: Tensor) -> Tensor:
        try:
            return self._candidates[name].run(part)
        except CompiledPassError as error:
            if len(self._candidates) == 1:
                self.give_up(str(error))
            else:
                del self._candidates[name], self._times[name]
            raise


class StageChoice:
    """Chooses between the eager and the compiled pass of a stage, whose micro-batches are several at once in flight.

    A micro-batch stays with the pass that ``begin`` names. Until ``PAIRS`` of each are timed, they take turns.

    Args:
        decided, failed: as for ``PassChoice``.
    """

    def __init__(
        self,
        name: str,
        decided: Callable[[str, float | None], None],
        failed: Callable[[str], None],
    ) -> None:
        self._name = name
        self._decided = decided
        self._failed = failed
        self._begun = {EAGER: 0, name: 0}
        self._times: dict[str, list[float]] = {EAGER: [], name: []}
        self._chosen: str | None = None

    @property
    def is_timing(self) -> bool:
        return self._chosen is None

    def begin(self) -> str:
        """Return the name of the pass for the next micro-batch."""
        if self._chosen is not None:
            return self._chosen
        name = min(self._begun, key=lambda each: self._begun[each])
        self._begun[name] += 1
        return name

    def add(self, name: str, seconds: float) -> None:
        """Count the time of a micro-batch, forward and backward."""
        self._times[name].append(seconds)
        if self._chosen is None and min(map(len, self._times.values())) > PAIRS:
            eager_s, compiled_s = (self._times[each][1 : PAIRS + 1] for each in (EAGER, self._name))
            ratio = compile_choice(eager_s, compiled_s)  # without the first, which fill caches
            self._chosen = EAGER if ratio is None else self._name
            self._decided(self._name, ratio)

    def give_up(self, why: str) -> None:
        """Report a failure; the eager pass computes all further micro-batches."""
        if self._chosen != EAGER:
            self._chosen = EAGER
            self._failed(why)
