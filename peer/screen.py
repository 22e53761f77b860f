"""Output for the owner: news above a status line on a terminal, elsewhere news and a line of progress a minute.

News is what changed: peers that come and go, catching up, saves, failures, pauses. ``verbose`` also
shows every exchange and every repetition.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.errors import MISFIT
from p2ptrain.ports import Clock
from peer.messages import PARTS, line

PLAIN_PROGRESS_S = 60.0
"""Seconds between two progress lines without a terminal, to keep logs readable."""
PLAIN_ACTIVITY_S = 10.0
"""Seconds between two lines about one activity without a terminal, to keep logs readable."""
REPEAT_S = 600.0
"""Seconds until the same news is shown again. Guess: how often owners want it."""
MAX_REMEMBERED = 1024
"""News whose last time is remembered. Guess: count the failing partners of a peer in a large swarm."""

FAILURES = 3
"""Failed exchanges in a row from which on a failure is news. Partners that come and go break off exchanges all the
time; a computer that cannot exchange at all fails from the start. Guess: failures in a row of healthy peers."""
DIAL_BACKOFF = "dial backoff"
"""Part of p2pd's reason not to dial yet, which is not a reason for a failure."""

ROUTINE = frozenset({"exchanged", "skipped", "gave weights", "held out"})
"""Kinds that are not news, except one exchange in ``REPEAT_S``."""
PROGRESS = frozenset({"progress", "reading"})
"""Kinds that tell how far something is."""
ONCE_FOR_EACH_PEER = frozenset({"failed", "clipped", "broke protocol", "saved"})
"""Kinds that are news once in ``REPEAT_S`` for each peer, whatever the reason."""
ONCE_FOR_EACH_REASON = frozenset({"no manifest", "waiting", "no certificate", "not admitted", "no file"})
"""Kinds that are news once in ``REPEAT_S`` for each peer, address and reason."""
ACTIVITIES = frozenset(
    {
        *("waiting", "no text", "no certificate", "catching up", "trained", "reading", "finishing", "stopping"),
        *("waiting for ranks", "waiting for the leader"),
    }
)
"""Kinds that the status line shows until the next progress."""
TAG = "[train] "
"""Tag that the status line omits, so that a terminal of 80 columns shows the speed and the exchanges."""
RESTS, ENDS_OF_REST = frozenset({"paused", "still paused"}), frozenset({"called back", "goes on"})


class StatusLine:
    """Line at the bottom of a terminal that renews itself; a context manager that removes it at its end."""

    def __init__(self, console: Console, text: str = "") -> None:
        self._console = console
        self._has_status = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(_Status(text), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._has_status:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_status:
            self._live.stop()

    def _renew(self, text: str) -> None:
        self._live.update(_Status(text), refresh=True)


class ActivityLine(StatusLine):
    """What a command does meanwhile: one line on a terminal, elsewhere one for each activity."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(console or Console(highlight=False, soft_wrap=True, emoji=False))
        self._clock = clock
        self._shown = ""
        self._shown_at = float("-inf")

    def tell(self, activity: str, done: str = "") -> None:
        """Show an activity, and how much of it is done."""
        text = f"{activity}: {done}" if done else activity
        if self._has_status:
            self._renew(text)
        elif activity != self._shown or self._clock() - self._shown_at >= PLAIN_ACTIVITY_S:
            self._shown, self._shown_at = activity, self._clock()
            self._console.print(text, markup=False)


class News:
    """Decides which notes of the event log are news. Safe from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_ending = False
        self._failures = 0
        """Failed exchanges since the last one that succeeded."""
        self._shown_at: BoundedDict[tuple[str, ...], float] = BoundedDict(MAX_REMEMBERED)

    def is_news(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Return whether a note is news. Call it once for each note, in order."""
        self._is_ending |= kind in ("trained", "finishing", "stopping") or bool(fields.get("ended"))
        if kind == "saved" and self._is_ending:
            return True
        if kind == "exchanged":
            self._failures = 0
            return self.is_due(REPEAT_S, kind)
        peer, place, why = (str(fields.get(name, "")) for name in ("peer", "where", "why"))
        if kind in ROUTINE:
            return False
        if kind == "failed":
            self._failures += why != MISFIT
            if self._failures < FAILURES or why == MISFIT or DIAL_BACKOFF in why:
                return False
        if kind in ONCE_FOR_EACH_PEER:
            return self.is_due(REPEAT_S, kind, peer)
        return kind not in ONCE_FOR_EACH_REASON or self.is_due(REPEAT_S, kind, peer, place, why)

    def is_due(self, period_s: float, *news: str) -> bool:
        """Return whether ``news`` was not shown for ``period_s`` seconds; if so, count it as shown now."""
        with self._lock:
            now = self._clock()
            if now - self._shown_at.get(news, float("-inf")) < period_s:
                return False
            self._shown_at[news] = now
            return True


class Screen(StatusLine):
    """Shows notes of the event log. Safe from any thread."""

    def __init__(self, console: Console | None = None, verbose: bool = False, clock: Clock = time.monotonic) -> None:
        super().__init__(console or Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False), "starting")
        self._verbose = verbose
        self._news = News(clock)
        self._lock = threading.RLock()
        self._rests = False
        self._fraction = 0.0

    def show(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            if kind == "progress":  # averaging with peers behind lowers it a little
                self._fraction = max(self._fraction, fields["fraction"])
                fields = fields | {"fraction": self._fraction}
            text = line(kind, fields)
            self._rests = kind in RESTS or (self._rests and kind not in ENDS_OF_REST)
            if text is None:
                return
            if self._has_status and (kind in ACTIVITIES or kind in RESTS or (kind == "progress" and not self._rests)):
                self._renew(text.removeprefix(TAG))
            if self._is_shown(kind, fields):
                self._console.print(text, markup=False)

    def _is_shown(self, kind: str, fields: dict[str, Any]) -> bool:
        if kind in PROGRESS:
            return not self._has_status and self._news.is_due(PLAIN_PROGRESS_S, kind)
        return self._news.is_news(kind, fields) or self._verbose


class _Status:
    """A line without the last parts that do not fit, so that no number is cut, at the terminal's width when drawn."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._text.split(PARTS)
        while len(parts) > 1 and cell_len(PARTS.join(parts)) > options.max_width:
            parts.pop()
        yield Text(PARTS.join(parts), no_wrap=True, overflow="ellipsis")
