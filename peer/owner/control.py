"""Owner control: watches settings, month, hour and commands, and controls the rest of the peer accordingly.

It begins under the home's lock and before anything else of the peer, so that ``p2ptrain status`` works while the peer
looks for its swarm. ``take`` gives it the trainer later. Everything runs in the node's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from p2ptrain.base import files
from p2ptrain.base.clock import wall
from p2ptrain.base.daemon_thread import DaemonThread
from p2ptrain.base.errors import DeviceError
from p2ptrain.host.loop import Signals
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Clock, Notebook
from peer.home import Home
from peer.messages import line
from peer.owner import status
from peer.owner.control_socket import ControlServer
from peer.owner.pause import PauseFile, end_in_words, end_of
from peer.owner.policy import GIVEN_SHARE, PolicyDecision, decide
from peer.owner.resting import OLD_S, READ_S, UNKNOWN, Readings, RestRule, read
from peer.owner.settings import WAITING, Settings, SettingsFile
from peer.owner.traffic import TrafficCount
from peer.participation import Mode, Participation, TrainerControl
from peer.screen import News
from peer.session_recorder import SessionRecorder

POLL_S = 1.0
"""Seconds between two checks of settings, month and hour: the delay of an edit and of a monthly limit."""
SAVE_PERIOD_S = 10.0
"""Seconds between two writes of the month's traffic, and so the traffic that SIGKILL leaves uncounted."""
MEASURED_S = 60.0
"""Seconds over which ``status`` averages send and receive rates."""
DUPLICATE_S = 1200.0
"""Seconds for which ``status`` shows another process with this peer's identity, which is noted every ten minutes."""
KEPT_LINES = 5


def local_time() -> datetime:
    """Return the local time by a clock that does not follow false jumps of the system's."""
    return datetime.fromtimestamp(wall())


@dataclass(frozen=True, slots=True)
class TrainingHandle:
    record: SessionRecorder
    participation: Participation | None
    """The peer's participation; None for a recipe without exchanges."""
    control: TrainerControl
    admission: Callable[[], str] = str
    """Returns whether the run admits this peer; empty in an open run."""


