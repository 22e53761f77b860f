"""Detection of a second process with this peer's identity: a copied home, or the image of a whole computer.

Both processes announce themselves under one peer id, so each finds presence records in the directory that its key
signed and that it did not issue itself. Nobody without the key can make such a record, and records of this home's
earlier processes do not count: ``HOME/announced`` holds the time of the last one. So a copy knows at its first lookup
if the other process has announced itself since the copy was made, else within a minute.

One of the two goes on. The last three digits of a record's time, its microseconds, hold its issuer's rank, which all
versions accept; the lower rank yields, and of equal ranks both.

==========  =====================================================================
rank        process
==========  =====================================================================
0           has yielded
1 to 110    has not trained yet
112 to 221  has trained for less than 20 s
...         and so on: each 111 more mean twice as long
889 to 998  has trained for 21 minutes or longer
==========  =====================================================================

Within a level the place is random. A process compares its rank now with that in the other's record, so the two agree
once both have been in one level.

A process that yields stops as at Ctrl+C, with an error at its end. It stays for ``LINGER_S`` and repeats the other's
last record, signed anew and with its own hosts added, in place of its own: the other process learns of it, and to other
peers little changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable
from random import SystemRandom

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import steady, wall
from p2ptrain.base.errors import HomeError, NetworkError
from p2ptrain.base.ids import short
from p2ptrain.base.text import command_line
from p2ptrain.net import address
from p2ptrain.ports import Clock, Notebook
from p2ptrain.swarm import PeerState, Presence
from peer.home import Home

RANKS, LEVELS, PLACES = 1000, 9, 111
FIRST_LEVEL_S = 20.0
"""Training time of the first level, the period of announcements."""
MAX_ISSUED = 4096
"""Records of this process that are remembered: those of 22 hours."""
NOTE_PERIOD_S = 600.0
LINGER_S, REPEAT_S = 50.0, 3.0
"""Seconds for which a process that yields repeats the other's record, and between two repetitions: the other process
looks up every 15 to 25 s and replaces the record every 20 s."""


def rank_of(issued_at: float) -> int:
    """Return the rank in a record's time; any number for records of older versions."""
    return _micros(issued_at) % RANKS


def _micros(issued_at: float) -> int:
    """Return a time in microseconds, so that what was written and read again is equal."""
    return round(issued_at * 1e6)


class IdentityWatch:
    """Watches for records of this identity that others issued. Runs in the loop."""

    def __init__(
        self,
        home: Home,
        notebook: Notebook,
        wall: Clock = wall,
        clock: Clock = steady,
        random: SystemRandom | None = None,
    ) -> None:
        self._stop: Callable[[], None] = lambda: None
        self.rival: Presence | None = None
        """Last record of the process that this one yields to; None if it yields to nobody."""
        self._home = home
        self._notebook = notebook
        self._wall = wall
        self._clock = clock
        self._place = (random or SystemRandom()).randrange(1, PLACES)
        self._trains_since = math.inf
        self._tick = 0
        self._issued: BoundedDict[int, None] = BoundedDict(MAX_ISSUED)
        """Times in microseconds."""
        self._last_issued = home.last_announced(default=wall())
        self._earlier = _micros(self._last_issued)
        self._note_at = -math.inf
        self._addresses: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        if self.rival is not None:
            return 0
        age_s = self._clock() - self._trains_since
        level = 0 if age_s < 0 else min(1 + int(age_s / FIRST_LEVEL_S).bit_length(), LEVELS - 1)
        return PLACES * level + self._place

    def stamped(self, presence: Presence) -> Presence:
        """Return the next record to sign: with its time and our rank, or the rival's record in place of ours."""
        if presence.state in (PeerState.TRAINING, PeerState.KEEPING):
            self._trains_since = min(self._trains_since, self._clock())
        self._tick = self._next_tick()
        now = (self._tick * 1000 + self.rank) / 1e6
        self._addresses = presence.addresses
        if self.rival is not None:
            presence = dataclasses.replace(self.rival, addresses=(*self.rival.addresses, *_undialable(presence)))
        presence = dataclasses.replace(presence, issued_at=now)
        self._issued[_micros(now)] = None
        self._last_issued = max(now, self._last_issued)
        with contextlib.suppress(HomeError):  # without it, a start soon after a crash may yield to its own record
            self._home.save_announced(self._last_issued)
        return presence

    def _next_tick(self) -> int:
        """Return the time in milliseconds, later than that of the last record unless the clock was set back."""
        tick = math.floor(self._wall() * 1000)
        return self._tick + 1 if 0 <= self._tick - tick < 1000 else tick

    def see(self, presence: Presence) -> None:
        """Compare a valid record of this identity with our own ones."""
        issued_at, micros = presence.issued_at, _micros(presence.issued_at)
        if micros <= self._earlier or micros in self._issued or presence.state is PeerState.LEAVING:
            return
        yields = rank_of(issued_at) >= self.rank > 0
        if self.rival is not None:
            if rank_of(issued_at):
                self.rival = presence
            return
        if not yields and self._clock() < self._note_at:
            return
        self._note_at = self._clock() + NOTE_PERIOD_S
        self._notebook.note(
            "same identity",
            name=short(presence.peer),
            where=self._where(presence),
            step=presence.step,
            yields=yields,
            command=self.command,
        )
        if yields:
            self.rival = presence
            self._stop()

    def stop_by(self, stop: Callable[[], None]) -> None:
        """Call ``stop``, which makes the trainer save and leave, once this process yields; at once if it has."""
        self._stop = stop
        if self.rival is not None:
            stop()

    @property
    def command(self) -> str:
        """Command that gives this home an identity of its own."""
        return command_line("p2ptrain", "identity", "--new", self._home.path.absolute())

    async def linger(self, announce: Callable[[], Awaitable[None]]) -> None:
        """Repeat the rival's record for a while, if this process yields."""
        if self.rival is None:
            return
        until = self._clock() + LINGER_S
        while self._clock() < until:
            with contextlib.suppress(NetworkError):
                await announce()
            await asyncio.sleep(REPEAT_S)

    def error(self) -> HomeError | None:
        """Return why this process ended, if it has yielded."""
        if self.rival is None:
            return None
        where = self._where(self.rival)
        return HomeError(
            f"Another process uses this peer's identity {short(self.rival.peer)}, at {where}. Only one can take part, "
            "so this one has stopped.",
            f"If this home was copied, give it an identity of its own, which keeps its checkpoint: {self.command}",
        )

    def _where(self, presence: Presence) -> str:
        others = [address.host_of(each) for each in presence.addresses if each not in self._addresses]
        return ", ".join(dict.fromkeys(others[:3])) or "an unknown address"


def _undialable(presence: Presence) -> list[str]:
    """Return a presence's hosts as addresses that tell where its process is, and that nobody can connect to."""
    return [address.multiaddress(address.host_of(each), 0) for each in presence.addresses if address.ip_of(each)]
