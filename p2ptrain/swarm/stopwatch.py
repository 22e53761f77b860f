"""Duration of this peer's own outer steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stopwatch:
    """Time from one outer step to the next. Before training begins it measures nothing."""

    _since: float | None = None
    _trained_s: float | None = None
    """Training time in this outer step, if the trainer then waits for partners."""

    def begin(self, now: float) -> None:
        """Begin measuring: training starts."""
        self._since = now

    def skip(self, seconds: float) -> None:
        """Exclude a time in which nothing was trained."""
        if self._since is not None:
            self._since += seconds

    def wait(self, now: float) -> None:
        """Mark the end of training in this outer step: from now on the trainer waits."""
        if self._since is not None:
            self._trained_s = max(now - self._since, 0.0)

    def lap(self, now: float) -> tuple[float, float] | None:
        """Return the seconds of the outer step that ended, and its seconds of training.

        None if there is no such time.
        """
        since, trained_s = self._since, self._trained_s
        self._since, self._trained_s = now, None
        if since is None or now <= since:
            return None
        return now - since, now - since if trained_s is None else trained_s