class OwnerControl:
    """Applies the owner's settings and carries out commands."""

    def __init__(
        self,
        home: Home,
        file: SettingsFile,
        settings: Settings,
        rates: Throttles,
        signals: Signals,
        notebook: Notebook,
        now: Callable[[], datetime] = local_time,
        clock: Clock = time.monotonic,
    ) -> None:
        self._home = home
        self._file = file
        self._settings = settings
        self._rates = rates
        self._signals = signals
        self._notebook = notebook
        self.readings = Readings()
        """What running programs and battery were last."""
        self._reads_since = math.inf
        """When the reading under way began."""
        self._rest_rule = RestRule()
        self._noted_faults: set[str] = set()
        self._now = now
        self._clock = clock
        self._traffic = TrafficCount(home.path)
        self._counted = (0, 0, 0)
        self._save_at = 0.0
        self._is_saved = True
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=round(MEASURED_S / POLL_S) + 1)
        self._pause = PauseFile(home.path)
        self._paused_until: float | None = None
        self._decision = PolicyDecision(Mode.SWARM, gives=True)
        self._fault = ""
        self._waits_for = ""
        """Other computers of a team that are not there."""
        self._duplicate = -math.inf, ""
        """When and where another process with this peer's identity was seen last."""
        self._handle: TrainingHandle | None = None
        self._news = News(clock)
        self._last_lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        self._server: ControlServer | None = None

    @contextlib.asynccontextmanager
    async def running(self, start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> AsyncIterator[None]:
        """Control the peer while the block runs.

        Args:
            start: starts a task whose failure ends the peer.
        """
        if why := self._traffic.load():
            self._notebook.note("not counted", why=f"{self._traffic.path} cannot be read: {why}")
        self._restore_pause()
        self._count()
        self._apply()
        await self._listen()
        with DaemonThread("sensors") as thread:
            tasks = [start(self._sense(thread)), start(self._watch())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                self._note_faults()  # a short session may end before the first look
                if self._server is not None:
                    self._server.close()
                self._count()
                self._save()

    def take(self, handle: TrainingHandle) -> None:
        """Set the trainer to control, before its loop begins."""
        self._handle = handle
        self._apply()

    def on_note(self, kind: str, fields: dict[str, Any]) -> None:
        """Keep the last lines that are news for ``status``; a ``telemetry.Listener``."""
        if kind in status.WAITING:
            self._waits_for = f"for {fields['ranks']} more at {fields['leader']}: p2ptrain rank"
        elif kind in status.WAITED_FOR:
            self._waits_for = ""
        elif kind == "same identity":
            self._duplicate = self._clock(), str(fields["where"])
        if kind != "progress" and self._news.is_news(kind, fields) and (text := line(kind, fields)) is not None:
            self._last_lines.append((self._clock(), text))

    # --- the watch ------------------------------------------------------------------------------------------------

    async def _sense(self, thread: DaemonThread) -> None:
        while True:
            self._reads_since = self._clock()
            self.readings = await thread.run(read, self._settings)
            self._reads_since = math.inf
            await asyncio.sleep(READ_S)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self.look()
            if self._clock() >= self._save_at:
                await asyncio.to_thread(self.save_if_due)  # a disk may be slow
            if self._server is not None and not self._server.exists():  # somebody has removed it
                self._server.close()
                await self._listen()

    def look(self) -> None:
        """Check for changes and apply them, every ``POLL_S``."""
        self._read()
        self._count()
        self._end_pause_if_due()
        if self._clock() - self._reads_since > OLD_S:
            self.readings = UNKNOWN
        self._note_faults()
        self._apply()

    async def _listen(self) -> None:
        self._server = server = ControlServer(self._home.path, self.answer)
        try:
            await server.start()
        except (OSError, DeviceError) as error:
            self._server = None
            why = error.problem.rstrip(".") if isinstance(error, DeviceError) else files.cause(error)
            self._notebook.note("no control socket", why=why)

    def _read(self) -> None:
        match self._file.changed():
            case Settings() as settings:
                self._accept(settings)
            case str(why) if why != self._fault:
                self._fault = why
                self._notebook.note("settings refused", why=why)

    def _note_faults(self) -> None:
        """Note each option that has no effect, once after each edit."""
        for option, why in self.readings.faults.items():
            if option not in self._noted_faults and getattr(self._settings, option):
                self._noted_faults.add(option)
                self._notebook.note("not in effect", option=option, why=why)

    def _accept(self, settings: Settings) -> None:
        old, self._settings, self._fault = self._settings, settings, ""
        self._noted_faults.clear()
        changes = [
            f"{name} {getattr(settings, name)!r}, before {getattr(old, name)!r}"
            + (" (from the next start)" if name in WAITING else "")
            for name in Settings.model_fields
            if getattr(settings, name) != getattr(old, name)
        ]
        self._notebook.note("settings", what="; ".join(changes) or "no changes")

    def _apply(self) -> None:
        self._rates.up.rate, self._rates.down.rate = self._settings.upload_rate, self._settings.download_rate
        before, self._decision = self._decision, self._decide()
        decision = self._decision
        self._rates.gives, self._rates.rests = decision.gives, decision.mode is not Mode.SWARM
        if decision.mode is not before.mode:
            match decision.mode:
                case Mode.PAUSED:
                    self._notebook.note("paused", why=decision.why)
                case Mode.SWARM:
                    self._notebook.note("called back")
        if decision.has_given_its_share and not before.has_given_its_share:
            self._notebook.note("share given", percent=round(100 * GIVEN_SHARE))
        handle = self._handle
        if handle is None:
            return
        if handle.participation is not None:
            handle.participation.set_mode(decision.mode)
            handle.participation.give(decision.gives)
        elif decision.mode is Mode.PAUSED:
            handle.control.hold()
        elif not self._signals.begin.is_set():
            handle.control.begin()

    def _decide(self) -> PolicyDecision:
        now = self._now()
        rest = self._rest_rule.reason(self._settings, self.readings, self._clock())
        month = self._traffic.month(now)
        return decide(self._settings, paused_until=self._paused_until, now=now, month=month, rest=rest)

    def _restore_pause(self) -> None:
        self._paused_until, fault = self._pause.load()
        if fault:
            self._notebook.note("pause not kept", why=fault)
        self._end_pause_if_due()
        if self._paused_until is not None:
            self._decision = self._decide()
            until = end_in_words(self._paused_until, self._now())
            self._notebook.note("still paused", home=str(self._home.path), until=until)

    def _end_pause_if_due(self) -> None:
        if self._paused_until is not None and self._now().timestamp() >= self._paused_until:
            self._keep_pause(None)

    def _keep_pause(self, until: float | None) -> None:
        self._paused_until = until
        if fault := self._pause.keep(until):
            self._notebook.note("pause not kept", why=fault)

    def _set_pause(self, until: float | None) -> None:
        self._keep_pause(until)
        self._apply()

    def _count(self) -> None:
        rates = self._rates
        now = rates.up.total_bytes, rates.down.total_bytes, rates.given_bytes
        sent, received, given = (count - counted for count, counted in zip(now, self._counted, strict=True))
        self._traffic.add(sent, received, given, self._now())
        self._counted = now
        self._samples.append((self._clock(), *now[:2]))

    def save_if_due(self) -> None:
        """Save the count of traffic every ``SAVE_PERIOD_S``."""
        if self._clock() >= self._save_at:
            self._save_at = self._clock() + SAVE_PERIOD_S
            self._save()

    def _save(self) -> None:
        try:
            self._traffic.save()
            self._is_saved = True
        except OSError as error:
            if self._is_saved:  # note it once, not at every try
                self._notebook.note("not counted", why=f"{self._traffic.path} cannot be written: {error.strerror}")
            self._is_saved = False

    # --- commands ---------------------------------------------------------------------------------------------------

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Carry out a command, or say why not; return the answer, with the status unless the command is unknown."""
        match request.get("command"):
            case "status":
                reply = ""
            case "pause":
                in_s = end_of(request.get("in_s"))
                if in_s is None:
                    return {"error": "no such time"}
                reply = self._pause_until(self._now().timestamp() + in_s)
            case "resume":
                reply = "resuming" if self._paused_until is not None else "not paused"
                self._set_pause(None)
                if self._decision.mode is Mode.PAUSED:
                    reply = f"still paused: {self._decision.why}"
            case "finish":
                reply = self._finish()
            case _:
                return {"error": "no such command"}
        return {"told": reply, "status": self._status()}

    def _pause_until(self, until: float) -> str:
        before, end = self._paused_until, end_in_words(until, self._now())
        is_same = before is not None and end_in_words(before, self._now()) == end
        self._set_pause(until)
        return ("pausing" if before is None else "already paused" if is_same else "now paused") + end

    def _finish(self) -> str:
        handle, last = self._handle, self._signals.last
        if self._signals.stop.is_set() or last.is_set():
            return "already finishing"
        if handle is None:
            os.kill(os.getpid(), signal.SIGTERM)  # there is no step to end yet: stop as Ctrl+C does
            return "stopping before training began"
        handle.control.finish()
        self._notebook.note("finishing")
        return "finishing"

    # --- figures for displays; safe from any thread -------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        handle, leaving = self._handle, self._signals.stop.is_set() or self._signals.last.is_set()
        record, participation = (None, None) if handle is None else (handle.record, handle.participation)
        state, reason = status.state_of(record, participation, self._decision.mode.name, leaving)
        if self._waits_for and not leaving:
            state, reason = "waiting", self._waits_for
        return state, reason if leaving else self._decision.why or reason

    def traffic(self) -> tuple[int, int]:
        return self._rates.up.total_bytes, self._rates.down.total_bytes

    def _status(self) -> dict[str, Any]:
        handle, participation = self._handle, None if self._handle is None else self._handle.participation
        state, why = self.state()
        sent_rate, received_rate = self.measured()
        month, allowed = self._traffic.month(self._now()), self._settings.monthly_bytes
        return {
            "state": state,
            "why": why,
            "pid": os.getpid(),
            "home": str(self._home.path),
            "training": None if handle is None else handle.record.figures(),
            "admission": "" if handle is None else handle.admission(),
            "duplicate": self._duplicate[1] if self._clock() - self._duplicate[0] < DUPLICATE_S else "",
            "peers": 0 if participation is None else participation.live_peers,
            "exchanges_under_way": 0 if participation is None else participation.exchanges_under_way,
            "rates": {"sent_bytes_per_s": round(sent_rate), "received_bytes_per_s": round(received_rate)},
            "month": {
                "sent_bytes": month.sent,
                "received_bytes": month.received,
                "given_bytes": month.given,
                "allowed_bytes": allowed if math.isfinite(allowed) else None,
            },
            "settings": self._settings.model_dump(),
            "settings_fault": self._fault,
            "not_in_effect": dict(self.readings.faults),
            "lines": [{"age_s": round(self._clock() - at), "line": text} for at, text in list(self._last_lines)],
        }

    def measured(self) -> tuple[float, float]:
        """Return bytes per second sent and received over the last ``MEASURED_S``."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (begun, sent, received), (at, sent_now, received_now) = self._samples[0], self._samples[-1]
        seconds = max(at - begun, POLL_S)
        return (sent_now - sent) / seconds, (received_now - received) / seconds
