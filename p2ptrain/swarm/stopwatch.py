"""How long our own outer steps take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stopwatch:
    """From one outer step to the next. Before training begins it stands still, and measures nothing."""

    _since: float | None = None
    _trained_s: float | None = None
    """In this outer step, where the trainer waits for partners after that."""

    def begin(self, now: float) -> None:
        """Training begins."""
        self._since = now

    def skip(self, seconds: float) -> None:
        """Nobody trained for so long."""
        if self._since is not None:
            self._since += seconds

    def wait(self, now: float) -> None:
        """From here to the end of this outer step the trainer waits."""
        if self._since is not None:
            self._trained_s = max(now - self._since, 0.0)

    def lap(self, now: float) -> tuple[float, float] | None:
        """An outer step is over: the seconds that it took, and how many of them went into training.

        None where there is no such time.
        """
        since, trained_s = self._since, self._trained_s
        self._since, self._trained_s = now, None
        if since is None or now <= since:
            return None
        return now - since, now - since if trained_s is None else trained_s
